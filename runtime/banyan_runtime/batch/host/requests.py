"""What clients may ask for, checked: the fields of an upload and of a new batch, and the page of a list they want."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from banyan_runtime.batch.host.refusals import Refusal, invalid, missing

PURPOSES: Final = ("assistants", "batch", "fine-tune", "vision", "user_data", "evals")
BATCH_INPUT_DAYS: Final = 30  # what OpenAI keeps a batch's input without being told
EXPIRES_S: Final = (3600, 2_592_000)
WINDOW: Final = re.compile(r"([0-9]{1,6})([mhd])")
WINDOW_UNITS_S: Final = {"m": 60, "h": 3600, "d": 86400}
LONGEST_WINDOW_S: Final = 30 * 86400
MAX_PAIRS, MAX_KEY, MAX_VALUE = 16, 64, 512


@dataclass(frozen=True, slots=True)
class NewBatch:
    """A batch that somebody asks for."""

    input_file_id: str
    endpoint: str
    completion_window: str
    window_s: int
    metadata: dict[str, str] | None
    output_expires_after: int | None


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a list."""

    limit: int
    after: str | None
    order: Literal["asc", "desc"] = "desc"


def new_batch(body: Any, endpoints: Sequence[str]) -> NewBatch:
    """`endpoints`: what this server serves. Raises Refusal."""
    if not isinstance(body, dict):
        raise Refusal(400, "The body must be a JSON object.", code="invalid_type")
    input_file_id, endpoint, window = (_text(body, name) for name in ("input_file_id", "endpoint", "completion_window"))
    if endpoint not in endpoints:
        raise invalid("endpoint", f"Invalid value: '{endpoint[:200]}'. This server's batches may call: {', '.join(map(repr, endpoints))}.")
    matched = WINDOW.fullmatch(window)
    seconds = int(matched[1]) * WINDOW_UNITS_S[matched[2]] if matched else 0
    if not 60 <= seconds <= LONGEST_WINDOW_S:
        raise invalid("completion_window", f"Invalid value: '{window[:200]}'. Write '24h', or 1m to 30d in minutes (m), hours or days.")
    expires = _expires_after(body.get("output_expires_after"), "output_expires_after")
    return NewBatch(input_file_id, endpoint, window, seconds, _metadata(body.get("metadata")), expires)


def file_purpose(fields: Mapping[str, str]) -> str:
    """Raises Refusal."""
    purpose = fields.get("purpose")
    if purpose is None:
        raise missing("purpose")
    if purpose not in PURPOSES:
        raise invalid("purpose", f"Invalid value: '{purpose[:200]}'. Supported values are: {', '.join(map(repr, PURPOSES))}.")
    return purpose


def file_expiry(fields: Mapping[str, str], purpose: str) -> int | None:
    """Seconds for which a file is kept; None: until it is deleted. Raises Refusal."""
    if "expires_after" in fields:
        low, high = EXPIRES_S
        remedy = f"send the two fields 'expires_after[anchor]', 'created_at', and 'expires_after[seconds]', {low} to {high}"
        raise invalid("expires_after", f"Invalid 'expires_after': got '{fields['expires_after'][:100]}'; {remedy}.")
    given = {name.removeprefix("expires_after[").rstrip("]"): value for name, value in fields.items() if name.startswith("expires_after[")}
    if not given:
        return BATCH_INPUT_DAYS * 86400 if purpose == "batch" else None
    seconds = given.get("seconds", "")
    return _expires_after({**given, **({"seconds": int(seconds)} if re.fullmatch(r"[0-9]{1,9}", seconds) else {})}, "expires_after")


def page(query: Mapping[str, str], *, default: int, most: int) -> Page:
    """Raises Refusal."""
    limit, order, after = query.get("limit"), query.get("order", "desc"), query.get("after") or None
    if limit is not None and (not re.fullmatch(r"[0-9]{1,6}", limit) or not 1 <= int(limit) <= most):
        raise invalid("limit", f"Invalid 'limit': it must be a whole number from 1 to {most}.")
    if order not in ("asc", "desc"):
        raise invalid("order", "Invalid 'order': it must be 'asc' or 'desc'.")
    return Page(default if limit is None else int(limit), after, "asc" if order == "asc" else "desc")


def _text(body: dict[str, Any], name: str) -> str:
    value = body.get(name)
    if value is None:
        raise missing(name)
    if not isinstance(value, str):
        raise Refusal(400, f"Invalid type for '{name}': it must be a string.", code="invalid_type", param=name)
    return value


def _expires_after(value: Any, param: str) -> int | None:
    if value is None:
        return None
    low, high = EXPIRES_S
    seconds = value.get("seconds") if isinstance(value, dict) else None
    if not isinstance(value, dict) or value.get("anchor") != "created_at" or type(seconds) is not int or not low <= seconds <= high:
        raise invalid(param, f"Invalid '{param}': it must be {{'anchor': 'created_at', 'seconds': {low} to {high}}}.")
    return seconds


def _metadata(value: Any) -> dict[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise Refusal(400, "Invalid type for 'metadata': it must be an object.", code="invalid_type", param="metadata")
    if len(value) > MAX_PAIRS:
        raise invalid("metadata", f"Invalid 'metadata': it has {len(value)} pairs, at most {MAX_PAIRS} are kept.")
    for key, text in value.items():
        if len(key) > MAX_KEY:
            raise invalid(
                "metadata", f"Invalid 'metadata': the key '{key[:MAX_KEY]}…' has {len(key)} characters, at most {MAX_KEY} are allowed."
            )
        if not isinstance(text, str) or len(text) > MAX_VALUE:
            raise invalid("metadata", f"Invalid 'metadata.{key}': it must be a string of at most {MAX_VALUE} characters.")
    return value

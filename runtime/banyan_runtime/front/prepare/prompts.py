"""Prompts of a request: text or token ids, checked against the vocabulary and fitted into the context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from banyan_runtime import wire
from banyan_runtime.front.errors import ApiError, invalid, invalid_type
from banyan_runtime.front.parsing import shown

MAX_PROMPTS: Final = 1024


def as_ids(value: Any, param: str) -> list[int]:
    """A list of token ids as it came from JSON. Raises ApiError for anything else."""
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise invalid_type(param, "expected a list of token ids.")
    return value


def check_ids(ids: Sequence[int], info: wire.EngineInfo, param: str) -> None:
    """Raises ApiError unless every id is in the vocabulary."""
    if ids and (min(ids) < 0 or max(ids) >= info.vocab_size):
        wrong = next(token_id for token_id in ids if not 0 <= token_id < info.vocab_size)
        raise invalid(param, f"Token id {shown(wrong)} is out of vocabulary (0 to {info.vocab_size - 1}).")


def fit(length: int, asked: int | None, default: int | None, info: wire.EngineInfo, param: str, *, limit: str = "") -> int:
    """How many tokens may follow a prompt of so many.

    `asked` is the request's own limit, `default` (None: the rest of the context) what holds without one. Raises ApiError
    context_length_exceeded; the wording is matched by clients. `limit`: the field that `asked` comes from, which is at fault where no
    prompt would be short enough.
    """
    longest = info.max_model_len
    beside = 0 if asked == 0 else 1  # without a limit of its own a request wants a token at least
    if length > info.max_req_input_len or length + beside > longest:
        raise too_long(length, info, param)
    room = longest - length
    if asked is None:
        return room if default is None else min(default, room)
    if asked > room:
        raise _exceeded(
            f"This model's maximum context length is {longest} tokens. However, you requested {shown(length + asked)} tokens "
            f"({length} in the {param}, {shown(asked)} in the completion). Please reduce the length of the {param} or completion.",
            limit if limit and asked > longest else param,
            beside=[param],
        )
    return asked


def too_long(length: int, info: wire.EngineInfo, param: str, about: str = "") -> ApiError:
    """What a prompt of so many tokens is refused with. `about` stands before a number that is not exact."""
    limit = info.max_model_len if length >= info.max_model_len else info.max_req_input_len
    return _exceeded(
        f"This model's maximum context length is {limit} tokens. However, your prompt contains {about}{length} input tokens.", param
    )


def _exceeded(message: str, param: str, beside: Sequence[str] = ()) -> ApiError:
    # LangChain finds the condition by this word in the message.
    return ApiError(400, f"{message} (context_length_exceeded)", code="context_length_exceeded", param=param, beside=beside)

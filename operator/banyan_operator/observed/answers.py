"""What pods say of themselves over HTTP and in their last words, as far as it can be: what has not the form counts as not said.

A pod may run any image, and a status that the API server refuses would say nothing at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from banyan_operator.api.base import Model
from banyan_operator.api.status import RequestCounts, Usage

M = TypeVar("M", bound=Model)

MAX_INT32: Final = 2**31 - 1
MAX_INT64: Final = 2**63 - 1
MAX_ETA_S: Final = 10 * 365 * 86400.0
MAX_VERSION: Final = 64  # characters, as of status.runtimeVersion
MAX_WORDS: Final = 512


@dataclass(frozen=True, slots=True)
class Progress:
    """A batch worker's GET /progress."""

    phase: str
    counts: RequestCounts | None
    usage: Usage | None
    tokens_per_second: int | None
    eta_s: float | None

    @staticmethod
    def of(body: Mapping[str, Any] | None) -> Progress | None:
        """None where the worker did not answer."""
        if body is None:
            return None
        rate = _number(body.get("tokensPerSecond"), MAX_INT32)
        return Progress(
            phase=_text(body.get("phase"), MAX_WORDS),
            counts=counts(body),
            usage=usage(body.get("usage")),
            tokens_per_second=None if rate is None else round(rate),
            eta_s=_number(body.get("etaSeconds"), MAX_ETA_S),
        )


@dataclass(frozen=True, slots=True)
class Readiness:
    """A server's GET /readyz."""

    state: str
    percent: int
    detail: str
    version: str | None
    context_length: int | None  # tokens

    @staticmethod
    def of(body: Mapping[str, Any] | None) -> Readiness | None:
        """None where the server did not answer."""
        if not body:
            return None
        model = body.get("model")
        percent = _number(body.get("percent"), 100)
        return Readiness(
            state=_text(body.get("state"), MAX_WORDS) or "loading",
            percent=0 if percent is None else int(percent),
            detail=_text(body.get("detail"), MAX_WORDS),
            version=_text(body.get("version"), MAX_VERSION) or None,
            context_length=_whole(model.get("contextLength"), MAX_INT32) if isinstance(model, Mapping) else None,
        )


def counts(body: Any) -> RequestCounts | None:
    """The numbers of requests in `body`; None where there are none, or one is no such number."""
    return _read(RequestCounts, body)


def usage(body: Any) -> Usage | None:
    """The numbers of tokens in `body`, likewise."""
    return _read(Usage, body)


def _read(model: type[M], body: Any) -> M | None:
    if not isinstance(body, Mapping):
        return None
    names = {field.alias for field in model.model_fields.values()}
    present = {key: value for key, value in body.items() if value is not None and key in names}
    if not present or any(_whole(value, MAX_INT64) is None for value in present.values()):
        return None
    return model.model_validate(present, by_alias=True, by_name=False)


def _whole(value: Any, most: int) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most else None


def _number(value: Any, most: float) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= most or not math.isfinite(value):
        return None
    return float(value)


def _text(value: Any, most: int) -> str:
    return value if isinstance(value, str) and len(value) <= most else ""

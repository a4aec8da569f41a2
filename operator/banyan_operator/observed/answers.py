"""What pods say of themselves over HTTP and in their last words, as far as it can be: what has not the form counts as not said.

A pod may run any image, and a status that the API server refuses would say nothing at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from banyan_operator.api.base import Model
from banyan_operator.api.status import RequestCounts, Shards, Usage

M = TypeVar("M", bound=Model)

MAX_INT32: Final = 2**31 - 1
MAX_INT64: Final = 2**63 - 1
MAX_ETA_S: Final = 10 * 365 * 86400.0
MAX_VERSION: Final = 64  # characters, as of status.runtimeVersion
MAX_WORDS: Final = 512


@dataclass(frozen=True, slots=True)
class Progress:
    """What the workers of a batch say at GET /progress, taken together.

    Each tells of the whole run as far as it knows, and of its own rates: the one that knows most counts, and rates add up.
    """

    counts: RequestCounts | None
    usage: Usage | None
    shards: Shards | None
    tokens_per_second: int | None
    requests_per_second: float | None
    workers: int  # that answered

    @staticmethod
    def of(bodies: Iterable[Mapping[str, Any]]) -> Progress | None:
        """None where no worker answered."""
        known = list(bodies)
        if not known:
            return None
        tokens = _sum(_number(body.get("tokensPerSecond"), MAX_INT32) for body in known)
        return Progress(
            counts=_most((counts(body) for body in known), finished),
            usage=_most((usage(body.get("usage")) for body in known), lambda one: one.total_tokens or 0),
            shards=_of_all([one for body in known if (one := shards(body.get("shards"))) is not None]),
            tokens_per_second=None if tokens is None else round(tokens),
            requests_per_second=_sum(_number(body.get("requestsPerSecond"), MAX_INT32) for body in known),
            workers=len(known),
        )


def _of_all(told: list[Shards]) -> Shards | None:
    """Each worker knows how many are done of the whole run, and which it works on itself. One that has not read the plan tells of none."""
    most = max(told, key=lambda one: (one.completed or 0, one.total or 0), default=None)
    return most and most.model_copy(update={"running": sum(one.running or 0 for one in told)})


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


def shards(body: Any) -> Shards | None:
    """The numbers of shards in `body`, likewise."""
    return _read(Shards, body, MAX_INT32)


def whole(value: Any) -> int | None:
    """`value` where it is a number that a status can hold as a count."""
    return _whole(value, MAX_INT32)


def finished(counted: RequestCounts) -> int:
    """How many requests have had their answer."""
    return (counted.completed or 0) + (counted.failed or 0)


def _most(said: Iterable[M | None], amount: Callable[[M], int]) -> M | None:
    return max((one for one in said if one is not None), key=amount, default=None)


def _sum(numbers: Iterable[float | None]) -> float | None:
    known = [number for number in numbers if number is not None]
    return sum(known) if known else None


def _read(model: type[M], body: Any, most: int = MAX_INT64) -> M | None:
    if not isinstance(body, Mapping):
        return None
    names = {field.alias for field in model.model_fields.values()}
    present = {key: value for key, value in body.items() if value is not None and key in names}
    if not present or any(_whole(value, most) is None for value in present.values()):
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

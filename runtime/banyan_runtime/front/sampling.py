"""Sampling fields of a request: checked, filled with defaults, and turned into what the engine takes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from banyan_runtime import wire
from banyan_runtime.front.errors import ApiError, invalid
from banyan_runtime.front.limits import MAX_CHOICES

MAX_STOPS: Final = 32
_MASK: Final = (1 << 64) - 1
_NEUTRAL: Final[Mapping[str, float]] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}


@dataclass(frozen=True, kw_only=True)
class SamplingFields:
    """A request's sampling fields as they came; None: not given. `names` are the fields' names where they differ from ours."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    max_temperature: float | None = 2.0
    min_max_tokens: int = 1

    def name(self, ours: str) -> str:
        return self.names.get(ours, ours)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Checked sampling of one request; `sampling()` makes the engine's part for one of its sequences."""

    values: Mapping[str, float]
    min_tokens: int
    max_tokens: int | None
    seed: int | None
    n: int
    stops: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    skip_special_tokens: bool
    include_stop: bool

    def sampling(self, max_new_tokens: int, request_id: str, random_seed: int, index: int) -> wire.Sampling:
        """For sequence `index` of the request. Without a seed each request draws its own from its id."""
        if self.seed is None:
            digest = hashlib.blake2b(f"{random_seed}:{request_id}".encode(), digest_size=8).digest()
            seed = int.from_bytes(digest, "little")
        else:
            seed = self.seed
        values = self.values
        return wire.Sampling(
            max_new_tokens=max_new_tokens,
            min_new_tokens=min(self.min_tokens, max_new_tokens),
            temperature=values["temperature"],
            top_k=int(values["top_k"]),
            top_p=values["top_p"],
            min_p=values["min_p"],
            frequency_penalty=values["frequency_penalty"],
            presence_penalty=values["presence_penalty"],
            repetition_penalty=values["repetition_penalty"],
            seed=(seed + index) & _MASK,
            stop_token_ids=self.stop_token_ids,
        )


def resolve(fields: SamplingFields, defaults: Mapping[str, float], eos_ids: frozenset[int], vocab_size: int) -> SamplingParams:
    """Check the fields and fill in what was not given: first from `defaults`, then neutral. Raises ApiError."""
    _check_range(fields, "temperature", fields.temperature, 0, fields.max_temperature)
    _check_range(fields, "top_p", fields.top_p, 0, 1, low_open=True)
    _check_range(fields, "min_p", fields.min_p, 0, 1)
    _check_range(fields, "frequency_penalty", fields.frequency_penalty, -2, 2)
    _check_range(fields, "presence_penalty", fields.presence_penalty, -2, 2)
    _check_range(fields, "repetition_penalty", fields.repetition_penalty, 0, 2, low_open=True)
    if fields.top_k is not None and fields.top_k < -1:
        raise _below("top_k", f"top_k must be -1 (off), 0 (off) or at least 1, got {fields.top_k}.")
    for ours, value, low in (
        ("max_tokens", fields.max_tokens, fields.min_max_tokens),
        ("min_tokens", fields.min_tokens, 0),
        ("n", fields.n, 1),
    ):
        if value is not None and value < low:
            raise _below(fields.name(ours), f"{fields.name(ours)} must be at least {low}, got {value}.")
    if fields.n is not None and fields.n > MAX_CHOICES:
        raise invalid(fields.name("n"), f"{fields.name('n')} must be at most {MAX_CHOICES}, got {fields.n}.", "integer_above_max_value")
    min_tokens = fields.min_tokens or 0
    if fields.max_tokens is not None and min_tokens > fields.max_tokens:
        name = fields.name("min_tokens")
        raise invalid(
            name,
            f"{name} must be at most {fields.name('max_tokens')}={fields.max_tokens}, got {min_tokens}.",
            "integer_above_max_value",
        )
    if fields.seed is not None and not -(1 << 63) <= fields.seed < 1 << 63:
        raise invalid(fields.name("seed"), f"{fields.name('seed')} must be a 64-bit integer, got {str(fields.seed)[:40]}.")
    stop_ids = set(fields.stop_token_ids or ())
    for token_id in stop_ids:
        if not 0 <= token_id < vocab_size:
            raise invalid("stop_token_ids", f"stop_token_ids must be in [0, {vocab_size - 1}], got {str(token_id)[:40]}.")
    if not fields.ignore_eos:
        stop_ids |= {token_id for token_id in eos_ids if 0 <= token_id < vocab_size}
    values = {
        name: given if (given := getattr(fields, name)) is not None else defaults.get(name, neutral) for name, neutral in _NEUTRAL.items()
    }
    if not 0 < values["top_k"] < vocab_size:
        values["top_k"] = -1
    return SamplingParams(
        values=values,
        min_tokens=min_tokens,
        max_tokens=fields.max_tokens,
        seed=fields.seed,
        n=fields.n or 1,
        stops=_stops(fields),
        stop_token_ids=tuple(sorted(stop_ids)),
        skip_special_tokens=fields.skip_special_tokens is not False,
        include_stop=fields.include_stop,
    )


def _stops(fields: SamplingFields) -> tuple[str, ...]:
    if fields.stop is None:
        return ()
    stops = (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop)
    if len(stops) > MAX_STOPS:
        raise invalid("stop", f"at most {MAX_STOPS} stop strings are allowed, got {len(stops)}", "array_above_max_length")
    if not all(stops):
        raise invalid("stop", "stop must not contain an empty string.", "empty_string")
    return tuple(dict.fromkeys(stops))


def _check_range(fields: SamplingFields, ours: str, value: float | None, low: float, high: float | None, *, low_open: bool = False) -> None:
    if value is None:
        return
    name = fields.name(ours)
    below = value < low or (low_open and value == low)
    above = high is not None and value > high
    if not below and not above:
        return
    allowed = f"be at least {low}" if high is None else f"be in {'(' if low_open else '['}{low:g}, {high:g}]"
    message = f"{name} must {allowed}, got {value}."
    raise invalid(name, message, "decimal_below_min_value" if below else "decimal_above_max_value")


def _below(name: str, message: str) -> ApiError:
    return invalid(name, message, "integer_below_min_value")

"""Sampling fields of a request: checked, filled with defaults, and turned into what the engine takes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

from banyan_runtime import wire
from banyan_runtime.front.errors import ApiError, invalid
from banyan_runtime.front.parsing import Int, Ints, Number, RequestModel, Texts, shown

MAX_CHOICES: Final = 128
MAX_STOPS: Final = 32
MAX_STOP_CHARACTERS: Final = 1024  # each is looked for in every piece of text that comes
MAX_STOP_IDS: Final = 1024
MAX_BIASES: Final = 1024
MAX_BIAS: Final = 100
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


@dataclass(frozen=True, slots=True)
class Range:
    """The values that a sampling field may have; `open_low`: the lowest one itself is not among them."""

    low: float
    high: float
    open_low: bool = False

    def below(self, value: float) -> bool:
        return value < self.low or (self.open_low and value == self.low)

    def __contains__(self, value: float) -> bool:
        return not self.below(value) and value <= self.high

    def __str__(self) -> str:
        return f"{'(' if self.open_low else '['}{self.low:g}, {self.high:g}]"


RANGES: Final[Mapping[str, Range]] = {
    "temperature": Range(0, 2),
    "top_p": Range(0, 1, open_low=True),
    "min_p": Range(0, 1),
    "frequency_penalty": Range(-2, 2),
    "presence_penalty": Range(-2, 2),
    "repetition_penalty": Range(0.01, 2),  # logits are divided by it: far smaller ones overflow
}
ANY_TEMPERATURE: Final = Range(0, 1e6)  # /generate takes whatever can be computed with


class SamplingFields(RequestModel):
    """The sampling fields of a request, whatever endpoint it came to; None: not given.

    An endpoint with another word for one has it as the field's alias.
    """

    TEMPERATURES: ClassVar = RANGES["temperature"]
    LEAST_MAX_TOKENS: ClassVar = 1

    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Int | None = None
    min_p: Number | None = None
    frequency_penalty: Number | None = None
    presence_penalty: Number | None = None
    repetition_penalty: Number | None = None
    max_tokens: Int | None = None
    min_tokens: Int | None = None
    seed: Int | None = None
    n: Int | None = None
    stop: str | Texts | None = None
    stop_token_ids: Ints | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool = False
    logit_bias: dict[str, Number] | None = None

    @classmethod
    def word(cls, ours: str) -> str:
        """The client's word for a field."""
        return cls.model_fields[ours].alias or ours

    @property
    def limit(self) -> tuple[str, int | None]:
        """How many tokens may be generated, behind the client's word for it."""
        return self.word("max_tokens"), self.max_tokens

    @property
    def include_stop(self) -> bool:
        """Whether a stop string stays in the text."""
        return self.no_stop_trim


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Checked sampling of one request; `sampling()` makes the engine's part for one of its sequences."""

    values: Mapping[str, float]
    min_tokens: int
    min_tokens_name: str  # the client's word for it
    max_tokens: int | None
    max_tokens_name: str  # likewise
    seed: int | None
    n: int
    stops: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    end_ids: tuple[int, ...]  # of these those that end a text for every client
    skip_special_tokens: bool
    include_stop: bool
    bias_ids: bytes  # wire.pack_ids
    bias_values: bytes  # float32

    def sampling(self, max_new_tokens: int, seed_id: str, random_seed: int, index: int, *, ends_alone: bool = False) -> wire.Sampling:
        """For choice `index` of a prompt. Without a seed each prompt draws its own from `seed_id`. `ends_alone`: of the stop tokens the
        engine learns no more than `end_ids`.

        Raises ApiError when more tokens must be generated than can be.
        """
        if self.min_tokens > max_new_tokens:
            name = self.min_tokens_name
            message = f"{name} must be at most {max_new_tokens}, the tokens that may be generated here, got {shown(self.min_tokens)}."
            raise invalid(name, message, "integer_above_max_value")
        values = self.values
        return wire.Sampling(
            max_new_tokens=max_new_tokens,
            min_new_tokens=self.min_tokens,
            temperature=values["temperature"],
            top_k=int(values["top_k"]),
            top_p=values["top_p"],
            min_p=values["min_p"],
            frequency_penalty=values["frequency_penalty"],
            presence_penalty=values["presence_penalty"],
            repetition_penalty=values["repetition_penalty"],
            seed=_seed(_digest(f"{random_seed}:{seed_id}") if self.seed is None else self.seed & _MASK, index),
            stop_token_ids=self.end_ids if ends_alone else self.stop_token_ids,
            bias_ids=self.bias_ids,
            bias_values=self.bias_values,
        )


def _seed(seed: int, index: int) -> int:
    """The seed of choice `index`. Choice 0 is what a request for one choice gives; the others share none with seeds near by."""
    return _digest(f"{seed}:{index}") if index else seed


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def resolve(fields: SamplingFields, defaults: Mapping[str, float], eos_ids: frozenset[int], vocab_size: int) -> SamplingParams:
    """Check the fields and fill in what was not given: first from `defaults`, then neutral. Raises ApiError."""
    for name, allowed in RANGES.items():
        _check_range(name, getattr(fields, name), fields.TEMPERATURES if name == "temperature" else allowed)
    if fields.top_k is not None and fields.top_k < -1:
        raise _below("top_k", f"top_k must be -1 (off), 0 (off) or at least 1, got {shown(fields.top_k)}.")
    max_name, max_tokens = fields.limit
    min_name, min_tokens = fields.word("min_tokens"), fields.min_tokens or 0
    for name, number, low in ((max_name, max_tokens, fields.LEAST_MAX_TOKENS), (min_name, min_tokens, 0), ("n", fields.n, 1)):
        if number is not None and number < low:
            raise _below(name, f"{name} must be at least {low}, got {shown(number)}.")
    if fields.n is not None and fields.n > MAX_CHOICES:
        raise invalid("n", f"n must be at most {MAX_CHOICES}, got {shown(fields.n)}.", "integer_above_max_value")
    if max_tokens is not None and min_tokens > max_tokens:
        message = f"{min_name} must be at most {max_name}={shown(max_tokens)}, got {shown(min_tokens)}."
        raise invalid(min_name, message, "integer_above_max_value", [max_name])
    if fields.seed is not None and not -(1 << 63) <= fields.seed < 1 << 63:
        name = fields.word("seed")
        raise invalid(name, f"{name} must be a 64-bit integer, got {shown(fields.seed)}.")
    values = {
        name: given if (given := getattr(fields, name)) is not None else defaults.get(name, neutral) for name, neutral in _NEUTRAL.items()
    }
    if not 0 < values["top_k"] < vocab_size:
        values["top_k"] = -1
    return SamplingParams(
        values=values,
        min_tokens=min_tokens,
        min_tokens_name=min_name,
        max_tokens=max_tokens,
        max_tokens_name=max_name,
        seed=fields.seed,
        n=fields.n or 1,
        stops=_stops(fields),
        stop_token_ids=(stop_ids := _stop_ids(fields, eos_ids, vocab_size)),
        end_ids=tuple(token_id for token_id in stop_ids if token_id in eos_ids),
        skip_special_tokens=fields.skip_special_tokens is not False,
        include_stop=fields.include_stop,
        **_biases(fields, vocab_size),
    )


def _biases(fields: SamplingFields, vocab_size: int) -> dict[str, bytes]:
    given = fields.logit_bias or {}
    if len(given) > MAX_BIASES:
        message = f"at most {MAX_BIASES} tokens can have a bias, got {len(given)}"
        raise invalid("logit_bias", message, "object_above_max_properties")
    for name, value in given.items():
        if not (name.isascii() and name.isdigit() and len(name) < 10 and int(name) < vocab_size):
            raise invalid("logit_bias", f"The keys of logit_bias must be token ids in [0, {vocab_size}), got '{name[:20]}'.")
        if not -MAX_BIAS <= value <= MAX_BIAS:
            raise invalid("logit_bias", f"logit_bias must be in [-{MAX_BIAS}, {MAX_BIAS}], got {shown(value)} for token {name}.")
    values = {int(name): float(value) for name, value in given.items()}
    return {"bias_ids": wire.pack_ids(list(values)), "bias_values": wire.pack_floats(list(values.values()))}


def _stops(fields: SamplingFields) -> tuple[str, ...]:
    if fields.stop is None:
        return ()
    stops = (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop)
    if len(stops) > MAX_STOPS:
        raise invalid("stop", f"at most {MAX_STOPS} stop strings are allowed, got {len(stops)}", "array_above_max_length")
    if not all(stops):
        raise invalid("stop", "stop must not contain an empty string.", "empty_string")
    longest = max(map(len, stops), default=0)
    if longest > MAX_STOP_CHARACTERS:
        message = f"a stop string can have at most {MAX_STOP_CHARACTERS} characters, got {longest}."
        raise invalid("stop", message, "string_above_max_length")
    return tuple(dict.fromkeys(stops))


def _stop_ids(fields: SamplingFields, eos_ids: frozenset[int], vocab_size: int) -> tuple[int, ...]:
    given = fields.stop_token_ids or ()
    if len(given) > MAX_STOP_IDS:
        message = f"at most {MAX_STOP_IDS} stop token ids are allowed, got {len(given)}"
        raise invalid("stop_token_ids", message, "array_above_max_length")
    for token_id in given:
        if not 0 <= token_id < vocab_size:
            raise invalid("stop_token_ids", f"stop_token_ids must be in [0, {vocab_size - 1}], got {shown(token_id)}.")
    ids = {*given, *(() if fields.ignore_eos else (token_id for token_id in eos_ids if 0 <= token_id < vocab_size))}
    if fields.min_tokens and len(ids) >= vocab_size:  # none of them may come before min_tokens are there
        message = f"stop_token_ids leaves no token of the vocabulary that {fields.word('min_tokens')} could be made of."
        raise invalid("stop_token_ids", message)
    return tuple(sorted(ids))


def _check_range(name: str, value: float | None, allowed: Range) -> None:
    if value is None or value in allowed:
        return
    code = "decimal_below_min_value" if allowed.below(value) else "decimal_above_max_value"
    raise invalid(name, f"{name} must be in {allowed}, got {shown(value)}.", code)


def _below(name: str, message: str) -> ApiError:
    return invalid(name, message, "integer_below_min_value")

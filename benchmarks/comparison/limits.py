"""The least time that a machine needs for a plan, by arithmetic: weights and keys and values read once a step, multiplications done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from load.plan import Plan

BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class Machine:
    """What was measured of it in the same minutes: bytes read a second, and multiplications and additions a second."""

    bytes_s: float
    flop_s: float


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a Llama or Qwen2 model; `weight_bytes` of a parameter."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    weight_bytes: float = BF16_BYTES

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape:
        """From a config.json. Raises KeyError for a key that is missing."""
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        return cls(
            config["num_hidden_layers"], hidden, config["intermediate_size"], heads, config.get("num_key_value_heads", heads),
            config.get("head_dim") or hidden // heads, config["vocab_size"],
        )  # fmt: skip

    @property
    def block_parameters(self) -> int:
        """Of all layers, without embedding and head."""
        attention = self.hidden * (self.heads + 2 * self.kv_heads) * self.head_dim + self.hidden * self.heads * self.head_dim
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_parameters(self) -> int:
        return self.vocab * self.hidden

    @property
    def streamed_bytes(self) -> float:
        """What a decode step reads of the weights; of the embedding it reads a row a token."""
        return self.weight_bytes * (self.block_parameters + self.head_parameters)

    @property
    def kv_bytes(self) -> int:
        """Of a token's keys and values."""
        return self.layers * 2 * self.kv_heads * self.head_dim * BF16_BYTES

    def decode_s(self, machine: Machine, batch: float, context: float) -> float:
        """One decode step of `batch` sequences of `context` tokens."""
        attention = 4 * self.layers * self.heads * self.head_dim * context
        flop = batch * (2 * self.block_parameters + 2 * self.head_parameters + attention)
        return max((self.streamed_bytes + batch * context * self.kv_bytes) / machine.bytes_s, flop / machine.flop_s)

    def prefill_s(self, machine: Machine, new: int, cached: int = 0) -> float:
        """A prompt of `new` tokens behind `cached` ones. Only its last token needs the head."""
        pairs = new * cached + new * (new - 1) / 2
        flop = 2 * self.block_parameters * new + 4 * self.layers * self.heads * self.head_dim * pairs + 2 * self.head_parameters
        return flop / machine.flop_s


def least_s(plan: Plan, shape: Shape, machine: Machine, before: Sequence[Plan] = ()) -> float | None:
    """The least wall time of `plan` after the plans `before`: each prefix computed once, then decode steps of all places together.

    None where time is no matter of the machine's: requests that come at given times, and conversations, whose prompts are not known.
    """
    if plan.conversation or any(session.due_s for session in plan.sessions):
        return None
    known = [ask.prompt for earlier in before for ask in earlier.asks]
    prefill_s = 0.0
    for ask in plan.asks:
        # The last token's logits are always computed.
        cached = min(max((_shared(ask.prompt, other) for other in known), default=0), len(ask.prompt) - 1)
        prefill_s += shape.prefill_s(machine, len(ask.prompt) - cached, cached)
        known.append(ask.prompt)
    steps = sum(ask.max_tokens - 1 for ask in plan.asks) / plan.concurrent
    context = sum((len(ask.prompt) + ask.max_tokens / 2) * ask.max_tokens for ask in plan.asks) / plan.output_tokens
    return prefill_s + steps * shape.decode_s(machine, plan.concurrent, context)


def _shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many tokens both begin with."""
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))

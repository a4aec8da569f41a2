"""What one kind of runner computes in its own way: token ids → hidden states → logits. The rest of a step is `runner.py`'s."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from banyan_runtime.config import ServerConfig
from banyan_runtime.model.blocks import Parameter
from banyan_runtime.model.choice import Choice
from banyan_runtime.model.post import Arriving
from banyan_runtime.model.table import SlotTable
from banyan_runtime.models.config import Feature
from banyan_runtime.step import I32, Pulse, SamplingColumns, Step, TokenMask


@dataclass(frozen=True, slots=True)
class Captured:
    """What capturing graphs took."""

    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Picked:
    """Tokens of rows, on the device, where the next step writes over them."""

    tokens: Tensor  # int64 [n]; of failed rows some ids of the vocabulary
    failed: Tensor  # bool [n]: a row's logits hold NaN, or the largest is infinite
    arriving: Arriving | None = None  # they are noted as their rows' latest, and on their way; None: they are not


class Forward(Protocol):
    """The decoder over its paged KV pool. Results are torch tensors on the device that computes."""

    @property
    def kv_bytes(self) -> int: ...

    @property
    def batch_invariant(self) -> bool:
        """Whether the bits of a token's results are the same whatever else is in the step."""

    def reserve(self, rows: int, positions: int, latest: Tensor) -> Captured | None:
        """Called once, before the first step: so many sequences may be in a step, none longer than `positions`.

        `latest` int64 [rows] on the device, where it stays: the last token of each row, which a step may leave it to find.
        The result is of graphs, where there are any.
        """

    def replayed(self, step: Step, table: SlotTable) -> Tensor | None:
        """As `hidden`, by replaying a captured graph, which finds the tokens by itself; None: there is none for such a step.
        The result is written over by the next step."""

    def hidden(self, step: Step, token_ids: Tensor, table: SlotTable) -> Tensor:
        """Last hidden states [T, hidden_size] of the step's tokens.

        `token_ids` int64 [T]: those of the step, with tokens that were in flight filled in. The table has taken the step in.
        Keys and values of the tokens are stored in the step's slots.
        """

    def retell(self, table: SlotTable) -> None:
        """A step ended somewhere for want of memory, so what it told the device of the table is not known: tell all of it."""

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits [n, vocab_size] of n hidden states. The caller may write into them, until the next call."""

    def pick(self, hidden: Tensor, columns: SamplingColumns | None, positions: I32) -> Picked:
        """One token for each of n hidden states: as `sample` draws it, or without columns that with the largest logit, of equal ones the
        first."""

    def deliver(self, tokens: Tensor, failed: Tensor, owners: Tensor, latest: Tensor) -> Arriving | None:
        """As `Mail.deliver`."""

    def allow(self, logits: Tensor, mask: TokenMask, picked: npt.NDArray[np.int64]) -> None:
        """Forbid in fp32 logits [n, vocab_size] of the sequences `picked` [n] what their masks do not allow, as `edits.allow`."""

    def sample(self, logits: Tensor, columns: SamplingColumns, positions: I32) -> tuple[Tensor, Tensor]:
        """One token for each row of fp32 logits [n, vocab_size], as `sampler.sample` draws it; which rows failed, bool [n]."""

    def normed(self, hidden: Tensor) -> Tensor:
        """n hidden states as the head reads them, [n, hidden_size]."""


class Model(Protocol):
    """Weights in the form that one kind of runner computes with."""

    weights_bytes: int

    def forward(self, pool_tokens: int, page_size: int, *, autotune: bool = False) -> Forward:
        """Allocate the KV pool for so many tokens. `autotune`: kernels are measured before graphs are captured."""


class ModelKind(Protocol):
    """A kind of runner: a class."""

    name: str
    own_attention: bool  # else it computes with one of the attention backends
    takes_blocks: bool  # else its weights are plain, whatever they were in their files
    torch_threads: bool  # torch's threads compute, else threads of its own
    implements: frozenset[Feature]  # of models
    fast_bf16: bool  # bfloat16 is fast without instructions for it

    def refusal(self, config: ServerConfig, device: torch.device) -> str | None:
        """Why this kind cannot compute there, in words that go on after "the NAME runner is not used:"; or None."""

    def __call__(self, choice: Choice, parameters: dict[str, Parameter], pulse: Pulse) -> Model:
        """Takes parameters over: each leaves the dict when it is in its new form, so that memory never holds both."""

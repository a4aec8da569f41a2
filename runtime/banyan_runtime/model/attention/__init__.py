"""Attention backends: objects behind one protocol, chosen once at start. Each sees the KV pool and a step's numpy columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from banyan_runtime.model.pool import Cells, KvPool
from banyan_runtime.model.table import DeviceTable, SlotTable
from banyan_runtime.models.config import DecoderSpec
from banyan_runtime.step import I32, Pulse, Step, TableShape

SEQUENCES: Final = 256
"""Of a step of several tokens each that is replayed, at most: attention makes room for the ends of so many."""
TOKENS_EACH: Final = 4
"""Of the sequences of such a step on average, at least: for more sequences FlashInfer cuts its tiles smaller."""
OWN: Final = 5
"""Columns of a held step that are the attention's: for our kernels, four that describe tiles and one number beside them."""
_COLUMNS: Final = 6  # beside those


class Attention(Protocol):
    """Attention over the paged KV pool."""

    name: str
    cells: Cells  # of the planned step's tokens

    def plan(self, step: Step, table: SlotTable) -> None:
        """Prepare what all layers of a step share: where keys lie, which of them each query sees. The table has taken the step in."""

    def attend(self, layer: int, q: Tensor, sinks: Tensor | None = None) -> Tensor:
        """q [T, heads, head_dim] and the result [T, heads, value_size]. The keys and values of the step's tokens are in their cells.
        `sinks` [heads]: of a layer that has some, logits that take a share of the weights and have no key.

        Prefill and decode are told apart by the plan: a query sees the positions up
        to its own, whether they were computed in this step, an earlier one, or by another request with the same prefix.
        """


@dataclass(frozen=True, slots=True)
class Held:
    """A step in memory on the device that stays while steps change: one block of columns, int32 [tokens] each.

    Padded tokens see no key and write to the padding slot; what they give means nothing.
    """

    told: Tensor  # int32 [columns, tokens at least]: those below, in this order
    ids: Tensor  # tokens; negative: the latest one of its row
    rows: Tensor
    positions: Tensor
    slots: Tensor  # where keys and values go
    counts: Tensor  # 1, or 0 of a padded token
    ends: Tensor  # keys that are seen
    own: Tensor  # [OWN, tokens] what the attention has to say
    sequences: int | None  # at most, of as many tokens as there are together; None: a decode step's, of one each

    @classmethod
    def empty(cls, size: int, device: torch.device, sequences: int | None = None) -> Held:
        """For so many tokens."""
        # Columns that begin at multiples of 16 bytes: for others Triton would compile its kernels once more.
        told = torch.zeros(_COLUMNS + OWN, -(-size // 4) * 4, dtype=torch.int32, device=device)
        ids, rows, positions, slots, counts, ends = told[:_COLUMNS, :size].unbind(0)
        return cls(told, ids, rows, positions, slots, counts, ends, told[_COLUMNS:, :size], sequences)

    @property
    def size(self) -> int:
        """Tokens."""
        return len(self.ids)

    def tell(self, step: Step, own: I32, bring: Callable[[I32, Tensor], None]) -> None:
        """Of a step of as many tokens or fewer, in one letter. `bring`: as `Mail.bring`, or `Post.tell`."""
        told = np.zeros(tuple(self.told.shape), np.int32)  # of padded tokens: no key is seen, and PADDING_SLOT is 0
        tokens = len(step.token_ids)
        rows = step.rows if len(step.rows) == tokens else np.repeat(step.rows, step.query_lens)
        columns = (step.token_ids, rows, step.positions, step.out_slots, 1, step.positions + 1)
        for column, values in zip(told[:_COLUMNS], columns, strict=True):
            column[:tokens] = values
        told[_COLUMNS:, : self.size] = own
        bring(told, self.told)


def most_sequences(tokens: int) -> int:
    """Of a step of several tokens each that is replayed as one of so many tokens."""
    return max(1, min(tokens // TOKENS_EACH, SEQUENCES))


@runtime_checkable
class Replayed(Attention, Protocol):
    """Attention whose steps can be captured as graphs: kernels are launched over memory that stays, and steps are filled in."""

    def reserve(self, shape: TableShape) -> DeviceTable:
        """Called before the first step, with the size of the table that all steps are planned with: where keys lie, on the device. Whoever
        else computes a step makes it follow."""

    def hold(self, steps: Sequence[Held]) -> None:
        """Allocate what these steps need beside what they are told. Called once."""

    def plan_held(self, held: Held) -> None:
        """What is attended from now on reads what `held` tells by then. Launched with the rest of a step, and captured."""

    def fill(self, step: Step, table: SlotTable, held: Held) -> I32:
        """Prepare a step; the result is what it will find in `held.own`."""


class AttentionKind(Protocol):
    """Makes a backend; a class."""

    name: str

    def __call__(self, spec: DecoderSpec, pool: KvPool, pulse: Pulse) -> Attention:
        """`pulse` is called before every group of products."""

    def beside(self, shape: TableShape, rows: int, tokens: int) -> int:
        """Bytes on a GPU beside the pool, with a table of such a shape, and where decode steps of so many rows and other steps of so
        many tokens are replayed."""

    def refusal(self, spec: DecoderSpec, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype, asked: bool) -> str | None:
        """Why this backend cannot compute such a model there, in words that go on after "is not used:"; or None.

        `asked`: it is named by --attention-backend, so it need not be the best choice.
        """

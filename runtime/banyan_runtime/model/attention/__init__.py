"""Attention backends: objects behind one protocol, chosen once at start. Each sees the KV pool and a step's numpy columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from banyan_runtime.model.pool import Cells, KvPool
from banyan_runtime.model.spec import ModelSpec
from banyan_runtime.model.table import SlotTable
from banyan_runtime.step import I32, PADDING_SLOT, Pulse, Step, TableShape


class Attention(Protocol):
    """Attention over the paged KV pool."""

    name: str
    cells: Cells  # of the planned step's tokens

    @property
    def batch_invariant(self) -> bool:
        """Whether the bits of a query's result are the same whatever else is in the step."""

    def plan(self, step: Step, table: SlotTable) -> None:
        """Prepare what all layers of a step share: where keys lie, which of them each query sees. The table has taken the step in."""

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """q and the result: [T, heads, head_dim]. The keys and values of the step's tokens are in their cells.

        Prefill and decode are told apart by the plan: a query sees the positions up
        to its own, whether they were computed in this step, an earlier one, or by another request with the same prefix.
        """


@dataclass(frozen=True, slots=True)
class Held:
    """A decode step in memory on the device that stays while steps change: one block of columns, int32 [rows] each.

    Padded rows see no key and write to the padding slot; what they give means nothing.
    """

    told: Tensor  # int32 [COLUMNS, rows at least]: the columns below, in this order
    size: int  # rows

    @classmethod
    def empty(cls, size: int, device: torch.device) -> Held:
        # Columns that begin at multiples of 16 bytes: for others Triton would compile its kernels once more.
        return cls(torch.zeros(COLUMNS, -(-size // 4) * 4, dtype=torch.int32, device=device), size)

    def tell(self, step: Step, own: I32) -> None:
        """Of a decode step of as many rows or fewer, in one copy: each costs as much as a launch."""
        rows = len(step.rows)
        told = np.zeros(tuple(self.told.shape), np.int32)
        told[0, :rows], told[1, :rows], told[2, :rows], told[3, :rows] = step.token_ids, step.rows, step.positions, step.out_slots
        told[3, rows:] = PADDING_SLOT
        told[4, :rows], told[5, :rows], told[6, : self.size] = 1, step.kv_lens, own
        sent = torch.from_numpy(told)
        self.told.copy_(sent.pin_memory() if self.told.device.type == "cuda" else sent, non_blocking=True)

    @property
    def ids(self) -> Tensor:
        """Tokens; negative: the latest one of its row."""
        return self.told[0, : self.size]

    @property
    def rows(self) -> Tensor:
        return self.told[1, : self.size]

    @property
    def positions(self) -> Tensor:
        return self.told[2, : self.size]

    @property
    def slots(self) -> Tensor:
        """Where keys and values go."""
        return self.told[3, : self.size]

    @property
    def counts(self) -> Tensor:
        """Queries: 1, or 0 of a padded row."""
        return self.told[4, : self.size]

    @property
    def ends(self) -> Tensor:
        """Keys that are seen."""
        return self.told[5, : self.size]

    @property
    def own(self) -> Tensor:
        """What the attention has to say."""
        return self.told[6, : self.size]


COLUMNS: Final = 7  # of Held


@runtime_checkable
class Replayed(Attention, Protocol):
    """Attention whose decode steps can be captured as graphs: kernels are launched over memory that stays, and steps are filled in."""

    def reserve(self, shape: TableShape) -> None:
        """Called before the first step, with the size of the table that all steps are planned with."""

    def hold(self, rows: int) -> None:
        """Allocate what decode steps of so many rows at most need beside what they are told."""

    def plan_held(self, held: Held) -> None:
        """What is attended from now on reads what `held` tells by then. Launched with the rest of a step, and captured."""

    def fill(self, step: Step, table: SlotTable, own: I32) -> None:
        """Prepare a decode step, padded to len(own) rows, and write into `own` what it will find in `held.own`."""


class AttentionKind(Protocol):
    """Makes a backend; a class."""

    name: str

    def __call__(self, spec: ModelSpec, pool: KvPool, pulse: Pulse) -> Attention:
        """`pulse` is called before every group of products."""

    def refusal(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype, asked: bool) -> str | None:
        """Why this backend cannot compute such a model there, in words that go on after "is not used:"; or None.

        `asked`: it is named by --attention-backend, so it need not be the best choice.
        """

"""Attention backends: objects behind one protocol, chosen once at start. Each sees the KV pool and a step's numpy columns."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from banyan_runtime.model.pool import Cells, KvPool
from banyan_runtime.model.spec import ModelSpec
from banyan_runtime.model.table import SlotTable
from banyan_runtime.step import Pulse, Step, TableShape


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


@runtime_checkable
class Replayed(Attention, Protocol):
    """Attention whose decode steps can be captured as graphs: kernels are launched over memory that stays, and steps are filled in."""

    def reserve(self, shape: TableShape) -> None:
        """Called before the first step, with the size of the table that all steps are planned with."""

    def hold(self, rows: int) -> None:
        """Allocate what decode steps of so many rows at most are told by."""

    def plan_held(self, rows: int) -> None:
        """What is attended from now on has so many rows, and reads what it is told there."""

    def fill(self, step: Step, table: SlotTable, rows: int) -> None:
        """Tell it of a decode step, padded to `rows`. Padded rows write to the padding slot, and what they give means nothing."""


class AttentionKind(Protocol):
    """Makes a backend; a class."""

    name: str

    def __call__(self, spec: ModelSpec, pool: KvPool, pulse: Pulse) -> Attention:
        """`pulse` is called before every group of products."""

    def refusal(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype, asked: bool) -> str | None:
        """Why this backend cannot compute such a model there, in words that go on after "is not used:"; or None.

        `asked`: it is named by --attention-backend, so it need not be the best choice.
        """

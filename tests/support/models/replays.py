"""Attention whose steps are replayed: kernels as they would be captured, over a room's texts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from banyan_runtime.model import capture
from banyan_runtime.model.attention import Held, Replayed
from banyan_runtime.model.mail import Mail
from tests.support.models.driver import Again
from tests.unit.model.test_attention import Room


class Replays:
    """Of steps of so many rows or tokens at most. Made before the room's first step."""

    def __init__(self, room: Room, rows: Sequence[int] = (), tokens: Sequence[int] = ()) -> None:
        assert isinstance(room.attention, Replayed)
        self._room, self._attention = room, room.attention
        device = room.pool.device
        self._held = [Held.empty(size, device, own=self._attention.own) for size in rows]
        self._held += [Held.empty(size, device, min(size, 5), self._attention.own) for size in tokens]
        self._queries = torch.zeros(max((*rows, *tokens)), *room.q[0].shape[1:], dtype=room.pool.dtype, device=device)
        self._found = torch.zeros_like(self._queries)
        self._attention.reserve(room.shape)
        self._attention.hold(self._held)
        recorder = capture.CudaRecorder() if device.type == "cuda" else Again()
        with torch.inference_mode():
            self._replays = [recorder.record(partial(self._attend, held)) for held in self._held]

    def _attend(self, held: Held) -> None:
        self._attention.plan_held(held)
        self._found[: held.size].copy_(self._attention.attend(0, self._queries[: held.size]))

    @torch.inference_mode()
    def attend(self, work: list[tuple[int, int, int]]) -> list[torch.Tensor]:
        """As `Room.attend`, of a decode step where each has one token and there is room for it."""
        step = self._room.step(work)
        tokens = len(step.token_ids)
        decode = tokens == len(work)
        fitting = [at for at, held in enumerate(self._held) if held.size >= tokens and (decode or held.sequences is not None)]
        at = min(fitting, key=lambda at: (self._held[at].sequences is not None, self._held[at].size))
        held = self._held[at]
        self._room.table.apply(step)
        q, k, v = self._room.of(work)
        self._queries.fill_(7.0)
        self._queries[:tokens].copy_(q)
        held.tell(step, self._attention.fill(step, self._room.table, held), Mail().bring)
        self._room.pool.store(0, held.slots[:tokens].long(), k, v)
        self._replays[at]()
        assert not held.slots[tokens:].any(), "padded tokens go to the padding slot"
        return list(self._found[:tokens].clone().split([end - start for _, start, end in work]))

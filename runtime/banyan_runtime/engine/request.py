"""One request inside the engine, with its state.

While a request waits it owns its text; while it is admitted (row >= 0) its text, lengths and slots are columns of
`memory.tables`, so that a step over many requests is a few numpy calls.
"""

from __future__ import annotations

import enum
from typing import Final

import numpy as np

from banyan_runtime.engine.memory.prefixes import Node
from banyan_runtime.step import I32
from banyan_runtime.wire import Sampling, Submit, unpack_ids


class State(enum.Enum):
    WAITING = "waiting"  # never admitted
    PREFILL = "prefill"  # has a row; its prompt is being computed, its next token is not known yet
    RUNNING = "running"  # decodes
    RETRACTED = "retracted"  # waits again, keeps its text, holds no memory
    FINISHED = "finished"
    ABORTED = "aborted"  # by the front, or because it failed


_NEXT: Final[dict[State, frozenset[State]]] = {
    State.WAITING: frozenset({State.PREFILL, State.ABORTED}),
    State.PREFILL: frozenset({State.RUNNING, State.RETRACTED, State.FINISHED, State.ABORTED}),
    State.RUNNING: frozenset({State.RETRACTED, State.FINISHED, State.ABORTED}),
    State.RETRACTED: frozenset({State.PREFILL, State.ABORTED}),
    State.FINISHED: frozenset(),
    State.ABORTED: frozenset(),
}


class Request:
    """`arrival` numbers requests in the order in which they came; times are seconds on the engine's clock."""

    __slots__ = (
        "admitted_at",
        "arrival",
        "cached_tokens",
        "first_token_at",
        "held_back",
        "id",
        "key",
        "max_new",
        "merged",
        "node",
        "outputs",
        "prompt_len",
        "queued_at_batch",
        "received_at",
        "retractions",
        "row",
        "salt",
        "sampling",
        "state",
        "stop_ids",
        "token_ids",
    )

    def __init__(self, submit: Submit, *, max_new: int, arrival: int, received_at: float) -> None:
        self.id = submit.id
        self.arrival = arrival
        self.salt = submit.salt
        self.sampling: Sampling = submit.sampling
        self.max_new = max_new  # sampling.max_new_tokens, cut to what fits
        self.stop_ids: I32 = np.array(submit.sampling.stop_token_ids, dtype=np.int32)
        self.key = submit.token_ids  # the text as bytes: what the prefix tree compares
        self.token_ids: I32 = unpack_ids(submit.token_ids)  # prompt and output as of the last time it waited
        self.prompt_len = len(self.token_ids)
        self.merged = False  # whether it is among those that decode
        self.outputs = 0  # output tokens as of the last time it had no row
        self.state = State.WAITING
        self.row = -1
        self.node: Node | None = None  # where its locked prefix ends, while it has a row
        self.received_at = received_at
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None
        self.cached_tokens = 0  # at first admission
        self.retractions = 0
        self.held_back = False  # whether it waits, or has waited, for a text that another one computes
        self.queued_at_batch = 0  # prefill batches formed before it was queued: what its age is counted in

    def enter(self, state: State) -> None:
        assert state in _NEXT[self.state], f"request {self.id}: {self.state.value} -> {state.value}"
        self.state = state

    @property
    def over(self) -> bool:
        return not _NEXT[self.state]

    @property
    def penalised(self) -> bool:
        """Whether sampling needs the tokens so far."""
        sampling = self.sampling
        return bool(sampling.frequency_penalty or sampling.presence_penalty or sampling.repetition_penalty != 1.0)

    @property
    def remaining(self) -> int:
        """Tokens it may still generate, as of the last time it had no row."""
        return self.max_new - self.outputs

"""One request inside the engine, with its state.

While a request waits it owns its tokens; while it is admitted (row >= 0) its tokens, lengths and slots are columns of
`memory.tables`, so that a step over many requests is a few numpy calls.
"""

from __future__ import annotations

import enum
from typing import Final

import numpy as np

from banyan_runtime.engine.constraints import Matcher
from banyan_runtime.engine.drafts import Text
from banyan_runtime.engine.memory.prefixes import Node
from banyan_runtime.step import F32, I32, Pooling
from banyan_runtime.wire import PRIORITY_AT_MOST, LogprobRequest, Sampling, Submit, unpack_ids


class State(enum.Enum):
    WAITING = "waiting"  # never admitted
    PREFILL = "prefill"  # has a row; its prompt is being computed, its next token is not known yet
    RUNNING = "running"  # decodes
    RETRACTED = "retracted"  # waits again, keeps its tokens, holds no memory
    FINISHED = "finished"
    ABORTED = "aborted"  # by the front, or because it failed


NO_LOGPROBS: Final = LogprobRequest()

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
        "bias_ids",
        "bias_values",
        "cached_tokens",
        "first_token_at",
        "held",
        "held_back",
        "id",
        "key",
        "matcher",
        "max_new",
        "merged",
        "named",
        "node",
        "output_top",
        "outputs",
        "passes",
        "passes_from",
        "place",
        "pooling",
        "prefix_ids",
        "priority",
        "prompt_len",
        "prompt_top",
        "queued_at_batch",
        "received_at",
        "retractions",
        "row",
        "salt",
        "sampling",
        "state",
        "stop_ids",
        "text",
        "token_ids",
        "told",
        "trouble",
        "unscored",
        "waited",
    )

    def __init__(self, submit: Submit, *, arrival: int, received_at: float) -> None:
        assert abs(submit.priority) <= PRIORITY_AT_MOST, "the front lets no such priority pass"
        logprobs = submit.logprobs or NO_LOGPROBS
        self.id = submit.id
        self.arrival = arrival
        self.priority = submit.priority
        self.salt = submit.salt
        self.sampling: Sampling = submit.sampling
        self.max_new = submit.sampling.max_new_tokens
        self.stop_ids: I32 = np.array(submit.sampling.stop_token_ids, dtype=np.int32)
        self.bias_ids: I32 = unpack_ids(submit.sampling.bias_ids)
        self.bias_values: F32 = np.frombuffer(submit.sampling.bias_values, dtype="<f4")
        self.pooling = submit.pooling
        self.matcher: Matcher | None = None  # what its output must obey, once its grammar is compiled
        self.text: Text | None = None  # what its drafts are found in, where it has any
        self.trouble = ""  # why its grammar admits nothing more
        self.prefix_ids = submit.prefix_ids  # what the prefix cache compares in place of the prompt, if not the prompt itself
        self.key = submit.prefix_ids or submit.token_ids  # as bytes: what the prefix cache compares
        self.token_ids: I32 = unpack_ids(submit.token_ids)  # prompt and output as of the last time it waited; no copy
        self.prompt_len = len(self.token_ids)
        self.output_top = logprobs.output_top
        self.prompt_top = logprobs.prompt_top
        self.named: I32 = unpack_ids(logprobs.named)
        self.unscored = max(logprobs.prompt_from, 1) if logprobs.prompt_from >= 0 else self.prompt_len
        """First prompt position whose log probability is wanted and was not told yet; prompt_len: none is."""
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
        self.told = 0  # leading prompt tokens that are counted, as cached or as computed
        self.held = submit.held  # waits for something other than memory
        self.place = 0  # among the newcomers of its priority
        self.held_back = False  # whether it waits, or has waited, for a prefix that another one computes
        self.passes = 0  # prefill batches that had passed it by when it was last admitted
        self.passes_from = 0  # what the queue had counted of them for its priority when it was queued, less `passes`
        self.queued_at_batch = 0  # prefill batches formed before it was queued, less those that it had waited before
        self.waited = 0  # prefill batches that it had waited when it was last admitted

    def enter(self, state: State) -> None:
        assert state in _NEXT[self.state], f"request {self.id}: {self.state.value} -> {state.value}"
        self.state = state

    @property
    def background(self) -> bool:
        """Whether it runs in what online requests leave (`background.py`)."""
        return self.priority < 0

    @property
    def over(self) -> bool:
        return not _NEXT[self.state]

    @property
    def matchable(self) -> int:
        """How many of its leading tokens may come from the prefix cache: not the last one, whose logits are wanted, nor one
        whose logits score a token of the prompt. A vector over all tokens needs all of them computed."""
        if self.pooling not in (Pooling.NONE, Pooling.LAST):
            return 0
        return (self.unscored if self.unscored < self.prompt_len else len(self.token_ids)) - 1

    def scored_by(self, start: int, end: int) -> tuple[int, int]:
        """The range of prompt positions to be scored when the tokens at positions `start` up to `end` are computed."""
        return max(self.unscored, start + 1), min(end + 1, self.prompt_len)

    def tell(self, start: int, end: int) -> tuple[int, int]:
        """How many tokens of its prompt are known for the first time to come from the cache, and to be computed, now that those at
        positions `start` up to `end` are computed. Over its whole life they add up to the prompt, however often it was retracted."""
        start, end = max(self.told, min(start, self.prompt_len)), max(self.told, min(end, self.prompt_len))
        cached, self.told = start - self.told, end
        return cached, end - start

    def key_of(self, tokens: I32) -> bytes:
        """What the prefix cache compares in place of `tokens`, the first ones of this request."""
        if not self.prefix_ids:
            return tokens.tobytes()
        return self.prefix_ids[: len(tokens) * tokens.itemsize] + tokens[self.prompt_len :].tobytes()

    def keep(self, tokens: I32) -> None:
        """Own these tokens, prompt and output so far: it waits again. Key and tokens are the same bytes where they can be."""
        self.key = self.key_of(tokens)
        self.token_ids = tokens.copy() if self.prefix_ids else unpack_ids(self.key)
        self.outputs = len(tokens) - self.prompt_len

    @property
    def penalised(self) -> bool:
        """Whether sampling needs the tokens so far."""
        sampling = self.sampling
        return bool(sampling.frequency_penalty or sampling.presence_penalty or sampling.repetition_penalty != 1.0)

    @property
    def remaining(self) -> int:
        """Tokens it may still generate, as of the last time it had no row."""
        return self.max_new - self.outputs

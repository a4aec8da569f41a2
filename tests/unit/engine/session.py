"""An engine over the fake model, and what its front would have received."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import pytest

from banyan_runtime.engine.constraints import Grammars
from banyan_runtime.engine.limits import EngineLimits
from banyan_runtime.engine.loop import Engine
from banyan_runtime.wire import (
    Abort,
    Constraint,
    EngineMessage,
    Failed,
    Finish,
    FinishCode,
    LogprobRequest,
    Proceed,
    Sampling,
    Stats,
    StepOutput,
    Submit,
    pack_ids,
)
from tests.unit.engine import invariants
from tests.unit.engine.fake import VOCAB, FakeRunner, continuation
from tests.unit.engine.outputs import Scores, tokens_of

LOOPS = pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])
PAGES = pytest.mark.parametrize("page", [pytest.param(1, marks=pytest.mark.long), 16])


def limits(**changes: Any) -> EngineLimits:
    return EngineLimits(**({"context_len": 4096, "pool_tokens": 512, "max_running": 16, "vocab_size": VOCAB} | changes))


@dataclass
class Session:
    limits: EngineLimits
    lazy: bool = False
    now: float = 100.0
    outputs: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    scores: dict[int, Scores] = field(default_factory=dict)
    finishes: dict[int, Finish] = field(default_factory=dict)
    failures: dict[int, Failed] = field(default_factory=dict)
    stats: list[Stats] = field(default_factory=list)
    others: list[EngineMessage] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    sent: dict[int, tuple[list[int], Sampling]] = field(default_factory=dict)

    grammars: Grammars | None = None
    vectors: dict[int, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        bounds = self.limits
        self.runner = FakeRunner(bounds.pool_tokens, bounds.page_size, bounds.context_len, lazy=self.lazy, logging=True)
        self.engine = Engine(self.runner, bounds, lambda: self.now, self.lines.append, self.grammars)
        self.runner.watch = lambda step: invariants.check_mirror(self.engine, self.runner)

    def submit(
        self,
        prompt: Sequence[int],
        max_new: int = 8,
        *,
        priority: int = 0,
        salt: str = "",
        prefix_ids: Sequence[int] = (),
        logprobs: LogprobRequest | None = None,
        held: bool = False,
        constraint: Constraint | None = None,
        pooling: int = 0,
        **sampling: Any,
    ) -> int:
        id = len(self.sent) + 1
        wanted = Sampling(max_new_tokens=max_new, **sampling)
        self.sent[id] = (list(prompt), wanted)
        self.scores[id] = Scores(logprobs)
        self.engine.handle(
            Submit(
                id=id,
                token_ids=pack_ids(list(prompt)),
                sampling=wanted,
                priority=priority,
                salt=salt,
                prefix_ids=pack_ids(list(prefix_ids)),
                logprobs=logprobs,
                held=held,
                constraint=constraint,
                pooling=pooling,
            )
        )
        return id

    def abort(self, id: int) -> None:
        self.engine.handle(Abort(id=id))

    def proceed(self, id: int) -> None:
        self.engine.handle(Proceed(id=id))

    def turn(self, seconds: float = 0.01) -> None:
        self.now += seconds
        for message in self.engine.turn():
            match message:
                case StepOutput():
                    self._take(message)
                case Failed(id=id):
                    assert not self.ended(id)
                    self.failures[id] = message
                case Stats():
                    self.stats.append(message)
                case _:
                    self.others.append(message)

    def _take(self, output: StepOutput) -> None:
        for told in output.prompt_logprobs:
            assert not self.ended(told.id)
            self.scores[told.id].take_prompt(told)
        for id, tokens in tokens_of(output):
            assert not self.ended(id)
            for token, score in tokens:
                self.outputs[id].append(token)
                self.scores[id].output.append(score)
        for vector in output.vectors:
            assert not self.ended(vector.id)
            self.vectors[vector.id] = np.frombuffer(vector.values, dtype="<f4").tolist()
        for finish in output.finished:
            assert not self.ended(finish.id)
            self.finishes[finish.id] = finish

    def drain(self) -> None:
        while self.engine.has_work:
            self.turn()

    @property
    def started(self) -> list[int]:
        """The ids in the order of their first tokens."""
        return list(self.outputs)

    def ended(self, id: int) -> bool:
        return id in self.finishes or id in self.failures

    def expected(self, id: int) -> list[int]:
        """As many tokens as came, of the text that a model without any cache would give."""
        return list(islice(continuation(*self.sent[id]), len(self.outputs[id])))

    def check_texts(self) -> None:
        for id, (prompt, _) in self.sent.items():
            assert self.outputs[id] == self.expected(id), f"request {id}"
            whole = id in self.finishes and self.finishes[id].code is not FinishCode.ABORT
            self.scores[id].check(prompt, self.outputs[id], whole_prompt=whole)

    @property
    def prefilled(self) -> int:
        """Prompt tokens computed so far."""
        return sum(tokens for phase, _, tokens in self.runner.log if phase == "prefill")

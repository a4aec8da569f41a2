"""An engine over the fake model, and what its front would have received."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from banyan_runtime.engine.loop import Engine
from banyan_runtime.engine.scheduler import EngineLimits
from banyan_runtime.wire import Abort, EngineMessage, Failed, Finish, Sampling, Stats, StepOutput, Submit, pack_ids, unpack_ids
from tests.engine.fake import VOCAB, FakeRunner, continuation


def limits(**changes: Any) -> EngineLimits:
    return EngineLimits(**({"context_len": 4096, "pool_tokens": 512, "max_running": 16, "vocab_size": VOCAB} | changes))


@dataclass
class Session:
    limits: EngineLimits
    lazy: bool = False
    now: float = 100.0
    outputs: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    finishes: dict[int, Finish] = field(default_factory=dict)
    failures: dict[int, Failed] = field(default_factory=dict)
    stats: list[Stats] = field(default_factory=list)
    others: list[EngineMessage] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    sent: dict[int, tuple[list[int], Sampling]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        bounds = self.limits
        self.runner = FakeRunner(bounds.pool_tokens, bounds.page_size, bounds.context_len, lazy=self.lazy, logging=True)
        self.engine = Engine(self.runner, bounds, lambda: self.now, self.lines.append)

    def submit(self, prompt: Sequence[int], max_new: int = 8, *, salt: str = "", **sampling: Any) -> int:
        id = len(self.sent) + 1
        wanted = Sampling(max_new_tokens=max_new, **sampling)
        self.sent[id] = (list(prompt), wanted)
        self.engine.handle(Submit(id=id, token_ids=pack_ids(list(prompt)), sampling=wanted, salt=salt))
        return id

    def abort(self, id: int) -> None:
        self.engine.handle(Abort(id=id))

    def turn(self, seconds: float = 0.01) -> None:
        self.now += seconds
        for message in self.engine.turn():
            match message:
                case StepOutput(ids=ids, token_ids=raw, finished=finished):
                    for request, token in zip(ids, unpack_ids(raw).tolist(), strict=True):
                        assert not self.ended(request)
                        self.outputs[request].append(token)
                    for finish in finished:
                        assert not self.ended(finish.id)
                        self.finishes[finish.id] = finish
                case Failed(id=id):
                    assert not self.ended(id)
                    self.failures[id] = message
                case Stats():
                    self.stats.append(message)
                case _:
                    self.others.append(message)

    def drain(self) -> None:
        while self.engine.has_work:
            self.turn()

    def ended(self, id: int) -> bool:
        return id in self.finishes or id in self.failures

    def expected(self, id: int) -> list[int]:
        """As many tokens as came, of the text that a model without any cache would give."""
        return list(islice(continuation(*self.sent[id]), len(self.outputs[id])))

    def check_texts(self) -> None:
        for id in self.sent:
            assert self.outputs[id] == self.expected(id), f"request {id}"

    @property
    def prefilled(self) -> int:
        """Prompt tokens computed so far."""
        return sum(tokens for phase, _, tokens in self.runner.log if phase == "prefill")

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from banyan_runtime.engine.batch import ScheduledBatch
from banyan_runtime.engine.request import Request
from banyan_runtime.engine.results import Results
from banyan_runtime.step import StepResult, TokenLogprobs
from banyan_runtime.wire import Finish, FinishCode, LogprobRequest
from tests.unit.engine.outputs import tokens_of
from tests.unit.engine.session import Session, limits

Tokens = dict[int, list[int]]


class Drafted:
    """Two running requests, and a decode step that drew three tokens for the first and two for the second, as a runner that
    checks drafts would."""

    def __init__(self, **first: Any) -> None:
        self.session = Session(limits())
        steps = []
        launch = self.session.runner.launch
        self.session.runner.launch = lambda step: (steps.append(step), launch(step))[1]  # type: ignore[method-assign]
        self.ids = [
            self.session.submit([1, 2], 40, logprobs=LogprobRequest(output_top=0), **first),
            self.session.submit([3, 4], 40, logprobs=LogprobRequest(output_top=1)),
        ]
        self.session.turn()
        self.session.turn()
        engine = self.session.engine
        self.batch = ScheduledBatch(replace(steps[-1], samples=np.array([3, 2], dtype=np.int32)), list(engine.requests.values()))
        self.ended: list[tuple[int, FinishCode]] = []
        self.results = Results(engine.memory, engine.scheduler.prefill, self._end, lambda request: None)

    def _end(self, request: Request, code: FinishCode, finished: list[Finish]) -> None:
        self.ended.append((request.id, code))

    def note(self, tokens: list[int], accepted: list[int] | None) -> tuple[Tokens, dict[int, list[float | None]]]:
        """What the front gets of these tokens, whose log probabilities are -0.5, -1.5, -2.5 ..."""
        values = -np.arange(len(tokens), dtype=np.float32) - np.float32(0.5)
        logprobs = TokenLogprobs(values, np.zeros((len(tokens), 1), dtype=np.int32), np.zeros((len(tokens), 1), dtype=np.float32))
        result = StepResult(
            token_ids=np.array(tokens, dtype=np.int32),
            failed=np.zeros(2, dtype=np.bool_),
            accepted=None if accepted is None else np.array(accepted, dtype=np.int32),
            logprobs=logprobs,
        )
        output = self.results.note(self.batch, result, 0.0)
        assert output is not None
        told = dict(tokens_of(output))
        return (
            {id: [token for token, _ in told[id]] for id in told},
            {id: [None if score is None else score[0] for _, score in told[id]] for id in told},
        )


@pytest.mark.parametrize(
    ("accepted", "first", "second"),
    [(None, [11, 12, 13], [14, 15]), ([2, 1], [11, 12], [14]), ([1, 2], [11], [14, 15]), ([1, 1], [11], [14])],
)
def test_of_several_tokens_of_a_row_those_that_were_accepted_count(accepted: list[int] | None, first: list[int], second: list[int]) -> None:
    drafted = Drafted()
    tables = drafted.session.engine.memory.tables
    before = tables.length[drafted.batch.step.rows].tolist()
    tokens, scores = drafted.note([11, 12, 13, 14, 15], accepted)
    assert tokens == dict(zip(drafted.ids, (first, second), strict=True))
    assert scores == dict(zip(drafted.ids, ([-0.5, -1.5, -2.5][: len(first)], [-3.5, -4.5][: len(second)]), strict=True))
    for row, start, expected in zip(drafted.batch.step.rows.tolist(), before, (first, second), strict=True):
        assert tables.tokens[row, start : int(tables.length[row])].tolist() == expected


def test_tokens_behind_the_one_that_ends_a_request_are_dropped() -> None:
    drafted = Drafted(stop_token_ids=(12,))
    tokens, _ = drafted.note([11, 12, 13, 14, 15], None)
    assert tokens[drafted.ids[0]] == [11, 12]
    assert drafted.ended == [(drafted.ids[0], FinishCode.STOP)]

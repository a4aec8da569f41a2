"""What the front gets, taken apart, and what the fake model's log probabilities must be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from banyan_runtime.engine.loop import Engine
from banyan_runtime.wire import Failed, LogprobColumns, LogprobRequest, PromptLogprobs, StepOutput, Submit, unpack_ids
from tests.unit.engine.fake import likeliest, logprob, totals

Score = tuple[float, list[int], list[float]]
"""Log probability of a token, the likeliest tokens, and theirs."""


def unpack(columns: LogprobColumns) -> list[Score]:
    values = np.frombuffer(columns.values, dtype="<f4")
    shape = len(values), columns.width
    ids = np.frombuffer(columns.top_ids, dtype="<i4").reshape(shape)
    tops = np.frombuffer(columns.top_values, dtype="<f4").reshape(shape)
    return list(zip(values.tolist(), ids.tolist(), tops.tolist(), strict=True))


def tokens_of(output: StepOutput) -> Iterator[tuple[int, list[tuple[int, Score | None]]]]:
    """For each request its tokens, each with what was told of its probability."""
    assert len(set(output.ids)) == len(output.ids)
    tokens = unpack_ids(output.token_ids).tolist()
    scored = unpack_ids(output.scored).tolist()
    assert scored == sorted(set(scored))
    assert bool(scored) == (output.logprobs is not None)
    scores = dict(zip(scored, unpack(output.logprobs), strict=True)) if output.logprobs else {}
    start = 0
    for id, count in zip(output.ids, output.counts or [1] * len(output.ids), strict=True):
        yield id, [(tokens[index], scores.get(index)) for index in range(start, start + count)]
        start += count
    assert start == len(tokens)


class Scores:
    """What one request was told of the probabilities of its tokens."""

    def __init__(self, asked: LogprobRequest | None) -> None:
        self._asked = asked or LogprobRequest()
        self.prompt: dict[int, Score] = {}  # by position
        self.output: list[Score | None] = []

    def take_prompt(self, told: PromptLogprobs) -> None:
        for position, score in enumerate(unpack(told.columns), told.start):
            assert position not in self.prompt, f"position {position} is told twice"
            self.prompt[position] = score

    def check(self, prompt: Sequence[int], outputs: Sequence[int], *, whole_prompt: bool) -> None:
        """`whole_prompt`: every score that was asked for must have come."""
        asked, tokens = self._asked, [*prompt, *outputs]
        if asked.output_top < 0:
            assert not any(self.output)
        if asked.prompt_from < 0:
            assert not self.prompt
        elif whole_prompt:
            assert sorted(self.prompt) == list(range(max(asked.prompt_from, 1), len(prompt)))
        if asked == LogprobRequest():
            return
        before, named = list(islice(totals(tokens), len(tokens))), unpack_ids(asked.named).tolist()
        for position, score in self.prompt.items():
            assert score == _expected(before[position - 1], tokens[position], asked.prompt_top, named), "no wider than it was asked for"
        if asked.output_top >= 0:
            assert len(self.output) == len(outputs)
            for position, score in enumerate(self.output, len(prompt)):
                assert score is not None
                trimmed = _trimmed(score, asked.output_top, len(named))
                assert trimmed == _expected(before[position - 1], tokens[position], asked.output_top, named)


def _trimmed(score: Score, top: int, named: int) -> Score:
    """The likeliest come first, those that were named last."""
    value, ids, values = score
    return value, ids[:top] + ids[len(ids) - named :], values[:top] + values[len(ids) - named :]


def _expected(total: int, token: int, top: int, named: list[int]) -> Score:
    ids = likeliest(total, top) + named
    return logprob(total, token), ids, [logprob(total, id) for id in ids]


def served(engine: Engine, requests: Sequence[Submit], together: int) -> tuple[dict[int, list[int]], dict[int, object]]:
    """Tokens and ends by request; so many come with each turn."""
    text: dict[int, list[int]] = {request.id: [] for request in requests}
    ends: dict[int, object] = {}
    waiting = list(requests)
    while len(ends) < len(requests):
        for request in waiting[:together]:
            engine.handle(request)
        del waiting[:together]
        for message in engine.turn():
            if isinstance(message, Failed):
                ends[message.id] = message.code
            elif isinstance(message, StepOutput):
                for id, tokens in tokens_of(message):
                    text[id] += [token for token, _ in tokens]
                ends |= {finish.id: finish.code for finish in message.finished}
    return text, ends

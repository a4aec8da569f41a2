"""Log probabilities on their way from a step's result to the front: which of them still belong to somebody."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from banyan_runtime.step import I32, Step, StepResult, TokenLogprobs
from banyan_runtime.wire import LogprobColumns


def scored_tokens(step: Step, result: StepResult, told: I32 | None) -> tuple[bytes, LogprobColumns | None]:
    """`scored` and `logprobs` of a `wire.StepOutput` with the drawn tokens `told` (indices among all drawn; None: all)."""
    if step.top_logprobs is None or result.logprobs is None:
        return b"", None
    wanted = np.repeat(step.top_logprobs >= 0, step.samples)
    if told is None:
        return np.flatnonzero(wanted).astype(np.int32).tobytes(), columns(result.logprobs, result.logprobs.top_ids.shape[1])
    chosen = (np.cumsum(wanted) - 1)[told][wanted[told]]  # where they stand in result.logprobs
    if not len(chosen):
        return b"", None
    given, scored = result.logprobs, np.flatnonzero(wanted[told]).astype(np.int32)
    scores = TokenLogprobs(given.values[chosen], given.top_ids[chosen], given.top_values[chosen])
    return scored.tobytes(), columns(scores, scores.top_ids.shape[1])


def prompt_scores(step: Step, result: StepResult) -> Iterator[tuple[int, int, TokenLogprobs]]:
    """(sequence, position of its first scored token, the scores) for each sequence of the step with scored prompt tokens."""
    asked, given = step.prompt_scores, result.prompt_logprobs
    if asked is None or given is None:
        return
    ends = np.searchsorted(asked.at, np.cumsum(step.query_lens)).tolist()
    start = 0
    for sequence, end in enumerate(ends):
        if end > start:
            part = slice(start, end)
            scores = TokenLogprobs(given.values[part], given.top_ids[part], given.top_values[part])
            yield sequence, int(step.positions[asked.at[start]]) + 1, scores
        start = end


def columns(scores: TokenLogprobs, width: int, named: int = 0) -> LogprobColumns:
    """With the `width` likeliest tokens beside each, and the last `named` of those that were named."""
    ids, values = scores.top_ids[:, :width], scores.top_values[:, :width]
    if named:
        ids, values = np.hstack([ids, scores.top_ids[:, -named:]]), np.hstack([values, scores.top_values[:, -named:]])
    return LogprobColumns(scores.values.tobytes(), ids.shape[1], ids.tobytes(), values.tobytes())

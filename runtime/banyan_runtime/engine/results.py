"""What a step gave: tokens into the rows, ends, and what the front must know of it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from banyan_runtime.engine.batch import ScheduledBatch
from banyan_runtime.engine.logprobs import columns, prompt_scores, scored_tokens
from banyan_runtime.engine.memory.kv import KvMemory
from banyan_runtime.engine.prefill import Prefill
from banyan_runtime.engine.request import Request
from banyan_runtime.step import I32, Step, StepResult
from banyan_runtime.wire import Finish, FinishCode, PromptLogprobs, StepOutput, pack_ids


class Results:
    """`end` ends a request and adds its Finish to a list; `fail` ends one whose logits are NaN."""

    def __init__(
        self,
        memory: KvMemory,
        prefill: Prefill,
        end: Callable[[Request, FinishCode, float, list[Finish]], None],
        fail: Callable[[Request], None],
    ) -> None:
        self._memory = memory
        self._prefill = prefill
        self._end = end
        self._fail = fail

    def note(self, batch: ScheduledBatch, result: StepResult, now: float) -> StepOutput | None:
        """None if there is nothing to tell."""
        one_each = batch.step.mode == "decode" and result.accepted is None and len(result.token_ids) == len(batch.step.rows)
        return (self._note_one_each if one_each else self._note_each)(batch, result, now)

    def _note_each(self, batch: ScheduledBatch, result: StepResult, now: float) -> StepOutput | None:
        """The results of a prefill step, or of one that drew several tokens for some rows, row by row."""
        step, tables = batch.step, self._memory.tables
        counts = step.samples if result.accepted is None else result.accepted
        starts, drawn = (np.cumsum(step.samples) - step.samples).tolist(), result.token_ids.tolist()
        kv_lens, failed = step.kv_lens.tolist(), result.failed.tolist()
        scores = self._prompt_scores(batch, result)
        ids, told, ended, told_counts = list[int](), list[int](), list[Finish](), list[int]()
        for index, (request, row, count) in enumerate(zip(batch.requests, step.rows.tolist(), counts.tolist(), strict=True)):
            if not tables.live[row]:
                continue  # a request that was released meanwhile
            if failed[index]:
                self._fail(request)
            elif count:
                self._prefill.computed(request)
                if request.first_token_at is None:
                    request.first_token_at = now
                first = starts[index]
                count, code = self._note_tokens(request, drawn[first : first + count])
                ids.append(request.id)
                told.extend(range(first, first + count))
                told_counts.append(count)
                if code is not None:
                    self._end(request, code, now, ended)
                elif step.mode == "prefill":
                    self._memory.store(request, kv_lens[index])
            elif not request.max_new and kv_lens[index] == request.prompt_len:
                self._end(request, FinishCode.LENGTH, now, ended)
        several = told_counts if len(told) > len(ids) else []
        return _output(step, result, ids, np.array(told, dtype=np.int32), ended, several, scores)

    def _note_tokens(self, request: Request, tokens: list[int]) -> tuple[int, FinishCode | None]:
        """Append tokens to a row up to the one that ends it; returns how many were taken."""
        tables, row = self._memory.tables, request.row
        length, code, count = int(tables.length[row]), None, 0
        while code is None and count < len(tokens):
            tables.tokens[row, length + count] = tokens[count]
            code = _finish_code(request, tokens[count], length + count + 1)
            count += 1
        tables.length[row] = length + count
        return count, code

    def _note_one_each(self, batch: ScheduledBatch, result: StepResult, now: float) -> StepOutput | None:
        """The results of a step that drew one token for every row."""
        tables, requests, rows, token_ids = self._memory.tables, batch.requests, batch.step.rows, result.token_ids
        live = tables.live[rows]
        failed = result.failed & live
        if failed.any():
            for index in np.flatnonzero(failed).tolist():
                self._fail(requests[index])
            live &= ~failed
        told: I32 | None = None
        if not live.all():
            told = np.flatnonzero(live).astype(np.int32)
            rows, token_ids = rows[told], token_ids[told]
            requests = [requests[index] for index in told.tolist()]
        lengths = tables.length[rows]
        tables.tokens[rows, lengths] = token_ids
        lengths += 1
        tables.length[rows] = lengths
        ids: list[int] = tables.ids[rows].tolist()
        stops = tables.stops[rows]
        ending = (lengths - tables.prompt[rows] >= tables.max_new[rows]) | (stops == token_ids[:, None]).any(axis=1)
        ending |= stops[:, -1] >= 0  # there may be more stop ids than columns
        ended: list[Finish] = []
        for index in np.flatnonzero(ending).tolist():
            code = _finish_code(requests[index], int(token_ids[index]), int(lengths[index]))
            if code is not None:
                self._end(requests[index], code, now, ended)
        return _output(batch.step, result, ids, told, ended)

    def _prompt_scores(self, batch: ScheduledBatch, result: StepResult) -> list[PromptLogprobs]:
        """What the front is told of prompt tokens, each once, however often a prompt is computed."""
        told = []
        for index, start, scores in prompt_scores(batch.step, result):
            request = batch.requests[index]
            if self._memory.tables.live[batch.step.rows[index]] and not result.failed[index]:
                request.unscored = start + len(scores.values)
                told.append(PromptLogprobs(request.id, start, columns(scores, request.prompt_top)))
        return told


def _output(
    step: Step,
    result: StepResult,
    ids: list[int],
    told: I32 | None,
    finished: list[Finish],
    counts: list[int] | None = None,
    prompt_logprobs: list[PromptLogprobs] | None = None,
) -> StepOutput | None:
    """Which of the drawn tokens (`told`; None: all) are whose."""
    if not (ids or finished or prompt_logprobs):
        return None
    token_ids = result.token_ids if told is None else result.token_ids[told]
    scored, logprobs = scored_tokens(step, result, told)
    return StepOutput(
        ids=ids,
        token_ids=pack_ids(token_ids),
        finished=finished,
        counts=counts or [],
        scored=scored,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs or [],
    )


def _finish_code(request: Request, token: int, length: int) -> FinishCode | None:
    """Whether the request ends with this token. A stop id as the last allowed token is a stop: the model was done."""
    if token in request.sampling.stop_token_ids:
        return FinishCode.STOP
    return FinishCode.LENGTH if length - request.prompt_len >= request.max_new else None

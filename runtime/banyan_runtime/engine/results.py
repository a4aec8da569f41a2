"""What a step gave: tokens into the rows, ends, and what the front must know of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from banyan_runtime.engine.batch import ScheduledBatch
from banyan_runtime.engine.memory.kv import KvMemory
from banyan_runtime.engine.memory.tables import Tables
from banyan_runtime.engine.prefill import Prefill
from banyan_runtime.engine.request import Request
from banyan_runtime.grammar.errors import GrammarError
from banyan_runtime.step import I32, Bool, Step, StepResult, TokenLogprobs
from banyan_runtime.wire import Finish, FinishCode, LogprobColumns, PromptLogprobs, StepOutput, Vector, pack_ids


class Results:
    """`end` ends a request and adds its Finish to a list; `fail` ends one whose logits are NaN."""

    def __init__(
        self,
        memory: KvMemory,
        prefill: Prefill,
        end: Callable[[Request, FinishCode, list[Finish]], None],
        fail: Callable[[Request], None],
    ) -> None:
        self._memory = memory
        self._prefill = prefill
        self._end = end
        self._fail = fail
        self._members: _Members | None = None  # of the last decode step whose rows were all live

    def note(self, batch: ScheduledBatch, result: StepResult, now: float) -> StepOutput | None:
        """None if there is nothing to tell."""
        one_each = batch.step.mode == "decode" and result.accepted is None and len(result.token_ids) == len(batch.step.rows)
        return self._note_one_each(batch, result) if one_each else self._note_each(batch, result, now)

    def _note_each(self, batch: ScheduledBatch, result: StepResult, now: float) -> StepOutput | None:
        """The results of a step with prompts, or of one that drew several tokens for some rows, row by row."""
        step, tables = batch.step, self._memory.tables
        counts = step.samples if result.accepted is None else result.accepted
        starts, drawn = (np.cumsum(step.samples) - step.samples).tolist(), result.token_ids.tolist()
        kv_lens, failed = step.kv_lens.tolist(), result.failed.tolist()
        scores = self._prompt_scores(batch, result)
        ids, told, ended, told_counts = list[int](), list[int](), list[Finish](), list[int]()
        pooled = {} if step.pooling is None else {index: place for place, index in enumerate(np.flatnonzero(step.pooling).tolist())}
        vectors: list[Vector] = []
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
                code = self._obey(request, drawn[first : first + count], code)
                if request.over:
                    continue
                ids.append(request.id)
                told.extend(range(first, first + count))
                told_counts.append(count)
                if code is not None:
                    self._end(request, code, ended)
                elif index < batch.prompts:
                    self._memory.store(request, kv_lens[index])
            elif not request.max_new and kv_lens[index] == request.prompt_len:
                if index in pooled:
                    assert result.vectors is not None
                    vectors.append(Vector(request.id, result.vectors[pooled[index]].astype("<f4").tobytes()))
                self._end(request, FinishCode.LENGTH, ended)
        if result.accepted is not None:
            self._memory.trim(step.rows[tables.live[step.rows]])
        if scores:  # nothing more is told of who has failed
            lost = {request.id for request in batch.requests if request.over} - {finish.id for finish in ended}
            scores = [told_of for told_of in scores if told_of.id not in lost]
        several = told_counts if len(told) > len(ids) else []
        return _output(step, result, ids, np.array(told, dtype=np.int32), ended, several, scores, vectors)

    def _obey(self, request: Request, tokens: list[int], code: FinishCode | None) -> FinishCode | None:
        """Show a request's grammar its tokens, which end the request by `code`; returns by what they do. A request that its
        grammar has failed is over."""
        matcher = request.matcher
        if matcher is None or code is FinishCode.STOP:
            return code
        try:
            if all(matcher.accept(token) for token in tokens):
                return FinishCode.COMPLETE if matcher.is_terminated else code
            request.trouble = "the model generated what it does not admit"
        except GrammarError as error:
            request.trouble = str(error)
        self._fail(request)
        return None

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

    def _note_one_each(self, batch: ScheduledBatch, result: StepResult) -> StepOutput | None:
        """The results of a step that drew one token for every row."""
        tables, requests, rows, token_ids = self._memory.tables, batch.requests, batch.step.rows, result.token_ids
        live = tables.live[rows]
        if result.failed.any():
            for index in np.flatnonzero(result.failed & live).tolist():
                self._fail(requests[index])
            live &= ~result.failed
        complete = self._obey_each(batch, token_ids, live) if batch.constrained else []
        told: I32 | None = None
        if live.all():
            if self._members is None or self._members.rows is not rows:
                self._members = _Members(tables, rows)
            members = self._members
        else:
            told = np.flatnonzero(live).astype(np.int32)
            token_ids = token_ids[told]
            requests = [requests[index] for index in told.tolist()]
            members = _Members(tables, rows[told])
        lengths = tables.length[members.rows]
        tables.tokens[members.rows, lengths] = token_ids
        lengths += 1
        tables.length[members.rows] = lengths
        ending = lengths >= members.ends
        for stops in members.stops:  # mostly none, one or two
            ending |= stops == token_ids
        if members.many_stops is not None:
            ending |= members.many_stops
        ended: list[Finish] = []
        for request in complete:
            self._end(request, FinishCode.COMPLETE, ended)
        for index in ending.nonzero()[0].tolist():
            if requests[index].over:
                continue
            code = _finish_code(requests[index], int(token_ids[index]), int(lengths[index]))
            if code is not None:
                self._end(requests[index], code, ended)
        return _output(batch.step, result, members.ids, told, ended)

    def _obey_each(self, batch: ScheduledBatch, token_ids: I32, live: Bool) -> list[Request]:
        """Show the grammars of a step's rows their tokens. Returns whose grammar is complete; whose has failed is not live."""
        complete = list[Request]()
        for index in batch.constrained:
            if not live[index]:
                continue
            request, token = batch.requests[index], int(token_ids[index])
            stops = FinishCode.STOP if token in request.sampling.stop_token_ids else None
            if self._obey(request, [token], stops) is FinishCode.COMPLETE:
                complete.append(request)
            live[index] = not request.over
        return complete

    def _prompt_scores(self, batch: ScheduledBatch, result: StepResult) -> list[PromptLogprobs]:
        """What the front is told of prompt tokens, each once, however often a prompt is computed."""
        told = []
        for index, start, scores in prompt_scores(batch.step, result):
            request = batch.requests[index]
            if self._memory.tables.live[batch.step.rows[index]] and not result.failed[index]:
                request.unscored = start + len(scores.values)
                told.append(PromptLogprobs(request.id, start, columns(scores, request.prompt_top, len(request.named))))
        return told


class _Members:
    """What results of decode steps over the same rows are compared with."""

    def __init__(self, tables: Tables, rows: I32) -> None:
        stops = tables.stops[rows].T
        self.rows = rows
        self.ids: list[int] = tables.ids[rows].tolist()
        self.ends: I32 = tables.prompt[rows] + tables.max_new[rows]  # length at which a row is done
        self.stops: list[I32] = list(np.ascontiguousarray(stops[(stops >= 0).any(axis=1)]))  # each [rows]
        many = stops[-1] >= 0
        self.many_stops: Bool | None = many if many.any() else None  # there may be more of them than columns


def _output(
    step: Step,
    result: StepResult,
    ids: list[int],
    told: I32 | None,
    finished: list[Finish],
    counts: list[int] | None = None,
    prompt_logprobs: list[PromptLogprobs] | None = None,
    vectors: list[Vector] | None = None,
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
        vectors=vectors or [],
    )


def _finish_code(request: Request, token: int, length: int) -> FinishCode | None:
    """Whether the request ends with this token. A stop id as the last allowed token is a stop: the model was done."""
    if token in request.sampling.stop_token_ids:
        return FinishCode.STOP
    return FinishCode.LENGTH if length - request.prompt_len >= request.max_new else None


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

"""From scheduled requests to a `Step`: gathers the columns of the rows that run.

What a request wants of sampling lies in persistent columns by row and is gathered again only when the composition of the
batch changes; a decode step over the same rows costs a handful of numpy calls, whatever their number. A step owns its
arrays: each is a copy, or is shared with other steps and never written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from banyan_runtime.engine.constraints import Grammars, masks_of
from banyan_runtime.engine.memory.tables import STOP_COLUMNS, Tables, ragged
from banyan_runtime.engine.request import Request
from banyan_runtime.step import (
    F32,
    I8,
    I32,
    U64,
    Bool,
    Histories,
    PromptScores,
    Ragged,
    SamplingColumns,
    Step,
    TokenBiases,
    TokenMask,
)


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step and whose it is; `requests[i]` is row i of the step."""

    step: Step
    requests: list[Request]
    prompts: int = 0  # leading sequences that compute their prompts; the others decode
    chunk: int | None = None  # tokens that a step with prompts could have had
    background: bool = False  # every request is background
    constrained: list[int] = field(default_factory=list)  # rows that obey a grammar and draw a token


class StepBuilder:
    """Builds the steps over the rows of `tables`."""

    def __init__(self, tables: Tables, page_size: int, vocab_size: int, grammars: Grammars | None = None) -> None:
        rows = len(tables.length)
        self._vocab_size = vocab_size
        self._grammars = grammars
        self._tables = tables
        self._page_size = page_size
        self._floats: F32 = np.zeros((6, rows), dtype=np.float32)  # in the order of SamplingColumns, without top_k
        self._top_k: I32 = np.zeros(rows, dtype=np.int32)
        self._seed: U64 = np.zeros(rows, dtype=np.uint64)
        self._top_logprobs: I32 = np.full(rows, -1, dtype=np.int32)
        self._free_from: I32 = np.zeros(rows, dtype=np.int32)  # length from which on stop ids are allowed
        self._columns: tuple[I32, SamplingColumns] | None = None  # rows and what was gathered for them
        self._decode: _DecodeBatch | None = None

    def set_row(self, request: Request) -> None:
        """Write what a request that was just admitted wants of sampling."""
        row, sampling = request.row, request.sampling
        self._floats[:, row] = (
            sampling.temperature,
            sampling.top_p,
            sampling.min_p,
            sampling.frequency_penalty,
            sampling.presence_penalty,
            sampling.repetition_penalty,
        )
        self._top_k[row] = sampling.top_k
        self._seed[row] = sampling.seed
        self._top_logprobs[row] = request.output_top
        self._free_from[row] = request.prompt_len + sampling.min_new_tokens if len(request.stop_ids) else 0
        self._columns = None
        stops = self._tables.stops[row]
        stops[:] = -1
        stops[: min(len(request.stop_ids), STOP_COLUMNS)] = request.stop_ids[:STOP_COLUMNS]

    def prefill(self, requests: Sequence[Request], starts: Sequence[int], slots: Sequence[I32], running: int = 0) -> Step:
        """A step in which request i computes its tokens from position starts[i] on, len(slots[i]) of them.

        The last `running` requests decode: each computes one token, unknown where it is still being sampled. As in `decode`, masks
        may come later.
        """
        tables = self._tables
        rows = np.array([request.row for request in requests], dtype=np.int32)
        lens = np.array([len(part) for part in slots], dtype=np.int32)
        kv_lens = np.array(starts, dtype=np.int32) + lens
        samples = ((kv_lens >= tables.length[rows]) & (tables.max_new[rows] > 0)).astype(np.int32)
        ids = [tables.tokens[request.row, start : start + len(part)] for request, start, part in zip(requests, starts, slots, strict=True)]
        positions = [np.arange(start, start + len(part), dtype=np.int32) for start, part in zip(starts, slots, strict=True)]
        token_ids = np.concatenate(ids)
        unknown = tables.length[rows] < kv_lens
        token_ids[np.cumsum(lens)[unknown] - 1] = -1
        constrained = drawing(requests, samples)
        mask_later = bool(unknown[constrained].any())
        young = (kv_lens < self._free_from[rows]) & (samples > 0)
        begun = len(requests) - running
        return Step(
            mode="mixed" if running else "prefill",
            token_ids=token_ids,
            positions=np.concatenate(positions),
            out_slots=np.concatenate(slots),
            rows=rows,
            query_lens=lens,
            kv_lens=kv_lens,
            samples=samples,
            sampling=self._sampling(rows),
            updates=tables.take_changes(),
            histories=self._histories([requests[index] for index in np.flatnonzero(samples[:begun]).tolist()]),
            banned=_banned(requests, young),
            bias=_biases(requests),
            mask=None if mask_later else masks_of(requests, constrained, young, self._vocab_size, self._grammars),
            mask_later=mask_later,
            top_logprobs=_unless_none(np.where(samples > 0, self._top_logprobs[rows], np.int32(-1))),
            prompt_scores=self._scores(requests, starts, lens),
            named=_named(requests),
            pooling=_pooling(requests),
            page_size=self._page_size,
        )

    def decode(self, requests: list[Request], rows: I32, positions: I32, slots: I32, guesses: list[list[int]] | None = None) -> Step:
        """A step in which each row computes the token at its position, unknown where it is still being sampled, and its guesses.

        `rows` is the same object as long as the batch has the same rows in the same order.
        The masks of grammars come later (`late_mask`), where one of them has not seen its output's last token.
        """
        tables = self._tables
        kv_lens = positions + 1
        batch = self._batch_of(requests, rows)
        token_ids = tables.tokens[rows, positions]
        token_ids[tables.length[rows] < kv_lens] = -1
        young = kv_lens < batch.free_from
        mask_later = bool(batch.constrained) and bool((token_ids[batch.constrained] < 0).any())
        lens = batch.ones
        if guesses is not None:
            lens = np.array([1 + len(guess) for guess in guesses], dtype=np.int32)
            token_ids = np.array([id for token, guess in zip(token_ids.tolist(), guesses, strict=True) for id in (token, *guess)], np.int32)
            kv_lens = positions + lens
            positions = np.arange(len(token_ids), dtype=np.int32) + np.repeat(kv_lens - np.cumsum(lens, dtype=np.int32), lens)
        return Step(
            mode="decode",
            token_ids=token_ids,
            positions=positions,
            out_slots=slots,
            rows=rows,
            query_lens=lens,
            kv_lens=kv_lens,
            samples=lens,
            sampling=batch.sampling,
            updates=tables.take_changes(),
            banned=batch.banned(young),
            bias=batch.bias,
            mask=None if mask_later else masks_of(requests, batch.constrained, young, self._vocab_size, self._grammars),
            mask_later=mask_later,
            top_logprobs=batch.top_logprobs,
            named=batch.named,
            page_size=self._page_size,
        )

    def constrained(self, requests: list[Request], rows: I32) -> list[int]:
        """Which rows of a decode step obey a grammar."""
        return self._batch_of(requests, rows).constrained

    def late_mask(self, batch: ScheduledBatch) -> TokenMask | None:
        """The mask of a step that was launched without, now that the tokens before it are known."""
        step, requests = batch.step, batch.requests
        those = [index for index in batch.constrained if not requests[index].over]
        return masks_of(requests, those, step.kv_lens < self._free_from[step.rows], self._vocab_size, self._grammars)

    def _batch_of(self, requests: list[Request], rows: I32) -> _DecodeBatch:
        if self._decode is None or self._decode.rows is not rows:
            top, free_from = _unless_none(self._top_logprobs[rows]), self._free_from[rows]
            self._decode = _DecodeBatch(rows, requests, self._sampling(rows), top, free_from)
        return self._decode

    def _sampling(self, rows: I32) -> SamplingColumns:
        """The same object for the same rows in the same order, while they belong to the same requests."""
        if self._columns is not None and np.array_equal(self._columns[0], rows):
            return self._columns[1]
        temperature, top_p, min_p, frequency, presence, repetition = self._floats[:, rows]
        columns = SamplingColumns(
            temperature=temperature,
            top_k=self._top_k[rows],
            top_p=top_p,
            min_p=min_p,
            frequency_penalty=frequency,
            presence_penalty=presence,
            repetition_penalty=repetition,
            seed=self._seed[rows],
        )
        self._columns = (rows, columns)
        return columns

    def _histories(self, sampled: Sequence[Request]) -> Histories | None:
        """Of those that are sampled for the first time since their admission: from then on the runner counts by itself."""
        penalised = [request for request in sampled if request.penalised]
        if not penalised:
            return None
        tables = self._tables
        rows = np.array([request.row for request in penalised], dtype=np.int32)
        tokens = ragged([tables.tokens[request.row, : tables.length[request.row]] for request in penalised])
        return Histories(rows, tokens, tables.prompt[rows])

    def _scores(self, requests: Sequence[Request], starts: Sequence[int], lens: I32) -> PromptScores | None:
        at, targets, top = list[I32](), list[I32](), list[I32]()
        for request, start, offset, count in zip(requests, starts, (np.cumsum(lens) - lens).tolist(), lens.tolist(), strict=True):
            first, end = request.scored_by(start, start + count)
            if first < end:
                at.append(np.arange(first, end, dtype=np.int32) + np.int32(offset - start - 1))
                targets.append(self._tables.tokens[request.row, first:end])
                top.append(np.full(end - first, request.prompt_top, dtype=np.int32))
        return PromptScores(np.concatenate(at), np.concatenate(targets), np.concatenate(top)) if at else None


class _DecodeBatch:
    """What decode steps over the same rows have in common."""

    def __init__(self, rows: I32, requests: Sequence[Request], sampling: SamplingColumns, top_logprobs: I32 | None, free_from: I32) -> None:
        self.rows = rows
        self.sampling = sampling
        self.top_logprobs = top_logprobs
        self.ones: I32 = np.ones(len(rows), dtype=np.int32)
        self.bias = _biases(requests)
        self.named = _named(requests)
        self.constrained = [index for index, request in enumerate(requests) if request.matcher is not None]
        self.free_from = free_from
        self._requests = requests
        self._any_young = bool(free_from.any())
        self._young: Bool | None = None  # who may not stop yet, and what that forbids
        self._banned: Ragged | None = None

    def banned(self, young: Bool) -> Ragged | None:
        """Made anew only when somebody has grown long enough."""
        if not self._any_young:
            return None
        if self._young is None or not np.array_equal(young, self._young):
            self._young, self._banned = young, _banned(self._requests, young)
            self._any_young = self._banned is not None
        return self._banned


def drawing(requests: Sequence[Request], samples: I32) -> list[int]:
    """Which sequences obey a grammar and draw a token."""
    return [index for index in np.flatnonzero(samples).tolist() if requests[index].matcher is not None]


def _banned(requests: Sequence[Request], young: Bool) -> Ragged | None:
    """The stop ids of those who may not stop yet. Of those who obey a grammar their masks say it."""
    bans = [early and request.matcher is None for request, early in zip(requests, young.tolist(), strict=True)]
    if not any(bans):
        return None
    return ragged([request.stop_ids if ban else request.stop_ids[:0] for request, ban in zip(requests, bans, strict=True)])


def _biases(requests: Sequence[Request]) -> TokenBiases | None:
    """logit_bias of those who asked for it."""
    if not any(len(request.bias_ids) for request in requests):
        return None
    return TokenBiases(ragged([request.bias_ids for request in requests]), np.concatenate([request.bias_values for request in requests]))


def _named(requests: Sequence[Request]) -> I32 | None:
    """The further tokens whose log probabilities somebody wants, in the last columns of each row."""
    width = max((len(request.named) for request in requests), default=0)
    if not width:
        return None
    table = np.zeros((len(requests), width), dtype=np.int32)
    for row, request in zip(table, requests, strict=True):
        row[width - len(request.named) :] = request.named
    return table


def _pooling(requests: Sequence[Request]) -> I8 | None:
    """Whose vector is wanted."""
    if not any(request.pooling for request in requests):
        return None
    return np.array([request.pooling for request in requests], dtype=np.int8)


def _unless_none(top_logprobs: I32) -> I32 | None:
    return top_logprobs if (top_logprobs >= 0).any() else None

"""From scheduled requests to a `Step`: gathers the columns of the rows that run.

Sampling parameters lie in persistent columns by row and are gathered again only when the composition of the batch changes;
a decode step over the same rows costs a handful of numpy calls, whatever their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from banyan_runtime.engine.memory.tables import STOP_COLUMNS, Tables
from banyan_runtime.engine.request import Request
from banyan_runtime.step import F32, I32, U64, Bool, History, SamplingColumns, Step


class StepBuilder:
    """Builds the steps over the rows of `tables`."""

    def __init__(self, tables: Tables, page_size: int) -> None:
        rows = len(tables.length)
        self._tables = tables
        self._page_size = page_size
        self._floats: F32 = np.zeros((6, rows), dtype=np.float32)  # in the order of SamplingColumns, without top_k
        self._top_k: I32 = np.zeros(rows, dtype=np.int32)
        self._seed: U64 = np.zeros(rows, dtype=np.uint64)
        self._decode: _DecodeBatch | None = None

    def set_row(self, request: Request) -> None:
        """Write the sampling parameters of a request that was just admitted."""
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
        stops = self._tables.stops[row]
        stops[:] = -1
        stops[: min(len(request.stop_ids), STOP_COLUMNS)] = request.stop_ids[:STOP_COLUMNS]

    def prefill(self, requests: Sequence[Request], starts: Sequence[int], slots: Sequence[I32]) -> Step:
        """A step in which request i computes its text from position starts[i] on, len(slots[i]) tokens of it."""
        tables = self._tables
        rows = np.array([request.row for request in requests], dtype=np.int32)
        lens = np.array([len(part) for part in slots], dtype=np.int32)
        kv_lens = np.array(starts, dtype=np.int32) + lens
        samples: Bool = kv_lens == tables.length[rows]
        ids = [tables.tokens[request.row, start : start + len(part)] for request, start, part in zip(requests, starts, slots, strict=True)]
        positions = [np.arange(start, start + len(part), dtype=np.int32) for start, part in zip(starts, slots, strict=True)]
        special = _special(requests)
        return Step(
            mode="prefill",
            token_ids=np.concatenate(ids),
            positions=np.concatenate(positions),
            out_slots=np.concatenate(slots),
            rows=rows,
            query_lens=lens,
            kv_lens=kv_lens,
            samples=samples,
            sampling=self._sampling(rows, *self._lists(special, kv_lens)),
            table=tables.slots,
            page_size=self._page_size,
        )

    def decode(self, requests: Sequence[Request], rows: I32, positions: I32, slots: I32) -> Step:
        """A step in which each row computes the token at its position, unknown where it is still being sampled.

        `rows` is the same object as long as the batch has the same rows in the same order.
        """
        tables = self._tables
        kv_lens = positions + 1
        batch = self._decode
        if batch is None or batch.rows is not rows:
            batch = self._decode = _DecodeBatch(rows, requests, self._sampling(rows, *self._lists([], kv_lens)))
        token_ids = tables.tokens[rows, positions]
        token_ids[tables.length[rows] < kv_lens] = -1
        sampling = batch.sampling
        if batch.special:
            histories, banned = self._lists(batch.special, kv_lens)
            sampling = replace(sampling, histories=histories, banned=banned)
        return Step(
            mode="decode",
            token_ids=token_ids,
            positions=positions,
            out_slots=slots,
            rows=rows,
            query_lens=batch.ones,
            kv_lens=kv_lens,
            samples=batch.samples,
            sampling=sampling,
            table=tables.slots,
            page_size=self._page_size,
        )

    def _sampling(self, rows: I32, histories: list[History | None], banned: list[I32 | None]) -> SamplingColumns:
        temperature, top_p, min_p, frequency, presence, repetition = self._floats[:, rows]
        return SamplingColumns(
            temperature=temperature,
            top_k=self._top_k[rows],
            top_p=top_p,
            min_p=min_p,
            frequency_penalty=frequency,
            presence_penalty=presence,
            repetition_penalty=repetition,
            seed=self._seed[rows],
            histories=histories,
            banned=banned,
        )

    def _lists(self, special: list[tuple[int, Request]], kv_lens: I32) -> tuple[list[History | None], list[I32 | None]]:
        """Histories and banned ids of the few requests that need them."""
        histories: list[History | None] = [None] * len(kv_lens)
        banned: list[I32 | None] = [None] * len(kv_lens)
        for index, request in special:
            row = request.row
            if request.penalised:
                prompt, length = self._tables.prompt[row], self._tables.length[row]
                text = self._tables.tokens[row]
                histories[index] = History(prompt=text[:prompt], output=text[prompt:length])
            if kv_lens[index] - request.prompt_len < request.sampling.min_new_tokens:
                banned[index] = request.stop_ids
        return histories, banned


class _DecodeBatch:
    """What decode steps over the same rows have in common."""

    def __init__(self, rows: I32, requests: Sequence[Request], sampling: SamplingColumns) -> None:
        count = len(rows)
        self.rows = rows
        self.ones: I32 = np.ones(count, dtype=np.int32)
        self.samples: Bool = np.ones(count, dtype=np.bool_)
        self.special = _special(requests)
        self.sampling = sampling


def _special(requests: Sequence[Request]) -> list[tuple[int, Request]]:
    return [
        (index, request)
        for index, request in enumerate(requests)
        if request.penalised or (request.sampling.min_new_tokens > 0 and len(request.stop_ids))
    ]

"""Decode steps as CUDA graphs: all kernels of a step are launched by one call.

A graph is captured for some numbers of rows, and replays what was captured over the same memory; a step is copied there and padded to
the next number. Nothing of a graph depends on how long the texts are. The likeliest tokens have a graph of their own, for steps that
ask for nothing else; logits and sampling stay outside, so does everything but plain decode steps.
"""

from __future__ import annotations

import logging
import sys
import time
from bisect import bisect_left
from collections.abc import Callable
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from banyan_runtime.model import device as devices
from banyan_runtime.model.attention import Held, Replayed
from banyan_runtime.model.decoder import Decoder
from banyan_runtime.model.table import SlotTable
from banyan_runtime.step import Step

log = logging.getLogger("banyan")

_WARM_UPS: Final = 2
_GIB: Final = 1 << 30


def ladder(most: int) -> list[int]:
    """Numbers of rows that are worth a graph of their own: close together where a row more costs most (SGLang's, 0.5)."""
    sizes = [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, most + 1, 32)]
    return sorted({*(size for size in sizes if size <= most), most})


class Recorder(Protocol):
    def record(self, body: Callable[[], None]) -> Callable[[], None]:
        """Run `body` until it is warm, and capture it; what comes back runs it again."""


class CudaRecorder:
    """Captures CUDA graphs. They share one pool of memory, so the largest comes first."""

    def __init__(self) -> None:
        self._pool: Any = None
        # One: for each stream that products were computed on torch keeps a workspace.
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def record(self, body: Callable[[], None]) -> Callable[[], None]:
        beside = self._stream
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(_WARM_UPS):
                body()
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=beside):
            body()
        self._pool = graph.pool()
        return graph.replay


class DecodeGraphs:
    """The decoder's plain decode steps of up to `most` rows."""

    def __init__(self, decoder: Decoder, attention: Replayed, most: int, latest: Tensor, recorder: Recorder) -> None:
        """`latest` int64: the last token of each row, where it stays."""
        self._decoder, self._attention = decoder, attention
        self._sizes = ladder(most)
        self._latest = latest
        device = decoder.embed.device
        self._held = {size: Held.empty(size, device) for size in self._sizes}
        self._hidden = torch.zeros(most, decoder.spec.hidden_size, dtype=decoder.dtype, device=device)
        self._tokens = torch.zeros(most, dtype=torch.int64, device=device)
        self._failed = torch.zeros(most, dtype=torch.bool, device=device)
        self._last: tuple[Tensor, int] | None = None  # the hidden states given last, and their size on the ladder
        self._replays: dict[int, Callable[[], None]] = {}
        self._picks: dict[int, Callable[[], None]] = {}
        attention.hold(most)
        started = time.monotonic()
        free = devices.available_bytes(device)
        log.info("Capture cuda graph begin. This can take up to several minutes. avail mem=%.2f GB, bs %s", free / _GIB, self._sizes)
        for size in tqdm(self._sizes[::-1], desc="Capturing batches", disable=not sys.stderr.isatty()):
            self._replays[size] = recorder.record(lambda size=size: self._compute(size))  # type: ignore[misc]
            self._picks[size] = recorder.record(lambda size=size: self._pick(size))  # type: ignore[misc]
        left = devices.available_bytes(device)
        log.info(
            "Capture cuda graph end. Time elapsed: %.2f s. mem usage=%.2f GB. avail mem=%.2f GB.",
            time.monotonic() - started, (free - left) / _GIB, left / _GIB,
        )  # fmt: skip

    def hidden(self, step: Step, table: SlotTable) -> Tensor | None:
        """As `Forward.replayed`."""
        rows = len(step.rows)
        if step.mode != "decode" or len(step.token_ids) != rows or rows > self._sizes[-1]:
            return None
        size = self._sizes[bisect_left(self._sizes, rows)]
        own = np.zeros(size, np.int32)
        self._attention.fill(step, table, own)
        self._held[size].tell(step, own)
        self._replays[size]()
        self._last = self._hidden[:rows], size
        return self._last[0]

    def likeliest(self, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
        """As `Forward.likeliest`, of the hidden states that were given last; None: of others."""
        if self._last is None or hidden is not self._last[0]:
            return None
        rows = len(hidden)
        self._picks[self._last[1]]()
        return self._tokens[:rows].clone(), self._failed[:rows].clone()  # they may be asked for behind the next step

    def _compute(self, size: int) -> None:
        held = self._held[size]
        self._attention.plan_held(held)
        ids = torch.where(held.ids < 0, self._latest.index_select(0, held.rows), held.ids)
        self._hidden[:size].copy_(self._decoder.hidden(ids, held.positions, self._attention))

    def _pick(self, size: int) -> None:
        tokens, failed = self._decoder.likeliest(self._hidden[:size])
        self._tokens[:size].copy_(tokens)
        self._failed[:size].copy_(failed)

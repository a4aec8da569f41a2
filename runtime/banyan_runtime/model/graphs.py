"""Steps of few tokens as CUDA graphs: all kernels of a step are launched by one call.

A graph is captured for some numbers of tokens, and replays what was captured over the same memory; a step is copied there and padded to
the next number. Nothing of a graph depends on how long the texts are. Decode steps, of one token for each row, have graphs of their own,
which the tokens follow with another one, the likeliest or drawn ones, for steps that ask for nothing else. The others are for ends of
prompts whose beginning is cached, short prompts, and drafts. Their tokens stay outside, and whatever reads or edits logits.
"""

from __future__ import annotations

import logging
import sys
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from banyan_runtime.model import device as devices
from banyan_runtime.model.attention import Held, Replayed, most_sequences
from banyan_runtime.model.autotune import StepTimer, autotune
from banyan_runtime.model.capture import Recorder
from banyan_runtime.model.decoder import StepDecoder
from banyan_runtime.model.forward import Captured, Picked
from banyan_runtime.model.kernel_choices import KernelChoices
from banyan_runtime.model.table import SlotTable
from banyan_runtime.step import I32, Step, TableShape

log = logging.getLogger("banyan")

CAPTURE_S: Final = 60.0
"""Behind so many seconds no further graph is captured. It is done twice in a start, once to learn what it takes (`memory_profiling.py`)."""
PADDED: Final = 2
"""Times its tokens, at most, that a step is padded to for the sake of its sequences, and"""
SMALL: Final = 256  # tokens that are computed sooner than their kernels are launched one by one
_GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Sizes:
    """That steps are captured in, ascending."""

    rows: list[int]  # of decode steps
    tokens: list[int]  # of others

    @classmethod
    def upto(cls, rows: int, tokens: int) -> Sizes:
        return cls(ladder(rows), prompt_ladder(tokens))

    def within(self, rows: int) -> Sizes:
        """Where no decode step has more rows."""
        return Sizes(ladder(min(rows, self.rows[-1])) if self.rows else [], self.tokens)


NO_SIZES: Final = Sizes([], [])


def ladder(most: int) -> list[int]:
    """Numbers of rows that are worth a graph of their own: close together where a row more costs most (SGLang's, 0.5)."""
    return _upto(most, [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, most + 1, 32)])


def prompt_ladder(most: int) -> list[int]:
    """Numbers of tokens likewise: few, since of a step that is mostly launches more tokens cost little."""
    small = [16, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448]
    return _upto(most, [*small, *range(512, 2048, 128), *range(2048, 4096, 256), *range(4096, most + 1, 512)])


def _upto(most: int, sizes: list[int]) -> list[int]:
    return sorted({*(size for size in sizes if size <= most), *([most] if most else [])})


class StepGraphs:
    """Steps of few tokens: decode steps by their rows, all others by their tokens."""

    def __init__(
        self,
        decoder: StepDecoder,
        attention: Replayed,
        sizes: Sizes,
        latest: Tensor,
        recorder: Recorder,
        shape: TableShape,
        autotuned: KernelChoices | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`latest` int64: the last token of each row, where it stays; `shape` of the table that steps are planned with. `autotuned`: the
        choices to measure first. `clock`: seconds; behind CAPTURE_S of them what is not captured yet is left out."""
        self._decoder, self._attention = decoder, attention
        self._latest = latest
        device = decoder.embed.device
        decodes = [_Graph(Held.empty(size, device)) for size in sizes.rows]
        prompts = [_Graph(Held.empty(size, device, most_sequences(size))) for size in sizes.tokens]
        graphs = _in_turn(decodes, prompts)
        most = graphs[0].held.size
        self._hidden = torch.zeros(most, decoder.spec.hidden_size, dtype=decoder.dtype, device=device)
        self._tokens = torch.zeros(most, dtype=torch.int64, device=device)
        self._failed = torch.zeros(most, dtype=torch.bool, device=device)
        self._settings = torch.zeros(most, decoder.sampler.settings, dtype=torch.int32, device=device)
        self._last: tuple[Tensor, _Graph] | None = None  # the hidden states given last
        rows = max(sizes.rows, default=0)
        self._post = decoder.mail.post(max(graph.held.told.numel() for graph in graphs), self._settings.numel(), rows, device)
        attention.hold([graph.held for graph in graphs])
        if autotuned is not None:
            autotune(autotuned, [graph.held for graph in decodes], StepTimer(attention, shape, recorder, self._compute))
            log.info("Kernels by product and rows, as measured: %s", autotuned.line())
        free = _free(device)
        started = clock()
        log.info(
            "Capture cuda graph begin. This can take up to several minutes. avail mem=%.2f GB, bs %s, tokens %s",
            free / _GIB, sizes.rows, sizes.tokens,
        )  # fmt: skip
        for graph in tqdm(graphs, desc="Capturing batches", disable=not sys.stderr.isatty()):
            if clock() - started > CAPTURE_S:
                break
            replay = recorder.record(partial(self._begin, graph.held))
            if graph.held.sequences is None:
                graph.likeliest = recorder.record(partial(self._pick, graph.held, None))
                if decoder.sampler.settings:
                    graph.drawn = recorder.record(partial(self._pick, graph.held, self._settings[: graph.held.size]))
            graph.replay = replay
        self.begin()
        self._decodes, self._prompts = _captured(decodes), _captured(prompts)
        left = _free(device)
        self.captured = Captured(max(0, free - left), clock() - started)
        self._tell_of(_missing(decodes), _missing(prompts))
        log.info(
            "Capture cuda graph end. Time elapsed: %.2f s. mem usage=%.2f GB. avail mem=%.2f GB.",
            self.captured.seconds, self.captured.bytes / _GIB, left / _GIB,
        )  # fmt: skip

    def _tell_of(self, rows: list[int], tokens: list[int]) -> None:
        """Sizes that there was no time for."""
        if rows or tokens:
            log.warning(
                "Capturing graphs was ended after %.0f s. Without one of their own stay decode steps of %s rows and other steps of %s "
                "tokens: the next larger graph computes them, padded, or their kernels are launched one by one. --cuda-graph-max-bs and "
                "--cuda-graph-max-tokens make the list shorter.",
                self.captured.seconds, rows, tokens,
            )  # fmt: skip

    def hidden(self, step: Step, table: SlotTable) -> Tensor | None:
        """As `Forward.replayed`."""
        graph = self._fitting(step)
        if graph is None:
            return None
        graph.held.tell(step, self._attention.fill(step, table, graph.held), self._post.tell)
        assert graph.replay is not None, "it was captured"
        graph.replay()
        hidden = self._hidden[: len(step.token_ids)]
        self._last = hidden, graph
        return hidden

    def begin(self) -> None:
        """Behind captures, which run what they capture, and where a step may not have been replayed that was told."""
        self._post.begin()

    def pick(self, hidden: Tensor, told: I32 | None) -> Picked | None:
        """As `Forward.pick`, of the hidden states that were given last, told as `Sampler.told`; None: of others, or of prompts."""
        if self._last is None or hidden is not self._last[0]:
            return None
        graph, rows = self._last[1], len(hidden)
        pick = graph.likeliest if told is None else graph.drawn
        if pick is None:
            return None
        if told is not None:
            settings = self._settings[: graph.held.size]
            padded = np.zeros(tuple(settings.shape), np.int32)
            padded[:rows] = told
            self._post.set(padded, settings)
        pick()
        return Picked(self._tokens[:rows], self._failed[:rows], self._post.answers(rows))

    def _fitting(self, step: Step) -> _Graph | None:
        """The smallest that was captured."""
        tokens, sequences = len(step.token_ids), len(step.rows)
        if tokens == sequences and self._decodes and tokens <= self._decodes[-1].held.size:
            return self._decodes[bisect_left(self._decodes, tokens, key=_size)]
        fitting = self._prompts[bisect_left(self._prompts, tokens, key=_size) :]
        graph = next((graph for graph in fitting if sequences <= most_sequences(graph.held.size)), None)
        return None if graph is None or graph.held.size > max(PADDED * tokens, SMALL) else graph

    def _begin(self, held: Held) -> None:
        self._post.take(held.told)
        self._compute(held)

    def _compute(self, held: Held) -> None:
        self._attention.plan_held(held)
        self._decoder.hidden_held(held, self._latest, self._attention, self._hidden[: held.size])

    def _pick(self, held: Held, settings: Tensor | None) -> None:
        if settings is not None:
            self._post.take_settings(settings)
        tokens, failed = self._tokens[: held.size], self._failed[: held.size]
        self._decoder.pick(self._hidden[: held.size], settings, tokens, failed)
        self._post.answer(tokens, failed, held, self._latest)


@dataclass(slots=True, eq=False)
class _Graph:
    held: Held
    replay: Callable[[], None] | None = None  # None: not captured
    likeliest: Callable[[], None] | None = None  # tokens, behind decode steps
    drawn: Callable[[], None] | None = None  # tokens, likewise


def _size(graph: _Graph) -> int:
    return graph.held.size


def _in_turn(*kinds: list[_Graph]) -> list[_Graph]:
    """In which order to capture: the largest first, since memory that it took does for all others. Then those that are halves of one
    another, so that wherever time ends no step is padded to more than about twice its size, if it is of no more than the largest. Then
    decode steps, of which there are most."""
    coarse = {id(graph) for kind in kinds for graph in kind if graph is kind[-1] or graph.held.size & (graph.held.size - 1) == 0}
    every = [graph for kind in kinds for graph in kind]
    fine = {id(graph) for graph in every} - coarse
    return sorted(every, key=lambda graph: (id(graph) in fine, id(graph) in fine and graph.held.sequences is not None, -graph.held.size))


def _captured(graphs: list[_Graph]) -> list[_Graph]:
    return [graph for graph in graphs if graph.replay is not None]


def _missing(graphs: list[_Graph]) -> list[int]:
    return [graph.held.size for graph in graphs if graph.replay is None]


def _free(device: torch.device) -> int:
    """Bytes that are free but for what is in use: a capture begins by giving torch's reserve back."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    return devices.available_bytes(device)

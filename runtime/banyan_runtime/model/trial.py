"""The largest steps that may come, tried over a pool of next to nothing once the weights are there: what they take, the pool cannot have.

Keys go to the padding slot. The tables are those of few positions; what longer ones take is arithmetic (`capacity.py`). What is decided
of the numbers is `headroom.py`'s.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Literal

import numpy as np
import torch

from banyan_runtime.config import ServerConfig
from banyan_runtime.errors import ConfigError
from banyan_runtime.model import capacity, headroom
from banyan_runtime.model import device as devices
from banyan_runtime.model.blank import blank
from banyan_runtime.model.choice import Choice
from banyan_runtime.model.headroom import Demand, Graphs, Largest, Measured, Settled, Taken
from banyan_runtime.model.runner import ModelRunner
from banyan_runtime.step import I32, MOST_GUESSES, OutOfMemory, Pooling, PromptScores, Step, TableShape

log = logging.getLogger("banyan")

POSITIONS: Final = 2048
"""Of the tables: several prompts take what a longer one takes, and of a longer context attention needs no more at once. A table of 4,096
such rows takes 32 MiB."""
TOP: Final = 20  # likeliest tokens asked for beside each: the most that chat completions may ask for


class Gauge:
    """A CUDA device's memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.set_per_process_memory_fraction(1.0, device)  # whatever was served before
        self.total: int = torch.cuda.mem_get_info(device)[1]

    def settled(self) -> int:
        """Free bytes, with nothing in torch's reserve."""
        gc.collect()  # graphs and what they hold are in cycles
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return devices.available_bytes(self._device)

    def own(self) -> int:
        """Bytes that torch holds."""
        return int(torch.cuda.memory_reserved(self._device))

    def begin(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def least_free(self) -> int:
        """Free bytes when torch held most since `begin`: captures give its reserve back on their way, and so may a shortage."""
        torch.cuda.synchronize(self._device)  # before it, what is queued may still take memory for kernels that are loaded late
        given_back = torch.cuda.max_memory_reserved(self._device) - torch.cuda.memory_reserved(self._device)
        return devices.available_bytes(self._device) - max(0, int(given_back))

    def keep(self, activations: int, spare: int) -> None:
        """Take what steps need, as one piece that all of them share: pieces of many sizes, as batches grow, would not fit into one
        another. And have torch leave so many bytes: what it does not know of needs some, such as kernels that are loaded late."""
        torch.cuda.empty_cache()
        with contextlib.suppress(torch.OutOfMemoryError):  # somebody was faster
            torch.empty(max(0, activations), dtype=torch.uint8, device=self._device)
        allowed = self.own() + max(0, devices.available_bytes(self._device) - spare)
        torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / self.total), self._device)

    def most_taken(self) -> int:
        """Bytes of all tensors that were there at once since `begin`, beside those that are there now."""
        return max(0, int(torch.cuda.max_memory_allocated(self._device) - torch.cuda.memory_allocated(self._device)))


@dataclass(frozen=True, slots=True)
class Tried:
    measured: Measured
    demand: Demand
    config: ServerConfig  # with what it left open settled, where the defaults were too much for the device
    graphs: Graphs  # that fit
    seconds: float


def try_largest(
    config: ServerConfig, choice: Choice, make: Callable[[Graphs], ModelRunner], gauge: Gauge, free_at_first: int, own_at_first: int
) -> Tried:
    """`make` gives a runner over the smallest pool, with such graphs. Raises ConfigError where the largest steps and the graphs that were
    asked for do not fit beside the weights and the smallest pool."""
    started = time.monotonic()
    loaded = gauge.settled()
    at_first = Measured(gauge.total, free_at_first, own_at_first, loaded, 0, loaded, 0, 0, 0)
    asked, first = choice.graphs, None
    found: _Found | None = None  # with room for a pool: the first that takes nothing of what was asked for, or the first
    for graphs in headroom.tries(config, asked):
        if found is not None and headroom.insists_on(config, asked, graphs):
            break  # what was asked for is too much with any graphs that were not
        now = _try(config, replace(choice, graphs=graphs), make, gauge, at_first)
        first = first or now
        if now.served and (found is None or not now.settled(config, asked).insists):
            found = now
        if now.hopeless or (found is not None and not found.settled(config, asked).insists):
            break
    assert first is not None, "there is always one try"
    if found is None:
        remedy = _remedy(choice, now.measured, now.demand(now.last))
        raise ConfigError(headroom.refusal(now.refused, now.demand(now.possible(config)), remedy))
    measured, demand, last, wanted = found.measured, found.demand, found.last, found.possible(config)
    settled = found.settled(config, asked)
    if settled.insists:
        why = "" if first.prepared else "Capturing CUDA graphs takes more than there is. "
        raise ConfigError(headroom.refusal(first.refused, first.demand(wanted), f"{why}Set {settled.insists}, which was tried and fits."))
    if settled.open:
        log.warning("The largest steps of the defaults take too much of the device's memory; %s are used.", settled.open)
    return Tried(measured, demand(last), settled.config, found.graphs, time.monotonic() - started)


@dataclass(frozen=True, slots=True)
class _Found:
    """What became of a trial."""

    graphs: Graphs
    context_len: int
    measured: Measured
    demand: Callable[[Largest], Demand]
    wanted: Largest
    last: Largest  # that was tried; it fits where there is room for a pool
    refused: Measured  # the first that did not fit, if any did not
    prepared: bool  # whether tables and graphs fit
    served: bool  # whether there is room for a pool beside the last

    @property
    def hopeless(self) -> bool:
        """Whether no fewer graphs would do: not even if they took nothing, nor tables of theirs."""
        demand = self.demand(self.last)
        spared = self.measured.graphs + demand.beside(demand.least)
        return self.prepared and (not self.measured.graphs or headroom.lacking(self.measured, demand) > spared) and not self.served

    def possible(self, config: ServerConfig) -> Largest:
        """Of what was wanted: with the pool that is left no larger step can come, whatever was asked for."""
        tokens = max(config.page_size, self.demand(self.last).fitting(self.measured.room))
        possible = Largest.of(config, self.context_len, tokens)
        return Largest(min(self.wanted.prompt_tokens, possible.prompt_tokens), min(self.wanted.rows, possible.rows))

    def settled(self, config: ServerConfig, asked: Graphs) -> Settled:
        return headroom.settled(config, self.possible(config), self.last, asked, self.graphs)


def _try(config: ServerConfig, choice: Choice, make: Callable[[Graphs], ModelRunner], gauge: Gauge, at_first: Measured) -> _Found:
    """The largest steps, and smaller ones where those do not fit."""
    wanted = Largest.of(config, choice.context_len, capacity.most_tokens(config, choice, at_first.free_loaded))
    trial = _Trial(config, choice, make, wanted)

    def demand(largest: Largest) -> Demand:
        return capacity.demand(config, choice, largest.rows)

    gauge.begin()
    if not fits(trial.prepare):
        trial.close()
        measured = replace(at_first, free_after=gauge.settled())
        return _Found(choice.graphs, choice.context_len, measured, demand, wanted, wanted, measured, prepared=False, served=False)
    measured = replace(at_first, trial_kv=trial.kv_bytes, trial_tables=trial.tables_bytes, graphs=trial.graph_bytes)
    prepared = gauge.least_free()
    refused: Measured | None = None
    largest: Largest | None = wanted
    last = wanted
    while largest is not None:
        last = largest
        gauge.settled()
        gauge.begin()
        prompts, rows = trial.steps(largest)
        if not fits(prompts):
            refused, largest = refused or measured, largest.smaller(prompts=True)
            continue
        prompt_step, least = gauge.most_taken(), gauge.least_free()
        gauge.begin()
        if not fits(rows):
            refused, largest = refused or measured, largest.smaller(prompts=False)
            continue
        taken = Taken(prompt_step, gauge.most_taken())
        found = replace(measured, free_at_peak=min(prepared, least, gauge.least_free()))
        smaller = headroom.settle(found, demand(largest), taken, largest, config)
        if smaller is None:
            measured = found
            break
        if not headroom.served(found, demand(largest)):
            refused = refused or found
        largest = smaller
    del prompts, rows
    trial.close()
    free_after = gauge.settled()
    measured = replace(measured, free_after=free_after)
    served = largest is not None and headroom.served(measured, demand(last))
    refused = replace(refused or measured, free_after=free_after)
    return _Found(choice.graphs, choice.context_len, measured, demand, wanted, last, refused, prepared=True, served=served)


class _Trial:
    """A runner over the smallest pool, and the largest steps for it."""

    def __init__(self, config: ServerConfig, choice: Choice, make: Callable[[Graphs], ModelRunner], largest: Largest) -> None:
        self._make = partial(make, choice.graphs)
        self._vectors = not config.serves_text
        self._guesses = 0 if config.speculative_algorithm is None else MOST_GUESSES
        self._page_size = config.page_size
        positions = max(min(POSITIONS, choice.context_len), -(-largest.prompt_tokens // largest.rows))
        self._shape = TableShape(largest.rows, positions)
        self._runner: ModelRunner | None = None
        self.tables_bytes = capacity.tables_bytes(choice, self._shape)

    def prepare(self) -> None:
        self._runner = self._make()
        self._runner.prepare(self._shape)

    @property
    def kv_bytes(self) -> int:
        return self._there.info.kv_bytes

    @property
    def graph_bytes(self) -> int:
        return self._there.info.graph_bytes

    @property
    def _there(self) -> ModelRunner:
        assert self._runner is not None, "prepare comes first"
        return self._runner

    def steps(self, largest: Largest) -> tuple[Callable[[], None], Callable[[], None]]:
        """What computes the largest step with prompts, and the largest decode step."""
        runner, positions = self._there, self._shape.positions
        whole, rest = divmod(largest.prompt_tokens, positions)
        lens = np.array([positions] * whole + [rest] * bool(rest), np.int32)
        page = self._page_size
        prompts = vectors(lens, page) if self._vectors else texts("prefill", lens, lens, page)
        each = -(-(largest.rows + self._guesses) // largest.rows)
        ones = np.ones(largest.rows, np.int32)
        rows = texts("decode", ones * min(each, positions), ones * positions, page)

        def compute(step: Step, *, replay: bool) -> Callable[[], None]:
            def work() -> None:
                runner.launch(step, replay=replay).result()

            return work

        # Of as many tokens, but of more sequences than a graph is for, a step takes memory that no graph holds.
        return compute(prompts, replay=False), (lambda: None) if self._vectors else compute(rows, replay=True)

    def close(self) -> None:
        self._runner = None


def texts(mode: Literal["prefill", "decode"], query_lens: I32, kv_lens: I32, page_size: int) -> Step:
    """A step that asks for all that takes memory: a token drawn for each sequence, and the likeliest ones beside each of prompts' tokens
    and of those drawn."""
    step = blank(query_lens, kv_lens, page_size, mode)
    tokens = len(step.token_ids)
    scores = PromptScores(np.arange(tokens, dtype=np.int32), np.zeros(tokens, np.int32), np.full(tokens, TOP, np.int32))
    ones = np.ones_like(query_lens)
    if mode == "decode":
        return replace(step, samples=query_lens, top_logprobs=TOP * ones)
    return replace(step, samples=ones, top_logprobs=TOP * ones, prompt_scores=scores)


def vectors(query_lens: I32, page_size: int) -> Step:
    """A step of prompts that become vectors."""
    return replace(blank(query_lens, query_lens, page_size), pooling=np.full(len(query_lens), Pooling.MEAN, np.int8))


def fits(work: Callable[[], None]) -> bool:
    """Whether there is memory for it. When this returns, nothing holds what was allocated till then but `work` itself."""
    try:
        work()
    except OutOfMemory:
        return False
    except (RuntimeError, MemoryError) as error:
        if devices.shortage(error) is None:
            raise
        return False
    return True


def _remedy(choice: Choice, measured: Measured, demand: Demand) -> str:
    """Where neither smaller steps nor fewer graphs would do."""
    return headroom.remedy(measured, demand, wide=choice.dtype == torch.float32)

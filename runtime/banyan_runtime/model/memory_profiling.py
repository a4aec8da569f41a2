"""How many tokens the KV pool holds.

On a GPU the largest steps run once and all graphs are captured once, over a pool of one page; the pool gets the rest.
The graphs are captured again over that pool, because a graph holds addresses. On the CPU the host's free memory decides.
Sizes are bytes unless they are named otherwise.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
import torch

from banyan_runtime.config import ServerConfig
from banyan_runtime.errors import ConfigError
from banyan_runtime.model import device as devices
from banyan_runtime.model import host, rope
from banyan_runtime.model.blank import blank
from banyan_runtime.model.choice import NO_GRAPHS, Choice
from banyan_runtime.model.penalties import table_bytes
from banyan_runtime.model.pool import cell_bytes
from banyan_runtime.model.runner import ModelRunner
from banyan_runtime.step import I32, MOST_GUESSES, OutOfMemory, Pooling, PromptScores, Step, TableShape

log = logging.getLogger("banyan")

GIB: Final = 1 << 30
MIB: Final = 1 << 20
MARGIN_SHARE: Final = 50  # one part in so many of a device is left alone: fragments, and what the driver takes
MARGIN_LEAST: Final = 512 * MIB
LEAST_TOKENS: Final = 16  # of a pool; with fewer a server could not warm up
LARGE_DEVICE: Final = 70 * GIB  # as in vLLM, smaller devices have smaller default steps
SMALL_CHUNK: Final = 2048  # tokens
SMALL_ROWS: Final = 256
CHUNK: Final = 8192  # tokens of a prefill step on large devices
FEWEST_ROWS, MOST_ROWS = 2048, 4096  # of a decode step on large devices, as the pool has room
POSITIONS: Final = 2048  # of the profile's tables: attention needs no more at once for a longer context
TOP: Final = 20  # logprobs of each token, the most that a chat completion may ask for
FEWER_GRAPHS: Final = "lower --cuda-graph-max-bs and --cuda-graph-max-tokens, or set --disable-cuda-graph"
_SLACK: Final = 8  # positions that the engine's table has beyond the context, at most


def with_defaults(config: ServerConfig, total: int) -> ServerConfig:
    """The options of a start on a GPU with so much memory."""
    if total >= LARGE_DEVICE:
        return config
    chunk = SMALL_CHUNK if config.chunked_prefill_size is None else config.chunked_prefill_size
    return replace(config, chunked_prefill_size=chunk, max_running_requests=config.max_running_requests or SMALL_ROWS)


def rows_of(config: ServerConfig, context_len: int, pool_tokens: int) -> int:
    """Requests that run at once, with pages for all of them."""
    return config.max_running_requests or min(max(int(pool_tokens / context_len * 512), FEWEST_ROWS), MOST_ROWS)


@dataclass(frozen=True, slots=True)
class LargestSteps:
    """The largest steps that the engine may launch."""

    prompt_tokens: int  # of a prefill step
    rows: int  # of a decode step

    @staticmethod
    def of(config: ServerConfig, context_len: int, pool_tokens: int) -> LargestSteps:
        """The steps with a pool of so many tokens. Without chunks a prefill step holds one prompt of any length, or several to a limit."""
        longest = min(context_len, pool_tokens)
        chunk = CHUNK if config.chunked_prefill_size is None else config.chunked_prefill_size
        tokens = -(-chunk // config.page_size) * config.page_size if chunk > 0 else max(config.max_prefill_tokens, longest)
        rows = min(rows_of(config, context_len, pool_tokens), pool_tokens // config.page_size)
        return LargestSteps(max(1, min(tokens, rows * longest, pool_tokens)), max(1, rows))


class DeviceMemory:
    """The memory of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.set_per_process_memory_fraction(1.0, device)  # an earlier model may have set another one
        self.total: int = torch.cuda.mem_get_info(device)[1]

    def free(self) -> int:
        """Free bytes, with nothing in torch's reserve."""
        gc.collect()  # graphs and their memory are in cycles
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return devices.available_bytes(self._device)

    def begin(self) -> None:
        """Begin to watch for `least_free`."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def least_free(self) -> int:
        """Free bytes when torch held most since `begin`."""
        torch.cuda.synchronize(self._device)  # queued work may still take memory for kernels that are loaded late
        given_back = torch.cuda.max_memory_reserved(self._device) - torch.cuda.memory_reserved(self._device)
        return devices.available_bytes(self._device) - max(0, int(given_back))

    def keep(self, activations: int, spare: int) -> None:
        """Reserve one piece for the activations of all steps, and leave `spare` bytes to the driver. Pieces of many sizes would not fit
        into one another."""
        torch.cuda.empty_cache()
        with contextlib.suppress(torch.OutOfMemoryError):  # another process was faster
            torch.empty(max(0, activations), dtype=torch.uint8, device=self._device)
        allowed = int(torch.cuda.memory_reserved(self._device)) + max(0, devices.available_bytes(self._device) - spare)
        torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / self.total), self._device)


@dataclass(frozen=True, slots=True)
class Profile:
    """The memory of a device, from before the weights to behind the profile."""

    total: int
    free_before: int  # the weights
    free_loaded: int  # the weights are there
    least_free: int  # in the profile; torch's reserve counts as taken
    free_after: int  # the profile's runner is gone
    pool: int  # of the profile, with its tables
    graphs: int
    steps: LargestSteps
    seconds: float

    @property
    def weights(self) -> int:
        return max(0, self.free_before - self.free_loaded)

    @property
    def lasting(self) -> int:
        """Kernels and workspaces, which stay with the process."""
        return max(0, self.free_loaded - self.free_after)

    @property
    def need(self) -> int:
        """Graphs and activations."""
        return max(0, self.free_after - self.least_free - self.pool)

    @property
    def activations(self) -> int:
        return max(0, self.need - self.graphs)

    @property
    def margin(self) -> int:
        return max(self.total // MARGIN_SHARE, MARGIN_LEAST)

    @property
    def room(self) -> int:
        """Bytes for the pool and its tables."""
        return self.free_after - self.need - self.margin


@dataclass(frozen=True, slots=True)
class PoolCost:
    """What a KV pool takes on a GPU."""

    config: ServerConfig
    choice: Choice
    rows: int  # of a decode step, at most

    @property
    def least(self) -> int:
        """Tokens of the smallest pool."""
        return -(-LEAST_TOKENS // self.config.page_size) * self.config.page_size

    def kv(self, tokens: int) -> int:
        """Keys and values, with the page for padding."""
        return (tokens + self.config.page_size) * cell_bytes(self.choice.spec, self.choice.kv_dtype)

    def tables(self, tokens: int) -> int:
        """The tables beside a pool of so many tokens. More tokens never need smaller tables."""
        allowed = min(self.rows, rows_of(self.config, self.choice.context_len, tokens), tokens // self.config.page_size)
        positions = min(self.choice.context_len, tokens) + _SLACK
        rotations = rope.table_bytes(self.choice.spec, positions, self.choice.dtype)
        return tables_bytes(self.choice, TableShape(allowed, positions)) + 2 * 2 * rotations  # a table grows by a copy

    def fitting(self, room: int) -> int:
        """Tokens, whole pages, of the largest pool that fits with its tables; 0: none does."""
        page = self.config.page_size
        pages = range(max(0, room // self.kv(0)) + 1)
        return max(0, bisect_right(pages, room, key=lambda count: self.kv(count * page) + self.tables(count * page)) - 1) * page


def tables_bytes(choice: Choice, shape: TableShape) -> int:
    """What a GPU holds for penalties and for attention with tables of such a shape."""
    graphs = choice.graphs
    attention = 0 if choice.attention is None else choice.attention.beside(shape, min(shape.rows, graphs.rows), graphs.tokens)
    return table_bytes(shape) + attention


def cpu_tokens(config: ServerConfig, choice: Choice, free_before_load: int) -> int:
    """Tokens of the pool on the CPU, a multiple of the page size: what fits, or --max-total-tokens where that is less.

    The default is a quarter of the memory limit and at most 16 contexts or 65,536 tokens. A few long requests then do not keep the
    others waiting, and the machine's other programs keep the rest. Raises ConfigError when not even one page fits, or is wanted.
    """
    cell = cell_bytes(choice.spec, choice.kv_dtype)
    available = devices.available_bytes(choice.device)
    fraction = config.mem_fraction_static or 0.9
    fits = int(available - free_before_load * (1 - fraction)) // cell
    contexts = max(16 * choice.context_len, config.page_size)
    default = fits if config.mem_fraction_static else min(contexts, 65_536, host.memory_limit() // 4 // cell, fits)
    _check_wanted(config, fits)
    tokens = min(config.max_total_tokens or default, fits) // config.page_size * config.page_size
    if tokens <= 0:
        raise ConfigError(
            f"Not enough memory. Please try to increase --mem-fraction-static. {available / GIB:.2f} GB are free, of which "
            f"{fraction:.0%} may be used; a token of this model takes {cell} bytes, --page-size={config.page_size} of them are the least."
        )
    return tokens


def profile(config: ServerConfig, choice: Choice, make: Callable[[], ModelRunner], memory: DeviceMemory, free_before: int) -> Profile:
    """Run the largest steps and capture the graphs, over a pool of one page that `make` allocates.

    Raises ConfigError where they do not fit.
    """
    started, free_loaded = time.monotonic(), memory.free()
    most = free_loaded // cell_bytes(choice.spec, choice.kv_dtype)
    steps = LargestSteps.of(config, choice.context_len, max(config.page_size, min(most, config.max_total_tokens or most)))
    shape = TableShape(steps.rows, max(min(POSITIONS, choice.context_len), -(-steps.prompt_tokens // steps.rows)))
    fewer_rows = f"set --max-running-requests below {steps.rows}"
    fewer_graphs = fewer_rows if choice.graphs == NO_GRAPHS else FEWER_GRAPHS
    beside = f"beside weights of {said(max(0, free_before - free_loaded))} ({said(free_loaded)} of {said(memory.total)} are free)"
    memory.begin()
    with no_memory(f"The device has no memory for CUDA graphs and tables {beside}; {fewer_graphs}"):
        runner = make()
        runner.prepare(shape)
    memory.free()  # the steps do not need what captures left in reserve
    with no_memory(
        f"The device has no memory for prefill steps of {steps.prompt_tokens} tokens {beside}; set --chunked-prefill-size below "
        f"{steps.prompt_tokens}"
    ):
        # No graph: a step of as many tokens and more sequences than a graph is for takes memory that the graph does not hold.
        runner.launch(_prefill(config, steps, shape.positions), replay=False).result()
    with no_memory(f"The device has no memory for decode steps of {steps.rows} rows {beside}; {fewer_rows}"):
        if config.serves_text:
            runner.launch(_decode(config, steps, shape.positions)).result()
    least_free, pool, taken = memory.least_free(), runner.info.kv_bytes + tables_bytes(choice, shape), runner.info.graph_bytes
    del runner
    free_after = memory.free()
    return Profile(memory.total, free_before, free_loaded, least_free, free_after, pool, taken, steps, time.monotonic() - started)


@contextlib.contextmanager
def no_memory(message: str) -> Iterator[None]:
    """Raise ConfigError for an error that is want of memory."""
    try:
        yield
    except (OutOfMemory, RuntimeError, MemoryError) as error:
        if not isinstance(error, OutOfMemory) and devices.shortage(error) is None:
            raise
        raise ConfigError(message) from error


def _prefill(config: ServerConfig, steps: LargestSteps, positions: int) -> Step:
    whole, rest = divmod(steps.prompt_tokens, positions)
    lens = np.array([positions] * whole + [rest] * bool(rest), np.int32)
    return text_step("prefill", lens, lens, config.page_size) if config.serves_text else vector_step(lens, config.page_size)


def _decode(config: ServerConfig, steps: LargestSteps, positions: int) -> Step:
    guesses = 0 if config.speculative_algorithm is None else MOST_GUESSES
    each = min(-(-(steps.rows + guesses) // steps.rows), positions)
    ones = np.ones(steps.rows, np.int32)
    return text_step("decode", ones * each, ones * positions, config.page_size)


def text_step(mode: Literal["prefill", "decode"], query_lens: I32, kv_lens: I32, page_size: int) -> Step:
    """A step that asks for everything that takes memory: a drawn token for each sequence, and the likeliest tokens beside each token of a
    prompt and each drawn one."""
    step = blank(query_lens, kv_lens, page_size, mode)
    tokens = len(step.token_ids)
    scores = PromptScores(np.arange(tokens, dtype=np.int32), np.zeros(tokens, np.int32), np.full(tokens, TOP, np.int32))
    ones = np.ones_like(query_lens)
    if mode == "decode":
        return replace(step, samples=query_lens, top_logprobs=TOP * ones)
    return replace(step, samples=ones, top_logprobs=TOP * ones, prompt_scores=scores)


def vector_step(query_lens: I32, page_size: int) -> Step:
    """A step of prompts that become vectors."""
    return replace(blank(query_lens, query_lens, page_size), pooling=np.full(len(query_lens), Pooling.MEAN, np.int8))


def gpu_tokens(profile: Profile, cost: PoolCost) -> int:
    """Tokens of the pool on a GPU: what fits, or --mem-fraction-static or --max-total-tokens where that is less.

    Raises ConfigError when nothing fits, the fraction leaves no room, or less than a page is wanted.
    """
    config, fits = cost.config, cost.fitting(profile.room)
    _check_wanted(config, fits)
    if fits < cost.least:
        missing = cost.kv(cost.least) + cost.tables(cost.least) - profile.room
        raise ConfigError(
            f"Not enough memory on the device. Of {said(profile.total)}: {listed(parts(profile, cost, cost.least))}; {said(missing)} are "
            f"missing; {_remedy(profile, cost, missing)}"
        )
    limits = [fits, config.max_total_tokens or fits]
    if config.mem_fraction_static is not None:
        asked = cost.fitting(int(profile.free_loaded - profile.free_before * (1 - config.mem_fraction_static)))
        if asked < cost.least:
            needed = 1 - (profile.free_loaded - cost.kv(cost.least) - cost.tables(cost.least)) / profile.free_before
            raise ConfigError(
                f"of the {said(profile.free_before)} that were free this leaves no room for keys and values beside weights of "
                f"{said(profile.weights)}; leave it out, or set {math.ceil(needed * 100) / 100:.2f} or more",
                field="--mem-fraction-static",
                value=config.mem_fraction_static,
            )
        if asked > fits:
            log.warning(
                "mem_fraction_static=%s asks for %d tokens, more than the %d that fit beside what the largest steps take; %d are used.",
                config.mem_fraction_static, asked, fits, min(limits),
            )  # fmt: skip
        limits.append(asked)
    return min(limits) // config.page_size * config.page_size


def _remedy(profile: Profile, cost: PoolCost, missing: int) -> str:
    """The first option that makes room for so many bytes."""
    steps = profile.steps
    fewer = f"set --chunked-prefill-size below {steps.prompt_tokens} and --max-running-requests below {steps.rows}"
    options = (
        (profile.activations // 2, fewer),
        (profile.graphs, FEWER_GRAPHS),
        (profile.weights // 2 * (cost.choice.dtype == torch.float32), "set --dtype=bfloat16 (half before compute capability 8.0)"),
    )
    otherwise = f"serve a model that takes {said(missing)} less, or give it a device with {said(missing)} more free"
    return next((remedy for size, remedy in options if size >= missing), otherwise)


def _check_wanted(config: ServerConfig, fits: int) -> None:
    """Warn where --max-total-tokens is more than fits. Raises ConfigError where it is less than a page."""
    wanted = config.max_total_tokens
    if wanted is not None and wanted > fits:
        log.warning("max_total_tokens=%d is larger than the %d tokens that fit into memory; %d are used.", wanted, fits, fits)
    if wanted is not None and wanted < config.page_size:
        message = f"is less than one page of --page-size={config.page_size} tokens; raise it, or take smaller pages"
        raise ConfigError(message, field="--max-total-tokens", value=wanted)


def parts(profile: Profile, cost: PoolCost, tokens: int) -> list[tuple[str, int]]:
    """What takes how much of the device beside a pool of so many tokens."""
    named = [
        ("weights", profile.weights),
        ("kernels and workspaces", profile.lasting),
        ("activations", profile.activations),
        ("graphs", min(profile.graphs, profile.need)),
        ("tables", cost.tables(tokens)),
        (f"KV {tokens} tokens", cost.kv(tokens)),
        ("margin", profile.margin),
        ("other processes and CUDA", profile.total - profile.free_before),
    ]
    return [part for part in named if part[1]]


def line(profile: Profile, cost: PoolCost, tokens: int) -> str:
    """What takes what, for the log."""
    named = parts(profile, cost, tokens)
    left = profile.total - sum(size for _, size in named)
    return f"Memory: {listed([*named, ('unused', left)])} of {said(profile.total)}."


def listed(named: list[tuple[str, int]]) -> str:
    return ", ".join(f"{name} {said(size)}" for name, size in named)


def said(size: int) -> str:
    """In GB of 2**30, as everywhere in the log, or in MB."""
    return f"{size / GIB:.2f} GB" if abs(size) >= GIB // 10 else f"{size / MIB:.2f} MB"

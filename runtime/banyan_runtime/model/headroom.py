"""What a GPU's memory goes to: decided from what a trial of the largest steps measured, without touching a GPU.

All sizes are bytes. What torch keeps for later counts as taken: the driver says what is free, and only it knows all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from banyan_runtime.config import ServerConfig

GIB: Final = 1 << 30
MIB: Final = 1 << 20
MARGIN_SHARE: Final = 50  # of the device one part in so many is left alone: fragments, and what a driver takes when it likes
MARGIN_LEAST: Final = 512 * MIB
LEAST_TOKENS: Final = 16  # of a pool: with fewer a server could not even warm up
CHUNK: Final = 8192  # tokens of a prefill step where --chunked-prefill-size is left out
FEWEST_ROWS, MOST_ROWS = 2048, 4096  # likewise of --max-running-requests, as the pool has room
SHORTEST_STEP: Final = 64  # tokens, and
SHORTEST_BATCH: Final = 1  # rows, below which nothing is tried
LEAST_CHUNK: Final = 512  # tokens, and
LEAST_ROWS: Final = 256  # rows, below which no default is taken down for the pool's sake
ROWS_SHARE: Final = 8  # a default of rows takes, with their tables, no more than one part in so many of the pool
CONTEXT: Final = 768 * MIB  # what CUDA itself takes for a process, about: no other process can leave it
SHRINKS: Final = 0.9  # what is left of a pool that could not be allocated
FEWER: Final = ((256, 2048), (256, 512), (64, 128), (8, 16), (0, 0))
"""Rows and tokens of the largest graphs to try where more take too much: of the defaults' 76 sizes 60 are left, then 48, 18, 5, and
none."""


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest steps that may come, whatever the engine decides."""

    prompt_tokens: int  # of a step with prompts
    rows: int  # of a decode step

    @staticmethod
    def of(config: ServerConfig, context_len: int, pool_tokens: int) -> Largest:
        """With a pool of so many tokens. Where prompts are not cut, a step holds one of any length, or several up to a limit."""
        pages = pool_tokens // config.page_size
        longest = min(context_len, pool_tokens)
        chunk = CHUNK if config.chunked_prefill_size is None else config.chunked_prefill_size
        tokens = -(-chunk // config.page_size) * config.page_size if chunk > 0 else max(config.max_prefill_tokens, longest)
        rows = min(rows_of(config, context_len, pool_tokens), pages)
        return Largest(max(1, min(tokens, rows * longest, pool_tokens)), max(1, rows))

    def smaller(self, *, prompts: bool) -> Largest | None:
        """With half of the tokens, or of the rows, rounded down to a power of two; None: that would be too few."""
        now = self.prompt_tokens if prompts else self.rows
        half = 1 << max(0, (now - 1).bit_length() - 1)
        if half < (SHORTEST_STEP if prompts else SHORTEST_BATCH) or half >= now:
            return None
        return Largest(half, self.rows) if prompts else Largest(self.prompt_tokens, half)


@dataclass(frozen=True, slots=True)
class Graphs:
    """The largest steps that are captured as CUDA graphs, with all smaller ones."""

    rows: int  # of decode steps; 0: none is captured
    tokens: int  # of other steps, likewise


NO_GRAPHS: Final = Graphs(0, 0)


def tries(config: ServerConfig, graphs: Graphs) -> list[Graphs]:
    """What to capture, and to capture next where that takes too much: fewer of what was left open, then fewer of what was asked for as
    well, to know what would fit."""
    found = [graphs]
    for asked in (False, True):
        for rows, tokens in FEWER:
            fewer_tokens = min(graphs.tokens, tokens) if asked or config.cuda_graph_max_tokens is None else graphs.tokens
            fewer_rows = min(graphs.rows, rows) if asked or config.cuda_graph_max_bs is None else graphs.rows
            if fewer_tokens:  # no options say that no decode steps are captured where anything is
                fewer_rows = max(fewer_rows, min(graphs.rows, 1))
            if (fewer := Graphs(fewer_rows, fewer_tokens)) not in found:
                found.append(fewer)
    return found


def insists_on(config: ServerConfig, graphs: Graphs, fewer: Graphs) -> bool:
    """Whether those are fewer than were asked for."""
    rows = config.cuda_graph_max_bs is not None and fewer.rows < graphs.rows
    return rows or (config.cuda_graph_max_tokens is not None and fewer.tokens < graphs.tokens)


def rows_of(config: ServerConfig, context_len: int, pool_tokens: int) -> int:
    """Requests that run at once, were there pages for all of them."""
    return config.max_running_requests or min(max(int(pool_tokens / context_len * 512), FEWEST_ROWS), MOST_ROWS)


@dataclass(frozen=True, slots=True)
class Taken:
    """What the largest steps took, each by itself: bytes of all tensors that were there at once, beside what stays."""

    prompt_step: int
    row_step: int


@dataclass(frozen=True, slots=True)
class Measured:
    """A device, from before the weights were loaded to behind the trial. Where it says free, torch held nothing in reserve."""

    total: int
    free_at_first: int
    own_at_first: int  # of this process
    free_loaded: int  # the weights are there
    free_at_peak: int  # in the trial, at the least; torch's reserve counts as taken
    free_after: int  # the trial is gone, but for what stays with the process: kernels, workspaces
    trial_kv: int
    trial_tables: int
    graphs: int
    elsewhere: int = 0  # what others took since

    @property
    def others(self) -> int:
        """What other processes hold, and CUDA for this one."""
        return max(0, self.total - self.free_at_first - self.own_at_first)

    @property
    def weights(self) -> int:
        return max(0, self.free_at_first - self.free_loaded)

    @property
    def lasting(self) -> int:
        """What stays of the trial."""
        return max(0, self.free_loaded - self.free_after)

    @property
    def need(self) -> int:
        """What graphs and steps take beside pool, tables and what stays: as much again as in the trial."""
        return max(0, self.free_after - self.free_at_peak - self.trial_kv - self.trial_tables)

    @property
    def activations(self) -> int:
        return max(0, self.need - self.graphs)

    @property
    def margin(self) -> int:
        return max(self.total // MARGIN_SHARE, MARGIN_LEAST)

    @property
    def room(self) -> int:
        """For the pool and its tables; below 0: so much is missing."""
        return self.free_after - self.need - self.margin - self.elsewhere


@dataclass(frozen=True, slots=True)
class Demand:
    """What a pool takes, and what was asked for."""

    cell: int  # bytes of a token
    page_size: int  # tokens
    beside: Callable[[int], int]  # bytes of tables beside a pool of so many tokens; never fewer for more
    fraction: float | None = None  # --mem-fraction-static
    wanted: int | None = None  # --max-total-tokens

    @property
    def least(self) -> int:
        """Tokens of the smallest pool that can be served from."""
        return -(-LEAST_TOKENS // self.page_size) * self.page_size

    def kv(self, tokens: int) -> int:
        """Bytes of a pool, with the page for padding."""
        return (tokens + self.page_size) * self.cell

    def fitting(self, room: int) -> int:
        """Tokens, whole pages, of the largest pool that fits with its tables; 0: none does."""
        low, high = 0, max(0, room // (self.cell * self.page_size))  # pages: the first fits or is none, the second is too many or not
        while low < high:
            middle = (low + high + 1) // 2
            tokens = middle * self.page_size
            if self.kv(tokens) + self.beside(tokens) <= room:
                low = middle
            else:
                high = middle - 1
        return low * self.page_size


@dataclass(frozen=True, slots=True)
class Plan:
    """How many tokens the pool has, and why not more."""

    tokens: int  # whole pages; 0: not even the smallest pool fits
    fitting: int  # tokens that there is room for
    asked: int | None  # tokens that --mem-fraction-static asks for

    @property
    def cut(self) -> bool:
        """Whether that is more than there is room for."""
        return self.asked is not None and self.asked > self.fitting


def plan(measured: Measured, demand: Demand) -> Plan:
    """The pool: what fits, or what was asked for where that is less. --mem-fraction-static is what weights and pool have together of
    what was free at first."""
    fitting = demand.fitting(measured.room)
    asked = None
    if demand.fraction is not None:
        asked = demand.fitting(int(measured.free_loaded - measured.free_at_first * (1 - demand.fraction)))
    limits = [fitting, *(limit for limit in (asked, demand.wanted) if limit is not None)]
    tokens = min(limits) // demand.page_size * demand.page_size
    return Plan(tokens if fitting >= demand.least else 0, fitting, asked)


def lacking(measured: Measured, demand: Demand) -> int:
    """Bytes that are missing for the smallest pool."""
    return max(0, demand.kv(demand.least) + demand.beside(demand.least) - measured.room)


def served(measured: Measured, demand: Demand) -> bool:
    """Whether there is room for the smallest pool."""
    return demand.fitting(measured.room) >= demand.least


def settle(measured: Measured, demand: Demand, taken: Taken, largest: Largest, config: ServerConfig) -> Largest | None:
    """Smaller steps to try behind `largest`, which took so much; None: they stay.

    So that there is room for a pool at all; and what nobody asked for must not take more than the pool, or a small part of it: there are
    seldom as many rows as their default allows.
    """
    prompts_first = taken.prompt_step >= taken.row_step
    if not served(measured, demand):
        return largest.smaller(prompts=prompts_first) or largest.smaller(prompts=not prompts_first)
    pool = demand.kv(tokens := demand.fitting(measured.room))
    if config.chunked_prefill_size is None and largest.prompt_tokens > LEAST_CHUNK and taken.prompt_step > pool:
        return largest.smaller(prompts=True)
    too_many = taken.row_step + demand.beside(tokens) > pool // ROWS_SHARE
    if config.max_running_requests is None and largest.rows > LEAST_ROWS and too_many:
        return largest.smaller(prompts=False)
    return None


@dataclass(frozen=True, slots=True)
class Settled:
    """What came of the limits of steps."""

    config: ServerConfig  # with the limits that were left open, where the defaults are too much
    open: str  # these, as options; "": the defaults do
    insists: str  # the limits that were asked for and are too much, as they would fit


def settled(config: ServerConfig, wanted: Largest, fitting: Largest, graphs: Graphs, captured: Graphs) -> Settled:
    """`graphs`: that were wanted, of which those fit that are captured."""
    chunk, rows = config.chunked_prefill_size, config.max_running_requests
    opened, insists = list[str](), list[str]()
    if fitting.prompt_tokens < wanted.prompt_tokens:
        (opened if chunk is None else insists).append(f"--chunked-prefill-size={fitting.prompt_tokens}")
        chunk = fitting.prompt_tokens
    if fitting.rows < wanted.rows:
        (opened if rows is None else insists).append(f"--max-running-requests={fitting.rows}")
        rows = fitting.rows
    fewer_rows, fewer_tokens = captured.rows < graphs.rows, captured.tokens < graphs.tokens
    for_rows = opened if config.cuda_graph_max_bs is None else insists
    for_tokens = opened if config.cuda_graph_max_tokens is None else insists
    if captured == NO_GRAPHS and (fewer_rows or fewer_tokens):
        asked = (fewer_rows and for_rows is insists) or (fewer_tokens and for_tokens is insists)
        (insists if asked else opened).append("--disable-cuda-graph")
    else:
        for_rows += [f"--cuda-graph-max-bs={captured.rows}"] * fewer_rows
        for_tokens += [f"--cuda-graph-max-tokens={captured.tokens}"] * fewer_tokens
    return Settled(replace(config, chunked_prefill_size=chunk, max_running_requests=rows), " ".join(opened), " ".join(insists))


def remedy(measured: Measured, demand: Demand, *, wide: bool) -> str:
    """What would make room for the smallest pool where smaller steps and fewer graphs would not: of what can be had, the largest part.

    `wide`: weights are in 32 bits.
    """
    missing = lacking(measured, demand)
    if not missing:  # as far as is known: not even the tables could be made
        return "Serve a model that takes less, or take a device that has more."
    ways = [
        (measured.others - CONTEXT, f"Other processes must leave {said(missing)} more of the device."),
        (measured.weights // 2 if wide else 0, "Set --dtype=bfloat16 (half before compute capability 8.0), which halves the weights."),
    ]
    enough = [way for way in ways if way[0] >= missing]
    if not enough:
        return f"Serve a model that takes {said(missing)} less, or take a device that has {said(missing)} more."
    return max(enough)[1]


def shrunk(measured: Measured, demand: Demand, tokens: int) -> int:
    """Tokens to try behind a pool that could not be allocated: a tenth fewer, and what fits by now. Fewer than `demand.least`: none do."""
    tenth = int(tokens * SHRINKS) // demand.page_size * demand.page_size
    return min(tenth, demand.fitting(measured.room))


def parts(measured: Measured, demand: Demand, tokens: int) -> list[tuple[str, int]]:
    """What takes how much of the device beside a pool of so many tokens: they add up to all that is not left over."""
    named = [
        ("weights", measured.weights),
        ("kernels and workspaces", measured.lasting),
        ("activations", measured.activations),
        ("graphs", min(measured.graphs, measured.need)),
        ("tables", demand.beside(tokens)),
        (f"KV {tokens} tokens", demand.kv(tokens)),
        ("margin", measured.margin),
        ("held before", measured.own_at_first),
        ("other processes and CUDA", measured.others),
        ("taken by others during the start", measured.elsewhere),
    ]
    return [part for part in named if part[1]]


def line(measured: Measured, demand: Demand, tokens: int) -> str:
    """What takes what, for the log."""
    named = parts(measured, demand, tokens)
    left = measured.total - sum(size for _, size in named)
    return f"Memory: {listed([*named, ('unused', left)])} of {said(measured.total)}."


def refusal(measured: Measured, demand: Demand, remedy: str) -> str:
    """Why not even the smallest pool fits."""
    named = parts(measured, demand, demand.least)
    missing = lacking(measured, demand)
    return f"Not enough memory on the device. Of {said(measured.total)}: {listed(named)}; {said(missing)} are missing. {remedy}"


def exhausted(measured: Measured, demand: Demand, tokens: int, attempts: int) -> str:
    """Why no pool could be allocated although there was room for it: so many attempts, the last one with a pool of so many tokens."""
    named = listed(parts(measured, demand, tokens))
    half = max(demand.least, tokens // 2 // demand.page_size * demand.page_size)
    return (
        f"The device's memory ran out {attempts} times, at last with a KV cache of {tokens} tokens. Of {said(measured.total)}: {named}; "
        f"the smallest KV cache, {demand.least} tokens, takes {said(demand.kv(demand.least))}. Set "
        f"--max-total-tokens={half}, and keep other processes off the device."
    )


def listed(named: list[tuple[str, int]]) -> str:
    return ", ".join(f"{name} {said(size)}" for name, size in named)


def said(size: int) -> str:
    """In the unit that shows something: GB, of 2**30, as everywhere in the log."""
    return f"{size / GIB:.2f} GB" if abs(size) >= GIB // 10 else f"{size / MIB:.2f} MB"

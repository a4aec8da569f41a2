"""Steps of models with random weights on a GPU: decode at several sizes of batch, ends of prompts whose beginning is cached, short prompts,
and a long one, beside the limit by arithmetic.

    python benchmarks/gpu.py [--models 0.5b qwen3-0.6b 1b 8b] [--backends triton torch_native] [--running 1 16 64 256] [--context 512]
                             [--also no-dependent no-light no-turn no-few no-table no-graphs] [--only-also]
                             [--profile 1 64] [--traces FOLDER] [--out FILE.json]

No server and no scheduler: what the runner takes for a step that samples greedily, launched one behind another as an engine with a
step in flight does. Weights, keys and values read once and every multiplication done once are the limit, at what this GPU copied and
multiplied in the same minute. Beside it how long the host took to launch a step: where that is as long as the step, it is the host's
time that is measured. `--profile`: what of a step of so many rows the GPU was busy with, with which kernels, and where it waited
(`gpu_trace.py`), 0: of one of short prompts, and of one of a long one; `--traces` keeps what that was read from. `--also`: the cases of
few tokens again, without dependent launches, with attention of few programs computed as that of many,
with heads turned in a launch of their own, without our products of few rows, without the table of kernels (`kernel_choices.py`), or without
graphs.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest import mock

import gpu_trace
import numpy as np
import torch
from shapes import SHAPES, describe

from banyan_runtime.config import ServerConfig
from banyan_runtime.errors import ConfigError
from banyan_runtime.model import fused_products, kernel_choices
from banyan_runtime.model.attention import triton_paged
from banyan_runtime.model.kernels import dependent
from banyan_runtime.model.runners import load
from banyan_runtime.step import Ragged, RowUpdates, Runner, SamplingColumns, Step, TableShape

PROMPT: Final = 8192
STEPS: Final = 50
PROFILED: Final = 5  # steps: each has thousands of events
END: Final = 32  # tokens of a prompt behind what is cached
ENDS: Final = (1, 16)  # of so many prompts
SHORT: Final = (32, 128)  # prompts of so many tokens


@dataclass(frozen=True, slots=True)
class Machine:
    """What was measured of it."""

    bytes_s: float
    flop_s: float


def timed(work: Callable[[], object], rounds: int = 5) -> float:
    """The median of seconds."""
    found = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - started)
    return statistics.median(found)


def probe() -> Machine:
    """On random numbers: zeros take less power, and so run faster than anything real."""
    some = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    other = torch.empty_like(some)
    seconds = timed(lambda: other.copy_(some))
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return Machine(2 * some.nbytes / seconds, 2 * 8192**3 / timed(lambda: a @ b))


@dataclass(frozen=True, slots=True)
class Taken:
    """Medians of a step's seconds."""

    seconds: float
    host: float  # until it was launched


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    rows: int
    count: int  # tokens of each
    before: int  # tokens of each that are cached
    taken: Callable[[], Taken]


ALSO: Final = {
    "no-dependent": lambda: mock.patch.object(dependent, "options", return_value={"DEPENDENT": False}),
    "no-light": lambda: mock.patch.object(triton_paged, "LIGHT", 0),
    "no-turn": lambda: mock.patch.object(triton_paged.TritonAttention, "turns", False),
    "no-few": lambda: mock.patch.object(fused_products, "MOST_ROWS", 0),
    "no-table": lambda: mock.patch.object(kernel_choices, "TABLE", ()),
    "no-graphs": contextlib.nullcontext,
}
"""How the cases of few tokens are measured beside how they are computed."""


class Bench:
    def __init__(self, folder: Path, name: str, backend: str, running: int, context: int, how: str) -> None:
        describe(name, folder)
        self.context, self.running, self.shape = context, running, SHAPES[name][1]
        self.positions = max(context + 4 * STEPS, PROMPT)
        tokens = max(running * (context + 4 * STEPS), PROMPT)
        options = ServerConfig(
            model_path=str(folder), device="cuda", dtype="bfloat16", load_format="dummy", runner="torch", attention_backend=backend,
            max_total_tokens=tokens, max_running_requests=running, disable_cuda_graph=how == "no-graphs",
        )  # fmt: skip
        self.runner: Runner = load(options, folder, lambda *_: None)
        assert self.runner.info.pool_tokens >= tokens, "others hold the GPU's memory"
        self.runner.prepare(TableShape(running, self.positions))
        self._told = False
        self._kept: dict[tuple[int, int], tuple[Any, Any, SamplingColumns]] = {}
        self._launching: list[float] = []

    def _of(self, rows: int, count: int) -> tuple[Any, Any, SamplingColumns]:
        """Rows, a column of `count`, and how tokens are drawn: the same objects at each step over the same rows, as the engine's are."""
        if (rows, count) not in self._kept:
            column, ones = np.zeros(rows, np.float32), np.ones(rows, np.int32)
            sampling = SamplingColumns(column, 0 * ones, column + 1, column, column, column, column + 1, np.zeros(rows, np.uint64))
            self._kept[rows, count] = np.arange(rows, dtype=np.int32), count * ones, sampling
        return self._kept[rows, count]

    def step(self, rows: int, start: int, count: int, *, told: bool) -> Step:
        """`told`: where the tokens are not those of the step before."""
        each, counts, sampling = self._of(rows, count)
        positions = np.tile(np.arange(start, start + count, dtype=np.int32), rows)
        slots = (1 + positions + (self.context + 4 * STEPS) * np.repeat(each, count)).astype(np.int32)
        ids = ((positions * 31 + 7) % 4000).astype(np.int32) if told else np.full(rows * count, -1, np.int32)
        mode: Any = "decode" if count == 1 else "prefill"
        updates = None if self._told else self._table()
        self._told = True
        return Step(mode, ids, positions, slots, each, counts, counts + start, self._of(rows, 1)[1], sampling, updates)

    def _table(self) -> RowUpdates:
        """Each row with keys of its own: read from one place they would come from the cache, and slowly, for all ask for the same."""
        each, rows = self.context + 4 * STEPS, np.arange(self.running, dtype=np.int32)
        offsets = (each * np.arange(self.running + 1)).astype(np.int32)
        return RowUpdates(rows, 0 * rows, Ragged(1 + np.arange(each * self.running, dtype=np.int32), offsets))

    def launch(self, step: Step) -> Any:
        started = time.perf_counter()
        handle = self.runner.launch(step)
        self._launching.append(time.perf_counter() - started)
        return handle

    def taken(self, work: Callable[[], object], rounds: int, steps: int = 1) -> Taken:
        work()
        self._launching.clear()
        return Taken(timed(work, rounds) / steps, statistics.median(self._launching))

    def decode(self, running: int, steps: int = STEPS, rounds: int = 3) -> Taken:
        """A step with so many rows."""
        self.runner.launch(self.step(running, self.context - 1, 1, told=True)).result()

        def play() -> None:
            handle = None
            for number in range(steps):
                launched = self.launch(self.step(running, self.context + number, 1, told=False))
                if handle is not None:
                    handle.result()
                handle = launched
            assert handle is not None
            handle.result()

        return self.taken(play, rounds, steps)

    def prefill(self, rows: int, count: int) -> Taken:
        return self.taken(lambda: self.launch(self.step(rows, 0, count, told=True)).result(), 3)

    def end(self, rows: int) -> Taken:
        """The ends of so many prompts."""
        return self.taken(lambda: self.launch(self.step(rows, self.context, END, told=True)).result(), 9)

    def cases(self, running: list[int], *, few: bool = False) -> list[Case]:
        """All, or those of `few` tokens."""
        context = self.context
        decode = [Case(f"{rows} running", rows, 1, context, partial(self.decode, rows)) for rows in running if not few or rows <= ENDS[-1]]
        ends = [Case(f"{rows} x {END} behind", rows, END, context, partial(self.end, rows)) for rows in ENDS if rows <= self.running]
        prompts = [Case(f"{rows} x {count}", rows, count, 0, partial(self.prefill, rows, count)) for rows, count in self.prompts]
        return decode + ends + ([] if few else prompts)

    @property
    def prompts(self) -> list[tuple[int, int]]:
        """Prompts of steps of nothing else, and tokens of each."""
        return [(rows, count) for rows, count in (SHORT, (1, PROMPT)) if rows <= self.running]

    def bounds(self, machine: Machine) -> Callable[[Case], float]:
        shape = self.shape
        heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
        dim = shape.get("head_dim", shape["hidden_size"] // heads)
        hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
        block = layers * (hidden * (heads + 2 * kv_heads) * dim + heads * dim * hidden + 3 * hidden * shape["intermediate_size"])
        head = shape["vocab_size"] * hidden
        kv = layers * 2 * kv_heads * dim * 2

        def of(case: Case) -> float:
            tokens = case.rows * case.count
            seen = tokens * (case.before + case.count / 2)  # pairs of a token and a key
            read = 2 * (block + head) + case.rows * case.before * kv
            computed = 2 * block * tokens + 2 * head * case.rows + 4 * layers * heads * dim * seen
            return max(read / machine.bytes_s, computed / machine.flop_s)

        return of

    def profile(self, name: str, work: Callable[..., Taken], kept: Path) -> str:
        """The trace goes to the file `kept`."""
        launch = self.runner.launch

        def marked(step: Step) -> Any:
            with torch.profiler.record_function(gpu_trace.STEP):
                return launch(step)

        work()
        activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
        with mock.patch.object(self.runner, "launch", marked), torch.profiler.profile(activities=activities) as found:
            seconds = work().seconds
        table: str = found.key_averages().table(sort_by="self_cuda_time_total", row_limit=14, max_name_column_width=60)
        found.export_chrome_trace(str(kept))
        busy = gpu_trace.table(gpu_trace.read(kept), 14)
        return f"{name}, {1e3 * seconds:.2f} ms a step under the profiler\n{table}\n{busy}"


@dataclass(frozen=True, slots=True)
class Row:
    model: str
    attention: str
    how: str
    case: str
    seconds: float
    host: float
    limit: float
    tokens: int

    def line(self) -> str:
        return (
            f"{self.model:12} {self.attention:14} {self.how:12} {self.case:14} {1e3 * self.seconds:9.3f} "
            f"{1e3 * self.host:9.3f} {self.tokens / self.seconds:9.0f} {1e3 * self.limit:9.3f} {self.limit / self.seconds:8.2f}"
        )


def measured(name: str, backend: str, how: str, machine: Machine, options: argparse.Namespace) -> Iterator[Row]:
    """One model with one attention; `how`: of ALSO, or nothing."""
    with tempfile.TemporaryDirectory() as scratch, ALSO[how]() if how else contextlib.nullcontext():
        try:
            bench = Bench(Path(scratch), name, backend, max(options.running), options.context, how)
        except ConfigError as error:
            print(f"{name} {backend} {how}: {error}")
            return
        limit = bench.bounds(machine)
        for case in bench.cases(options.running, few=how != ""):
            taken = case.taken()
            yield Row(name, backend, how, case.name, taken.seconds, taken.host, limit(case), case.rows * case.count)
        del case  # which holds the model
        if not how:
            traces = options.traces or Path(scratch)
            file = f"{name}-{backend}"
            for rows in sorted({min(rows, bench.running) for rows in options.profile if rows}):
                work = partial(bench.decode, rows, steps=PROFILED, rounds=1)
                print(bench.profile(f"{rows} running", work, traces / f"{file}-{rows}.json.gz"))
            for rows, count in bench.prompts if 0 in options.profile else ():
                work = partial(bench.prefill, rows, count)
                print(bench.profile(f"{rows} x {count}", work, traces / f"{file}-{rows}x{count}.json.gz"))
        del bench
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--backends", nargs="+", default=["triton", "torch_native"])
    parser.add_argument("--running", nargs="+", type=int, default=[1, 16, 64, 256])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--also", nargs="*", default=[], choices=list(ALSO))
    parser.add_argument("--only-also", action="store_true", help="nothing but these: the others were measured before")
    parser.add_argument("--profile", nargs="*", type=int, default=[], metavar="ROWS")
    parser.add_argument("--traces", type=Path, help="a folder")
    parser.add_argument("--out", type=Path, help="rows are added to those that are there")
    options = parser.parse_args()
    if options.traces:
        options.traces.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("banyan").setLevel(logging.DEBUG)
    machine = probe()
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}: {machine.bytes_s / 1e12:.2f} TB/s copied, {machine.flop_s / 1e12:.0f} TFLOP/s")
    print(f"{'model':12} {'attention':14} {'how':12} {'case':14} {'ms':>9} {'host ms':>9} {'tok/s':>9} {'limit ms':>9} {'of limit':>8}")
    about = {"device": device, "torch": torch.__version__, "bytes_s": machine.bytes_s, "flop_s": machine.flop_s}
    rows: list[Row] = []
    if options.out and options.out.exists():
        rows = [Row(**row) for row in json.loads(options.out.read_text())["rows"]]
    for name, backend, how in itertools.product(options.models, options.backends, [*([] if options.only_also else [""]), *options.also]):
        for row in measured(name, backend, how, machine, options):
            rows.append(row)
            print(row.line(), flush=True)
            if options.out:  # at once: what comes next may fail, and the machine be gone
                options.out.write_text(json.dumps({**about, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""What the programs of a decode step's kernels do when, on a GPU: those of its last layer.

    python benchmarks/gpu_timeline.py [--models 0.5b] [--running 1 64 256] [--layers 8] [--replays 15] [--ways tiles staged]

A profiler tells when kernels ended. Where they are brought up while others end (`kernels/dependent.py`) that says little of why. Here each
program notes when it has asked for what it may ask for early, when it need no longer wait for the kernel before, and when it has done, by
the clock of its processor, which is set against the clock that all share. A line for each kernel, medians over replays, in microseconds
since the kernel was let go, which is when its first program was:

    after    since the one before it in the list was
    early    how many of its programs waited by then, and how long the first and the median one had (those that have nothing to do and
             leave at once note nothing)
    last     when the last program was let go, or begun
    done     the median and the last program
    long     the median and the longest that a program took from being let go to having done
    then     from the last program's end until the next kernel is let go

Kernels of others (cuBLAS) note nothing. Noting takes some tenths of a microsecond of each kernel. Nothing is measured at the start:
`--ways` says how products are computed, where there are rows for it.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import math
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Final
from unittest import mock

import gpu_ways
import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from shapes import SHAPES

from banyan_runtime.model import kernels
from banyan_runtime.model.capture import CudaRecorder
from banyan_runtime.model.kernel_choices import Kernel, Product
from banyan_runtime.model.kernels import dependent, paged_attention, products, rows, staged, tiles

Programs = npt.NDArray[np.float64]
"""[programs, FIELDS], in the order in which they were let go."""

PLACES: Final = 1 << 12  # of kernels, by the sizes of their grids
PROGRAMS: Final = 1 << 11  # of each, at most
FIELDS: Final = 8
ASKED, LET_GO, SHARED, PROCESSOR, GRID, PROGRAM, DONE = range(7)
_PLACES, _PROGRAMS, _FIELDS = tl.constexpr(PLACES), tl.constexpr(PROGRAMS), tl.constexpr(FIELDS)


@triton.jit
def _clock():
    return tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def _own(BOOK: tl.constexpr):
    """Where this program notes, which grid it is of, and its number there."""
    grid = tl.num_programs(0).to(tl.int64) * 65536 + tl.num_programs(1)
    program = (tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)
    at = (grid * 40503 // 256) % _PLACES * _PROGRAMS + program % _PROGRAMS
    return tl.full((), BOOK, tl.int64).to(tl.pointer_type(tl.int64), bitcast=True) + at * _FIELDS, grid, program


@triton.jit
def noting(DEPENDENT: tl.constexpr, LATE: tl.constexpr = False):
    """`await_earlier`; DEPENDENT is where to note."""
    asked = _clock()
    if not LATE:
        tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()
    let_go = _clock()
    own, grid, program = _own(DEPENDENT)
    tl.store(own, asked)
    tl.store(own + 1, let_go)
    tl.store(own + 2, tl.extra.cuda.globaltimer())
    tl.store(own + 3, tl.extra.cuda.smid().to(tl.int64))
    tl.store(own + 4, grid)
    tl.store(own + 5, program)


@triton.jit
def ended(DEPENDENT: tl.constexpr):
    own, _, _ = _own(DEPENDENT)
    tl.store(own + 6, _clock())


def with_ends(module: ModuleType, folder: Path) -> ModuleType:
    """Its kernels, each of which notes its end."""
    tree = ast.parse(Path(str(module.__file__)).read_text())
    for function in tree.body:
        if isinstance(function, ast.FunctionDef) and any(argument.arg == "DEPENDENT" for argument in function.args.args):
            function.body.append(ast.parse("ended(DEPENDENT)").body[0])
    name = module.__name__
    file = folder / f"{name.rpartition('.')[2]}.py"
    file.write_text(ast.unparse(ast.fix_missing_locations(tree)))
    described = importlib.util.spec_from_file_location(name, file)
    assert described is not None
    assert described.loader is not None
    made = importlib.util.module_from_spec(described)
    vars(made)["ended"] = ended
    described.loader.exec_module(made)
    vars(made)["await_earlier"] = noting
    sys.modules[name] = made
    setattr(kernels, name.rpartition(".")[2], made)
    return made


def told(book: torch.Tensor) -> list[Programs]:
    """Of each kernel of the last layer, clocks in microseconds of the shared one; in the order in which they were let go."""
    found = book.view(-1, FIELDS)
    found = found[found[:, GRID] > 0].cpu()
    shared = found[:, SHARED] - found[:, SHARED].max()  # before they are rounded
    values = found.numpy().astype(np.float64)
    values[:, SHARED] = shared.numpy() / 1e3
    cycle = 1 / torch.cuda.clock_rate()  # microseconds, of a rate in MHz
    for processor in np.unique(values[:, PROCESSOR]):
        own = values[:, PROCESSOR] == processor
        shift = np.median(values[own, SHARED] - values[own, LET_GO] * cycle)
        for column in (ASKED, LET_GO, DONE):
            values[own, column] = values[own, column] * cycle + shift
    nothing_to_do = found[:, DONE].numpy() == 0
    values[nothing_to_do, DONE] = values[nothing_to_do, LET_GO]
    parts = [values[values[:, GRID] == grid] for grid in np.unique(values[:, GRID])]
    return sorted((part[np.argsort(part[:, LET_GO])] for part in parts), key=lambda part: float(part[0, LET_GO]))


def line(part: Programs, before: Programs | None, then: Programs | None) -> list[float]:
    """As they are printed."""
    begun = float(part[0, LET_GO])
    early = begun - part[part[:, ASKED] < begun, ASKED]
    done = part[:, DONE] - begun
    took = part[:, DONE] - part[:, LET_GO]
    return [
        begun - float(before[0, LET_GO]) if before is not None else math.nan, len(early),
        float(early.max(initial=0.0)), float(np.median(early)) if len(early) else 0.0, float(part[-1, LET_GO]) - begun,
        float(np.median(done)), float(done.max()), float(np.median(took)), float(took.max()),
        float(then[0, LET_GO]) - begun - float(done.max()) if then is not None else math.nan,
    ]  # fmt: skip


def watched(
    bench: gpu_ways.Bench, running: int, chosen: dict[Product, Kernel], book: torch.Tensor, replays: int
) -> dict[int, list[list[float]]]:
    """The lines of each kernel, by its grid, in the order of the last replay."""
    with torch.inference_mode(), gpu_ways.chosen(bench, chosen):
        bench.tell(running, gpu_ways.CONTEXT)
        torch.cuda.synchronize()
        replay = CudaRecorder().record(partial(bench._graphs._compute, bench._held[running]))
    found: dict[int, list[list[float]]] = {}
    parts: list[Programs] = []
    for _ in range(replays):
        book.zero_()
        torch.cuda.synchronize()
        replay()
        torch.cuda.synchronize()
        parts = told(book)
        for part, before, then in zip(parts, [None, *parts], [*parts[1:], None], strict=False):
            found.setdefault(int(part[0, GRID]), []).append(line(part, before, then))
    return {grid: found[grid] for grid in (int(part[0, GRID]) for part in parts)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["0.5b"], choices=list(SHAPES))
    parser.add_argument("--running", nargs="+", type=int, default=[1, 64, 256])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--replays", type=int, default=15)
    parser.add_argument("--ways", nargs="*", default=[], choices=["tiles", "staged"])
    given = parser.parse_args()
    book = torch.zeros(PLACES * PROGRAMS * FIELDS, dtype=torch.int64, device="cuda")
    with tempfile.TemporaryDirectory() as scratch:
        mock.patch.object(dependent, "options", return_value={"DEPENDENT": book.data_ptr(), "launch_pdl": True}).start()
        for module in (rows, products, staged, tiles, paged_attention):
            with_ends(module, Path(scratch))
        for model in given.models:
            bench = gpu_ways.Bench(model, given.layers, sorted(given.running))
            for running in given.running:
                chosen = {
                    product: kernel
                    for kernel in given.ways
                    for product in bench.products.values()
                    if kernel in bench.choices.offers(product, running)
                }
                print(f"{model}, {running} running, the kernels of the last layer, and the first and last of a step")
                for grid, found in watched(bench, running, chosen, book, given.replays).items():
                    after, early, first, median, last, half, whole, long, longest, then = map(statistics.median, zip(*found, strict=True))
                    print(
                        f"  [{grid // 65536:4} x {grid % 65536:3}] after {after:6.2f}  early {early:5.0f} ({first:5.2f}, {median:5.2f})  "
                        f"last {last:5.2f}  done {half:5.2f}, {whole:5.2f}  long {long:5.2f}, {longest:5.2f}  then {then:5.2f}",
                        flush=True,
                    )
            del bench
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

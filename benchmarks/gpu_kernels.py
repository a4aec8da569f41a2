"""Our attention and our products on a GPU, over how they may be cut and compiled: which way is fastest, and how fast it reads.

    python benchmarks/gpu_kernels.py [--what decode prompt product tile] [--models 0.5b qwen3-0.6b 1b 8b] [--seconds 60] [--out FILE.json]

A case is launched over memory of its own, again and again, until all of it is far more than the cache holds, from one CUDA graph; what one
launch takes is the median of its replays. Between two of attention stands a norm of a row, which waits for the one before as what stands
there in a model does: else the next would fill the processors that the last of this one leave. `product` are those of one row, `tile` those
of some, beside which stands what PyTorch's take (`library`). The first line of a case is the way that
the runtime goes; then come the fastest. Programs are compiled before, in as many processes as there are processors, which is most of what
this takes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from shapes import SHAPES

from banyan_runtime.model import fused_products
from banyan_runtime.model.attention import triton_paged
from banyan_runtime.model.kernel_choices import Product
from banyan_runtime.model.kernels import FEWEST_ROWS, dependent, paged_attention, power_of_two, products, shared_bytes
from banyan_runtime.model.kernels import rows as rows_kernels
from banyan_runtime.model.kernels import tiles as tiles_kernels

CONTEXT: Final = 544  # tokens of each row of a decode step
PROMPT: Final = 8192
FAR_MORE: Final = 240 << 20  # bytes: four times a large GPU's cache
MOST_LAUNCHES: Final = 300  # of a graph
KEPT: Final = 4  # ways of a case that are printed
BF16: Final = torch.bfloat16
SHARED: Final = shared_bytes(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


@dataclass(frozen=True, slots=True)
class Way:
    """How a kernel is cut and compiled: `stretch` and `stages` 0 where there is none."""

    block: int  # keys at a time; of a product outputs
    columns: int  # rows of a tile; of a product columns at a time
    warps: int
    stages: int
    stretch: int  # keys that a program meets; of a tile programs that share it
    ahead: bool = False  # whether the first of them are not waited for; of a product whether its lines are asked for together

    def __str__(self) -> str:
        ahead = ", ahead" if self.ahead else ""
        return f"{self.block:4} x {self.columns:5}, {self.warps} warps, {self.stages} stages, stretches of {self.stretch}{ahead}"


@dataclass(frozen=True, slots=True)
class Case:
    kind: str  # decode, prompt, product, tile
    model: str
    name: str  # of the product
    rows: int

    @property
    def shape(self) -> tuple[int, int, int, int, int, int]:
        """Width, inner width, heads, KV heads, their width, vocabulary."""
        found = SHAPES[self.model][1]
        heads, hidden = found["num_attention_heads"], found["hidden_size"]
        inner, kv_heads, words = found["intermediate_size"], found["num_key_value_heads"], found["vocab_size"]
        return hidden, inner, heads, kv_heads, found.get("head_dim", hidden // heads), words

    @property
    def product(self) -> tuple[int, int, bool]:
        """Outputs, columns, and whether each output has a gate."""
        hidden, inner, heads, kv_heads, dim, words = self.shape
        sizes = {"qkv": ((heads + 2 * kv_heads) * dim, hidden), "o": (hidden, heads * dim), "gate_up": (inner, hidden)}
        sizes |= {"down": (hidden, inner), "head": (words, hidden)}
        return *sizes[self.name], self.name == "gate_up"

    @property
    def bytes(self) -> int:
        if self.name:
            outputs, columns, gated = self.product
            return 2 * outputs * columns * (2 if gated else 1)
        _, _, _, kv_heads, dim, _ = self.shape
        return self.rows * (CONTEXT if self.kind == "decode" else PROMPT) * 2 * 2 * kv_heads * dim

    @property
    def operations(self) -> int:
        _, _, heads, _, dim, _ = self.shape
        if self.kind == "tile":
            return self.rows * self.bytes
        return 2 * heads * dim * PROMPT * PROMPT if self.kind == "prompt" else 0

    @property
    def launches(self) -> int:
        return 4 if self.kind == "prompt" else max(4, min(MOST_LAUNCHES, -(-FAR_MORE // self.bytes)))


def ways(case: Case) -> Iterator[Way]:
    """The way that the runtime goes first."""
    _, _, heads, kv_heads, dim, _ = case.shape
    if case.kind == "product":
        outputs, columns, gated = case.product
        width = power_of_two(columns)
        entry = case.name in ("qkv", "gate_up")
        now = fused_products.cut(1, Product(outputs, columns, gated), 2, whole=not entry)
        yield Way(now["OUTPUTS"], now["COLUMNS"], now["num_warps"], 3, 0, bool(now["WHOLE"]))
        cuts = itertools.product((1, 2, 4, 8), (512, 1024, 2048, 4096, 8192, 16384), (4, 8), (False, True))
        for each, part, warps, whole in cuts:
            numbers = each * part * (2 if gated else 1) // (32 * warps)  # of the weight that a thread holds
            fits = min(512, width) <= part <= width and 8 <= numbers <= 96 and -(-outputs // each) < fused_products._GRID
            if fits and not (whole and (entry or width <= part)):
                yield Way(each, part, warps, 3, 0, whole)
        return
    if case.kind == "tile":
        outputs, columns, gated = case.product
        tile = fused_products.Tile.of(case.rows, Product(outputs, columns, gated), SHARED)
        yield Way(tile.outputs, tile.columns, tile.warps, tile.stages, tile.splits)
        for each, part, splits, warps in itertools.product((16, 32, 64, 128), (64, 128), (1, 2, 4, 8), (4, 8)):
            stage = 2 * part * (tile.rows + each * (2 if gated else 1))
            if columns % part == 0 and splits * 256 <= columns and not (gated and splits > 1) and each * tile.rows <= 64 * 128 * warps // 8:
                yield Way(each, part, warps, max(2, min(6, fused_products.Tile.ROOM // stage + (tile.rows < 64))), splits)
        return
    if case.kind == "prompt":
        most = triton_paged.NARROW_ROWS if dim <= 64 else triton_paged.TILE_ROWS
        now_prompt = triton_paged.Way.of(dim, BF16, most, kv_heads * PROMPT, single=False, shared=SHARED)
        yield Way(now_prompt.keys, most, now_prompt.warps, now_prompt.stages, 0)
        for keys, rows, warps, stages in itertools.product((32, 64, 128), (64, 128), (4, 8), (2, 3, 4)):
            if not (warps == 4 and rows == 128 and dim == 128):
                yield Way(keys, rows, warps, stages, 0)
        return
    rows = max(FEWEST_ROWS, power_of_two(heads // kv_heads))
    programs = case.rows * kv_heads
    length = triton_paged.stretch(np.full(case.rows, CONTEXT, np.int32), programs)
    own = triton_paged.Way.of(dim, BF16, rows, programs, single=True, shared=SHARED)
    yield Way(own.keys, rows, own.warps, own.stages, length if length < CONTEXT else 0, own.ahead)
    shapes = ((64, 2, 5), (64, 4, 5), (64, 2, 3), (64, 4, 3), (128, 4, 3), (32, 2, 5), (32, 4, 5))
    for (keys, warps, stages), stretch, ahead in itertools.product(shapes, (0, 64, 128), (False, True)):
        cut = programs * (-(-CONTEXT // stretch) if stretch else 1)
        if (keys <= stretch and cut <= 1024) or (stretch == 0 and programs >= 64):
            yield Way(keys, rows, warps, stages, stretch, ahead)


Launch = Callable[[Any, tuple[int, ...], tuple[Any, ...], Mapping[str, Any]], None]


def compiling(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    kernel.warmup(*arguments, grid=grid, **options)


def launching(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    kernel[grid](*arguments, **options)


def attention(case: Case, way: Way, launch: Launch, memory: Callable[..., Any], layer: int, extra: Mapping[str, Any]) -> None:
    """One launch; two where the context is cut."""
    _, _, heads, kv_heads, dim, _ = case.shape
    context, group = (CONTEXT if case.kind == "decode" else PROMPT), heads // kv_heads
    queries = 1 if case.kind == "decode" else way.columns // group
    tiles, tokens = (case.rows, case.rows) if case.kind == "decode" else (-(-PROMPT // queries), PROMPT)
    slots = case.rows * context
    q, out = memory("q", (tokens, heads, dim), BF16), memory("out", (tokens, heads, dim), BF16)
    keys, values = (memory(name, (case.launches, kv_heads, slots, dim), BF16, layer) for name in ("keys", "values"))
    rows_of, firsts, counts, positions = (
        memory(f"{name}-{queries}", (tiles,), torch.int32) for name in ("rows_of", "firsts", "counts", "positions")
    )
    table, ends = memory("table", (case.rows, context), torch.int32), memory("ends", (tokens,), torch.int32)
    own_slots, stretch = memory("own_slots", (tokens,), torch.int32), way.stretch or context
    length = memory(f"length-{stretch}", (1,), torch.int32)
    cut = -(-context // stretch)
    parts, highs, masses = out, out, out
    if cut > 1:
        parts = memory("parts", (32, tokens, heads, dim), torch.float32)
        highs, masses = (memory(name, (32, tokens, heads), torch.float32) for name in ("highs", "masses"))
    options = dict(
        GROUP=group, HEADS=heads, DIM=dim, WIDTH=dim, ROWS=way.columns, KEYS=way.block, SPLIT=cut > 1, WINDOW=0, CAP=0.0, PRECISION="tf32",
        num_warps=way.warps, num_stages=way.stages, **extra,
    )  # fmt: skip
    into = out, parts, highs, masses
    if case.kind == "decode":
        width = (heads + 2 * kv_heads) * dim
        qkv, cos = memory("qkv", (tokens, width), BF16), memory("cos", (tokens, dim), BF16)
        launch(
            paged_attention.turn_and_attend, (kv_heads * tiles, cut),
            (qkv, cos, cos, cos, cos, own_slots, keys, values, *into, rows_of, counts, positions, table, context, length, width,
             slots * dim, tokens, 1e-6, dim**-0.5),
            {"NORMED": False, "WIDE": False, "AHEAD": way.ahead, "PADDING": -1, "LARGEST": torch.finfo(BF16).max, "NARROW": False,
             **options},
        )  # fmt: skip
    else:
        launch(
            paged_attention.attend, (kv_heads * tiles, cut),
            (q, keys, values, *into, rows_of, firsts, counts, positions, table, context, length, slots * dim, tokens, dim**-0.5), options,
        )  # fmt: skip
    if cut > 1:
        launch(
            paged_attention.join, (tokens * heads,), (parts, highs, masses, ends, out, length, tokens * heads),
            dict(HEADS=heads, DIM=dim, WIDTH=dim, TOGETHER=triton_paged.TOGETHER, **extra),
        )  # fmt: skip
    if case.kind == "decode":
        small = memory("small", (1024,), BF16)
        launch(
            rows_kernels.rms_norm, (1,), (small, small, small, small, small, 1024, 1024, 1e-6),
            dict(ADDED=False, WIDE=False, WIDTH=1024, BLOCK=1024, **extra),
        )  # fmt: skip


def product(case: Case, way: Way, launch: Launch, memory: Callable[..., Any], layer: int, extra: Mapping[str, Any]) -> None:
    outputs, columns, gated = case.product
    normed = case.name in ("qkv", "gate_up")
    lines = outputs * (2 if gated else 1)
    weight = memory("weight", (case.launches, lines, columns), BF16, layer)
    x, delta, sums, norm = (memory(name, (columns,), BF16) for name in ("x", "delta", "sums", "norm"))
    bias, out = memory("bias", (lines,), BF16), memory("y", (outputs,), BF16)
    biased = case.name == "qkv" and case.model == "0.5b"
    launch(
        products.product, (1, -(-outputs // way.block)),
        (x, delta if normed else x, norm if normed else weight, weight, bias if biased else weight, sums if normed else x, out,
         columns, columns, outputs, 1e-6 if normed else 0.0),
        dict(ADDED=normed, NORMED=normed, BIASED=biased, GATED=gated, GELU=False, WHOLE=way.ahead, WIDTH=columns,
             BLOCK=power_of_two(columns), COLUMNS=way.columns, OUTPUTS=way.block, num_warps=way.warps, num_stages=way.stages, **extra),
    )  # fmt: skip


def tiles(case: Case, way: Way, launch: Launch, memory: Callable[..., Any], layer: int, extra: Mapping[str, Any]) -> None:
    outputs, columns, gated = case.product
    tile = fused_products.Tile.of(case.rows, Product(outputs, columns, gated), SHARED)
    lines, rows = outputs * (2 if gated else 1), tile.rows
    weight = memory("weight", (case.launches, lines, columns), BF16, layer)
    x, out, bias = memory("x", (case.rows, columns), BF16), memory("y", (case.rows, outputs), BF16), memory("bias", (lines,), BF16)
    tiles = -(-outputs // way.block) * -(-case.rows // rows)
    parts, arrived = out, out
    if way.stretch > 1:
        parts = memory(f"parts-{tiles}-{way.stretch}-{way.block}", (way.stretch, tiles, rows, way.block), torch.float32)
        arrived = memory("arrived", (fused_products._ARRIVED,), torch.int32)
    biased = case.name == "qkv" and case.model == "0.5b"
    launch(
        tiles_kernels.tile, (tiles, way.stretch),
        (x, weight, bias if biased else weight, out, parts, arrived, case.rows, columns, outputs),
        dict(BIASED=biased, GATED=gated, GELU=False, WIDTH=columns, ROWS=rows, OUTPUTS=way.block, COLUMNS=way.columns,
             SPLITS=way.stretch, BRING=tile.bring, LATE=tile.late, num_warps=way.warps, num_stages=way.stages, **extra),
    )  # fmt: skip


def library(case: Case, _way: Way, _launch: Launch, memory: Callable[..., Any], layer: int, _extra: Mapping[str, Any]) -> None:
    """PyTorch's product, and what belongs to it."""
    outputs, columns, gated = case.product
    lines = outputs * (2 if gated else 1)
    weight = memory("weight", (case.launches, lines, columns), BF16, layer)
    x, bias = memory("x", (case.rows, columns), BF16), memory("bias", (lines,), BF16)
    found = torch.nn.functional.linear(x, weight, bias if case.name == "qkv" and case.model == "0.5b" else None)
    if gated:
        launching(
            rows_kernels.gated, (case.rows, -(-outputs // 1024)), (found, memory("y", (case.rows, outputs), BF16), outputs),
            {"GELU": False, "BLOCK": 1024, **dependent.options(torch.device("cuda"))},
        )  # fmt: skip


KINDS: Final = {"decode": attention, "prompt": attention, "product": product, "tile": tiles}


def compile_one(asked: tuple[Case, Way]) -> None:
    case, way = asked

    def memory(_name: str, _shape: tuple[int, ...], dtype: torch.dtype, _layer: int = 0) -> Any:
        return dtype

    try:
        KINDS[case.kind](case, way, compiling, memory, 0, dependent.options(torch.device("cuda")))
    except Exception as error:  # more registers or shared memory than there is
        print(f"{case} {way}: {type(error).__name__}", flush=True)


class Memory:
    """Of one case: random, and what is told of a step."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._kept: dict[str, torch.Tensor] = {}

    def __call__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, layer: int | None = None) -> torch.Tensor:
        if name not in self._kept:
            self._kept[name] = self._made(name, shape, dtype)
        return self._kept[name] if layer is None else self._kept[name][layer]

    def _made(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        case, device = self._case, "cuda"
        if dtype != torch.int32:
            return torch.randn(shape, dtype=dtype, device=device)
        what, _, number = name.partition("-")
        context = CONTEXT if case.kind == "decode" else PROMPT
        if what == "arrived":
            return torch.zeros(shape, dtype=torch.int32, device=device)
        if what == "own_slots":
            return torch.arange(context - 1, case.rows * context, context, dtype=torch.int32, device=device)  # of a decode step
        each = torch.arange(shape[0], dtype=torch.int32, device=device)
        if what == "table":
            return torch.arange(case.rows * context, dtype=torch.int32, device=device).view(shape)
        if what in ("length", "ends"):
            return torch.full(shape, int(number) if number else context, dtype=torch.int32, device=device)
        if case.kind == "decode":
            return {"rows_of": each, "firsts": each, "counts": 1 + 0 * each, "positions": context - 1 + 0 * each}[what]
        begun = each * int(number)
        return {"rows_of": 0 * each, "firsts": begun, "counts": (context - begun).clamp(max=int(number)), "positions": begun}[what]


def timed(case: Case, way: Way, memory: Memory, one: Callable[..., None]) -> float:
    """Seconds of a launch."""
    extra = dependent.options(torch.device("cuda"))

    def all_of_them() -> None:
        for layer in range(case.launches):
            one(case, way, launching, memory, layer, extra)

    one(case, way, launching, memory, 0, extra)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        all_of_them()
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    found: list[float] = []
    for _ in range(4):
        begun.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        found.append(begun.elapsed_time(ended) / 1e3 / case.launches)
    return statistics.median(found[1:])


def cases(what: list[str], models: list[str]) -> Iterator[Case]:
    for kind, model in itertools.product(what, models):
        if kind == "product":
            for name in ("qkv", "o", "gate_up", "down", "head"):
                yield Case(kind, model, name, 1)
        elif kind == "tile":
            for rows, name in itertools.product((16, 64, 256), ("qkv", "o", "gate_up", "down")):
                yield Case(kind, model, name, rows)
        else:
            for rows in (1, 16, 64, 256) if kind == "decode" else (1,):
                yield Case(kind, model, "", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", nargs="+", default=["decode", "product", "prompt"], choices=list(KINDS))
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--seconds", type=float, default=60.0, help="after these nothing more is measured")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    started = time.monotonic()
    asked = [(case, list(dict.fromkeys(ways(case)))) for case in cases(options.what, options.models)]
    every = [(case, way) for case, found in asked for way in found]
    # Ways that differ in nothing that a compiler sees are compiled once.
    of_compiler = {(one.kind, one.model, one.name, replace(way, stretch=min(way.stretch, 1))): (one, way) for one, way in every}
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_one, of_compiler.values(), chunksize=1))
    print(f"{len(every)} ways, {len(of_compiler)} programs compiled in {time.monotonic() - started:.0f} s", flush=True)
    kept: list[dict[str, Any]] = []
    for case, found in asked:
        if time.monotonic() - started > options.seconds:
            print(f"{case} and what follows: no time left")
            break
        memory, measured = Memory(case), []
        for way in found:
            try:
                measured.append((timed(case, way, memory, KINDS[case.kind]), way))
            except Exception as error:
                print(f"{case} {way}: {type(error).__name__}: {str(error)[:80]}")
                torch.cuda.synchronize()
        kept.append({**asdict(case), "bytes": case.bytes, "ways": [{"seconds": seconds, **asdict(way)} for seconds, way in measured]})
        print(f"{case.kind} {case.model} {case.name} {case.rows} rows, {case.bytes / 1e6:.2f} MB, {case.operations / 1e9:.0f} GFLOP")
        for seconds, way in [measured[0], *sorted(measured, key=lambda one: one[0])[:KEPT]]:
            speeds = f"{case.bytes / seconds / 1e12:5.2f} TB/s {case.operations / seconds / 1e12:4.0f} TFLOP/s"
            print(f"  {1e6 * seconds:8.2f} us {speeds}  {way}", flush=True)
        if case.kind == "tile":
            print(f"  {1e6 * timed(case, measured[0][1], memory, library):8.2f} us by the library", flush=True)
        if options.out:
            options.out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "cases": kept}) + "\n")
        del memory
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

"""Decode steps of models with random weights on a GPU, whole and captured, computed in other ways than the runtime's.

    python benchmarks/gpu_ways.py [--models 0.5b 8b] [--running 1 2 4 8 16 64 256] [--layers 8] [--ways attention few staged tiles context]

What a kernel takes back to back (`gpu_kernels.py`) says little of a step, where the next begins while it ends, and its programs may crowd
where others still run. Keys lie in slots of each row's own, 512 of them. No head and no sampling: those are `gpu.py`'s. The first line of
a model is what the runtime does, in microseconds, in brackets how many more a layer takes. What is to be compiled is compiled before, in as
many processes as there are processors.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest import mock

import gpu
import torch
from shapes import SHAPES

from banyan_runtime.model import fused_products, graphs
from banyan_runtime.model.attention import triton_paged
from banyan_runtime.model.attention.triton_paged import TritonAttention
from banyan_runtime.model.capture import CudaRecorder
from banyan_runtime.model.fused import FusedKernels
from banyan_runtime.model.fused_products import Tile
from banyan_runtime.model.kernel_choices import ROWS, Kernel, Product
from banyan_runtime.model.kernels import FEWEST_ROWS
from banyan_runtime.model.runner import ModelRunner
from banyan_runtime.model.torch_forward import TorchForward

CONTEXT: Final = 512
ROUNDS: Final = 9
REPLAYS: Final = 3
VOCABULARY: Final = 4096
BRIEF: Final = 2  # layers, where a model is made only for its kernels to be compiled
KINDS: Final = ("attention", "few", "staged", "tiles", "context")


@contextmanager
def attention(keys: int, warps: int, stages: int, ahead: bool = False, cut: int | None = None) -> Iterator[None]:
    """Of decode steps; contexts are cut into `cut` stretches, if named."""
    known = triton_paged.Way.of

    def of(width: int, dtype: torch.dtype, rows: int, programs: int, *, single: bool, shared: int) -> triton_paged.Way:
        if single and rows <= FEWEST_ROWS:
            return triton_paged.Way(keys, warps, stages, ahead)
        return known(width, dtype, rows, programs, single=single, shared=shared)

    def stretch(kv_lens: Any, programs: int) -> int:
        assert cut is not None
        return max(keys, -(-int(kv_lens.max()) // (cut * keys)) * keys)

    with mock.patch.object(triton_paged.Way, "of", of):
        if cut is None:
            yield
            return
        with mock.patch.object(triton_paged, "most_stretches", return_value=cut), mock.patch.object(triton_paged, "stretch", stretch):
            yield


@contextmanager
def few(product: Product, **changes: Any) -> Iterator[None]:
    """A product of few rows, cut otherwise."""
    known = fused_products.cut

    def cut(rows: int, asked: Product, itemsize: int, *, whole: bool) -> dict[str, Any]:
        way = known(rows, asked, itemsize, whole=whole)
        return {**way, **changes} if asked == product else way

    with mock.patch.object(fused_products, "cut", cut):
        yield


@contextmanager
def tiles(bench: Bench, product: Product, **changes: Any) -> Iterator[None]:
    """A product in tiles, which are cut otherwise."""
    known = Tile.of

    def of(rows: int, product: Product, shared: int) -> Tile:
        return replace(known(rows, product, shared), **changes)

    with chosen(bench, {product: "tiles"}), mock.patch.object(Tile, "of", of):
        yield


@contextmanager
def chosen(bench: Bench, kernels: Mapping[Product, Kernel]) -> Iterator[None]:
    """Kernels in steps of any number of rows: the default one for products that are not named."""
    measured = {(product, rows): kernel for product, kernel in kernels.items() for rows in ROWS}
    with mock.patch.object(bench.choices, "measured", measured):
        yield


@dataclass(frozen=True, slots=True)
class Way:
    name: str
    running: list[int]
    within: Callable[[], AbstractContextManager[None]] = nullcontext
    context: int | None = None  # CONTEXT


class Bench:
    def __init__(self, model: str, layers: int | None, running: list[int]) -> None:
        shape = {**SHAPES[model][1], "vocab_size": VOCABULARY}
        self.layers = shape["num_hidden_layers"] = min(layers or shape["num_hidden_layers"], shape["num_hidden_layers"])
        none: list[int] = []
        with (
            tempfile.TemporaryDirectory() as scratch,
            mock.patch.dict(SHAPES, {model: (SHAPES[model][0], shape)}),
            mock.patch.object(graphs, "ladder", return_value=running),
            mock.patch.object(graphs, "prompt_ladder", return_value=none),
            mock.patch.object(CudaRecorder, "record", return_value=lambda: None),  # nothing is captured for good
        ):
            self._bench = gpu.Bench(Path(scratch), model, "triton", max(running), CONTEXT, "")
        runner = self._bench.runner
        assert isinstance(runner, ModelRunner)
        assert isinstance(runner.forward, TorchForward)
        assert runner.forward._graphs is not None
        assert runner._rows is not None
        assert isinstance(runner.forward.attention, TritonAttention)
        assert isinstance(runner.forward.decoder.kernels, FusedKernels)
        self.choices = runner.forward.decoder.kernels.choices
        self.forward, self._graphs, self._table = runner.forward, runner.forward._graphs, runner._rows.table
        self._attention = runner.forward.attention
        self._held = {graph.held.size: graph.held for graph in self._graphs._decodes}
        self.tell(max(running), CONTEXT)

    @property
    def products(self) -> dict[str, Product]:
        block = self.forward.decoder.blocks[0]
        layers: dict[str, Any] = {"qkv": block.qkv, "out": block.out, "gate_up": block.up, "down": block.down}
        return {name: getattr(layer, "layer", layer).product for name, layer in layers.items()}

    @torch.inference_mode()
    def tell(self, rows: int, context: int) -> None:
        step, held = self._bench.step(rows, context, 1, told=True), self._held[rows]
        self._table.apply(step)
        held.tell(step, self._attention.fill(step, self._table, held), self.forward.decoder.mail.bring)

    @torch.inference_mode()
    def launch(self, rows: int, way: Way) -> None:
        """For its kernels to be compiled."""
        with way.within():
            self.tell(rows, way.context or CONTEXT)
            self._graphs._compute(self._held[rows])
        torch.cuda.synchronize()

    @torch.inference_mode()
    def seconds(self, rows: int, way: Way) -> float:
        with way.within():
            self.tell(rows, way.context or CONTEXT)
            torch.cuda.synchronize()
            replay = CudaRecorder().record(partial(self._graphs._compute, self._held[rows]))
        replay()
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        found: list[float] = []
        for _ in range(ROUNDS):
            torch.cuda.synchronize()
            begun.record()
            for _ in range(REPLAYS):
                replay()
            ended.record()
            torch.cuda.synchronize()
            found.append(begun.elapsed_time(ended) / 1e3 / REPLAYS)
        return statistics.median(found)

    def ways(self, kinds: list[str], running: list[int]) -> list[Way]:
        """That of the runtime first."""
        found = [Way("as served", running)]
        least = [rows for rows in running if rows <= fused_products.MOST_ROWS]
        several = [rows for rows in running if rows in ROWS and rows not in least]
        if "attention" in kinds:
            for keys, warps, stages, ahead in ((64, 2, 5, False), (64, 2, 3, False), (64, 2, 7, False), (64, 4, 3, False),
                                               (64, 4, 3, True), (64, 4, 5, False), (64, 4, 7, False), (64, 8, 3, False),
                                               (64, 8, 3, True), (128, 4, 3, False), (128, 4, 5, False), (32, 2, 5, False),
                                               (32, 2, 9, False), (32, 1, 5, False)):  # fmt: skip
                name = f"{keys} keys, {warps} warps, {stages} stages{', ahead' if ahead else ''}"
                found.append(Way(name, running, partial(attention, keys, warps, stages, ahead)))
            found += [Way(f"64 keys, 2 warps, cut into {cut}", several, partial(attention, 64, 2, 5, cut=cut)) for cut in (1, 2, 4)]
        for name, product in self.products.items():
            if "few" in kinds:
                for change in ({"OUTPUTS": 1}, {"OUTPUTS": 2}, {"OUTPUTS": 4}, {"OUTPUTS": 8}, {"COLUMNS": 512}, {"COLUMNS": 2048},
                               {"WHOLE": False}, {"maxnreg": 96}, {"maxnreg": 160}):  # fmt: skip
                    found.append(Way(f"{name} {change}", least, partial(few, product, **change)))
            if "tiles" in kinds:
                for change in ({}, {"bring": 0}, {"bring": 64}, {"late": True}, {"outputs": 32}, {"outputs": 64}, {"stages": 3}):
                    found.append(Way(f"{name} in tiles {change}", several, partial(tiles, self, product, **change)))
        if "staged" in kinds:
            fit = {name: product for name, product in self.products.items() if "staged" in self.choices.offers(product, 1)}
            some = [rows for rows in running if rows <= fused_products.MOST_STAGED]
            found += [Way(f"{name} staged", some, partial(chosen, self, {one: "staged"})) for name, one in fit.items()]
            found.append(Way("all staged", some, partial(chosen, self, dict.fromkeys(fit.values(), "staged"))))
        if "context" in kinds:
            found += [Way(f"context of {context}", running, context=context) for context in (64, 128, 256, 640)]
        return found


def compile_some(model: str, running: list[int], kinds: list[str], turn: int, turns: int) -> None:
    bench = Bench(model, BRIEF, running)
    for way in bench.ways(kinds, running)[turn::turns]:
        for rows in way.running:
            try:
                bench.launch(rows, way)
            except Exception as error:  # more registers or shared memory than there is
                print(f"{model} {way.name}, {rows} running: {type(error).__name__}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["0.5b", "8b"], choices=list(SHAPES))
    parser.add_argument("--running", nargs="+", type=int, default=[1, 2, 4, 8, 16, 64, 256])
    parser.add_argument("--layers", type=int, help="of each model, at most: of a large one some say as much as all")
    parser.add_argument("--ways", nargs="+", default=list(KINDS), choices=KINDS)
    options = parser.parse_args()
    running, turns = sorted(options.running), max(1, (os.cpu_count() or 1) // len(options.models))
    with ProcessPoolExecutor(turns * len(options.models), multiprocessing.get_context("spawn")) as pool:
        asked = [pool.submit(compile_some, model, running, options.ways, turn, turns) for model in options.models for turn in range(turns)]
        for one in asked:
            one.result()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, context {CONTEXT}", flush=True)
    for model in options.models:
        bench = Bench(model, options.layers, running)
        before: dict[int, float] = {}
        for way in bench.ways(options.ways, running):
            line = []
            for rows in way.running:
                try:
                    seconds = bench.seconds(rows, way)
                except Exception as error:
                    line.append(f"{rows}: {type(error).__name__}")
                    torch.cuda.synchronize()
                    continue
                more = (seconds - before.setdefault(rows, seconds)) / bench.layers
                line.append(f"{rows}: {1e6 * seconds:7.1f} ({1e6 * more:+6.2f})")
            print(f"{model:11} {way.name:44} {'  '.join(line)}", flush=True)
        del bench
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

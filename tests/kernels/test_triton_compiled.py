"""Attention's and the layers' kernels, compiled for a GPU that is not there, in the ways that are served."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.models import compiled
from tests.support.paths import ROOT

BENCHMARKS = ROOT / "benchmarks"

COMPILE = """
import itertools
import torch
from banyan_runtime.model import fused_products
from banyan_runtime.model.attention.triton_paged import Way, _Heads
from banyan_runtime.model.fused_products import Tile
from banyan_runtime.model.kernels import paged_attention as kernels, power_of_two, products, rows, staged, tiles
from banyan_runtime.model.kernel_choices import ROWS, Product

POINTERS = {"rows_of": "*i32", "firsts": "*i32", "counts": "*i32", "positions": "*i32", "table": "*i32",
            "stretch_keys": "*i32", "ends": "*i32", "slots": "*i32",
            "highs": "*fp32", "masses": "*fp32", "parts": "*fp32", "q": "*bf16", "keys": "*bf16", "values": "*bf16", "out": "*bf16",
            "table_stride": "i32", "head_stride": "i32", "tokens": "i32", "pairs": "i32", "scale": "fp32"}

TURNED = {**dict.fromkeys(("qkv", "cos", "sin", "q_weight", "k_weight"), "*bf16"), "stride": "i32", "eps": "fp32"}

# What they read first was there before the step began.
EARLY = (kernels.attend, kernels.turn_and_attend, kernels.join, products.product, staged.staged, tiles.tile,
         rows.begin, rows.place, rows.rms_norm)

compiled = set()

def check(function, constants, warps=4, stages=3, room=227 << 10, maxnreg=None, **changes):
    if FEW and function in compiled:
        return
    compiled.add(function)
    options = {"num_warps": warps, "num_stages": stages} | ({} if maxnreg is None else {"maxnreg": maxnreg})
    kernel = made(function, POINTERS | changes, constants | {"DEPENDENT": True}, **options)
    assert kernel.metadata.shared <= room, (constants, kernel.metadata.shared)
    before, waiting, behind = kernel.asm["ptx"].partition("griddepcontrol.wait")
    assert waiting and "st.global" not in before and ("ld.global" in before) == (function in EARLY), function
"""

ATTENTION = """
SHAPES = [(2, 256, 16, 512, 0, 50.0), (7, 64, 16, 512, 0, 0.0), (7, 64, 128, 0, 0, 0.0), (7, 64, 128, 512, 0, 0.0)]
SHAPES += [(4, 128, 16, 512, 0, 0.0), (4, 128, 128, 0, 4096, 0.0), (2, 256, 128, 0, 4096, 50.0)]
SHAPES += [(4, 256, most, 0, 0, 0.0) for most in (16, 32, 64, 128)]
WIDEST = sorted({_Heads(8, 1, 512, torch.bfloat16, 0).rows(queries) for queries in (1, 4, 99)})
SHAPES += [(8, 512, *rows_and_stretch, 0, 0.0) for rows_and_stretch in itertools.product(WIDEST, (0, 512))]
for group, dim, most, stretch, window, cap in SHAPES:
    constants = {"GROUP": group, "HEADS": 2 * group, "DIM": dim, "WIDTH": dim, "ROWS": most}
    constants |= {"SPLIT": stretch > 0, "WINDOW": window, "CAP": cap, "PRECISION": "tf32"}
    for single in (False, True) if most == 16 and dim <= 256 else (False,):
        ways = {}  # and the shared memory that there is
        for programs, room in itertools.product((8, 128, 2048), (227 << 10, 99 << 10)):
            ways[Way.of(dim, torch.bfloat16, most, programs, single=single, shared=room)] = room
        for way, room in ways.items():
            first = way == next(iter(ways)) and (room == 227 << 10 or dim == 512)
            for kept in ("*bf16", "*fp8e4nv", "*fp8e5") if first else ("*bf16",):
                own, types = constants | {"KEYS": way.keys}, {"keys": kept, "values": kept} | ({"out": "*fp32"} if stretch else {})
                if not single:
                    check(kernels.attend, own, way.warps, way.stages, room, **types)
                    continue
                own |= {"NORMED": dim != 64, "WIDE": dim == 256, "AHEAD": way.ahead, "PADDING": 0, "LARGEST": 448.0}
                own |= {"NARROW": kept != "*bf16"}
                types |= TURNED | dict.fromkeys(("q_weight", "k_weight"), "*fp32" if dim == 256 else "*bf16")
                check(kernels.turn_and_attend, own, way.warps, way.stages, room, **types)
for group, dim in ((32, 256), (64, 128)):  # of which a token's own key is a small tile
    for room in (227 << 10, 99 << 10):
        way = Way.of(dim, torch.bfloat16, group, 8, single=True, shared=room)
        own = {"GROUP": group, "HEADS": group, "DIM": dim, "WIDTH": dim, "ROWS": group, "SPLIT": True, "WINDOW": 0, "CAP": 0.0}
        own |= {"PRECISION": "tf32", "KEYS": way.keys, "NORMED": False, "WIDE": False, "AHEAD": way.ahead, "PADDING": 0}
        own |= {"LARGEST": 448.0, "NARROW": False}
        check(kernels.turn_and_attend, own, way.warps, way.stages, room, **TURNED, parts="*fp32")
check(kernels.note, {}, **{name: "*i32" for name in ("rows", "positions", "slots", "counts")})
check(kernels.join, {"HEADS": 14, "DIM": 64, "WIDTH": 64, "TOGETHER": 16})
"""

PRODUCTS = """
rows_types = {name: "*bf16" for name in ("x", "delta", "weight", "sums", "both", "qkv", "cos", "sin", "q_weight", "k_weight", "queries")}
rows_types |= {"stride": "i32", "delta_stride": "i32", "inner": "i32", "eps": "fp32", "slots": "*i64"}
for yes in (True, False):
    types = rows_types | dict.fromkeys(("weight", "q_weight", "k_weight"), "*fp32" if yes else "*bf16")
    check(rows.rms_norm, {"ADDED": yes, "WIDE": yes, "WIDTH": 896, "BLOCK": 1024}, **types)
    heads = {"NORMED": yes, "WIDE": yes, "HEADS": 14, "KV_HEADS": 2, "TOGETHER": 16, "HALF": 40, "BLOCK": 64, "PADDING": 0}
    for kept, largest in (("*bf16", 3e38), ("*fp8e4nv", 448.0), ("*fp8e5", 57344.0)):
        for slots in ("*i64", "*i32"):
            places = {**types, "slots": slots, "keys": kept, "values": kept}
            check(rows.place, heads | {"LARGEST": largest, "NARROW": largest < 3e38}, **places)
begun = {"ids": "*i32", "rows": "*i32", "positions": "*i32", "latest": "*i64", "embed": "*bf16", "hidden": "*bf16", "own_cos": "*bf16"}
begun |= {"own_sin": "*bf16"}
check(rows.begin, {"WIDTH": 896, "BLOCK": 1024, "DIM": 64, "DIM_BLOCK": 64}, **rows_types, **begun)
for gelu in (True, False):
    check(rows.gated, {"GELU": gelu, "BLOCK": 1024}, **rows_types)
product_types = {**rows_types, **dict.fromkeys(("norm", "bias"), "*bf16"), "outputs": "i32"}
for gated in (True, False):
    for entry in (False, True):
        for outputs, width in ((896, 4864), (4096, 4096), (151936, 896)):
            constants = {"ADDED": entry, "NORMED": entry, "BIASED": entry, "GATED": gated, "GELU": gated and not entry}
            constants |= {"WIDTH": width, "BLOCK": power_of_two(width)}
            for few in (1, 2):
                way = fused_products.cut(few, Product(outputs, width, gated), 2, whole=not entry)
                warps, most = way.pop("num_warps"), way.pop("maxnreg", None)
                check(products.product, constants | way, warps, maxnreg=most, **product_types)
for width, rows, gated, entry in ((896, 1, True, True), (896, 8, True, False), (2048, 1, False, True), (2048, 16, False, False),
                                  (4864, 1, False, False), (4864, 16, False, False)):
    stretch = fused_products.stretch_of(width)
    splits, parts = -(-width // stretch), fused_products.warps_of(stretch)
    constants = {"ADDED": entry, "NORMED": entry, "BIASED": gated, "GATED": gated, "GELU": gated, "WIDTH": width, "BLOCK": stretch}
    constants |= {"ROWS": rows, "PARTS": parts, "SPLITS": splits}
    # The smallest shared memory of GPUs whose kernels begin before others end.
    check(staged.staged, constants, parts, room=99 << 10, **product_types, rows="i32", shares="*fp32", arrived="*i32")
counted = {**product_types, "parts": "*fp32", "arrived": "*i32", "rows": "i32"}
for product in map(Product._make, [(4864, 896, True), (1152, 896, False), (896, 4864, False), (6144, 4096, False), (14336, 4096, True)]):
    for tile, room in {Tile.of(rows, product, room): room for rows in ROWS for room in (227 << 10, 99 << 10)}.items():
        constants = {"BIASED": True, "GATED": product.gated, "GELU": product.gated, "WIDTH": product.width, "ROWS": tile.rows}
        constants |= {"LATE": tile.late, "OUTPUTS": tile.outputs, "COLUMNS": tile.columns, "SPLITS": tile.splits, "BRING": tile.bring}
        check(tiles.tile, constants, tile.warps, tile.stages, room, **counted)
"""


@pytest.mark.matrix(gate=1)
@pytest.mark.parametrize("kernels", [ATTENTION, PRODUCTS], ids=["attention", "products"])
def test_every_kernel_compiles_for_a_gpu(kernels: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """No GPU is needed. The gate compiles one variant of each kernel."""
    compiled.run(f"FEW = {pytestconfig.getoption('--gate')}\n{COMPILE}{kernels}", tmp_path)


SWEEP = """
import sys
sys.path.insert(0, BENCHMARKS)
import gpu_kernels
import torch

LAUNCHES = {"num_warps", "num_stages"}

def bound(kernel, grid, arguments, options):
    names = kernel.arg_names[: len(arguments)]
    assert not set(names) & set(options), (kernel, set(names) & set(options))
    given = set(names) | set(options) - LAUNCHES
    assert set(kernel.arg_names) == given, (kernel, set(kernel.arg_names) ^ given)
    assert all(isinstance(value, int | float | torch.dtype) for value in arguments)

for case in gpu_kernels.cases(list(gpu_kernels.KINDS), ["0.5b", "8b"]):
    for way in gpu_kernels.ways(case):
        gpu_kernels.KINDS[case.kind](case, way, bound, lambda name, shape, dtype, layer=0: dtype, 0, {"DEPENDENT": False})
        print(case.kind)
"""


@pytest.mark.long
def test_the_sweep_of_kernels_calls_them_as_they_are(tmp_path: Path) -> None:
    """What is measured on a GPU is written down where there is none."""
    found = compiled.run(f"BENCHMARKS = {str(BENCHMARKS)!r}\n{SWEEP}", tmp_path)
    assert set(found.split()) == {"decode", "prompt", "product", "tile"}


TIMELINE = """
import sys
import tempfile
from pathlib import Path
sys.path.insert(0, BENCHMARKS)
import gpu_timeline as timeline

scratch = Path(tempfile.mkdtemp())
rows, staged = (timeline.with_ends(module, scratch) for module in (timeline.rows, timeline.staged))
types = {name: "*bf16" for name in ("x", "delta", "weight", "sums", "out", "norm", "bias")}
types |= {"shares": "*fp32", "arrived": "*i32", "rows": "i32", "stride": "i32", "delta_stride": "i32", "outputs": "i32", "eps": "fp32"}
known = {"ADDED": True, "NORMED": True, "WIDE": False, "BIASED": False, "GATED": True, "GELU": False, "WIDTH": 896, "BLOCK": 1024}
known |= {"DEPENDENT": 1 << 46}
for kernel, constants in ((rows.rms_norm, {}), (staged.staged, {"ROWS": 1, "PARTS": 4, "SPLITS": 1})):
    own = {name: value for name, value in (known | constants).items() if name in kernel.arg_names}
    text = made(kernel, types, own).asm["ptx"]
    before, waiting, behind = text.partition("griddepcontrol.wait")
    assert waiting and before.count("%clock64") == 1 and behind.count("%clock64") == 2 and behind.count("%globaltimer") == 1
"""


@pytest.mark.long
def test_kernels_that_note_what_they_do_when(tmp_path: Path) -> None:
    compiled.run(f"BENCHMARKS = {str(BENCHMARKS)!r}\n{TIMELINE}", tmp_path)

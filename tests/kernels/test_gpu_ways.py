"""The benchmark of decode steps in other ways finds what it changes, on a pretended GPU: on a real one minutes are counted."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

from banyan_runtime.model import fused_products
from tests.support.models.pretended import pretended, small_kernels
from tests.support.paths import ROOT

BENCHMARKS = ROOT / "benchmarks"


@pytest.mark.long
def test_a_way_of_each_kind_is_launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a real one")
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    shapes, gpu, gpu_ways = (importlib.import_module(name) for name in ("shapes", "gpu", "gpu_ways"))
    few_heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    monkeypatch.setitem(
        shapes.SHAPES, "tiny", ("Llama", {**shapes.SHAPES["1b"][1], "hidden_size": 128, "intermediate_size": 256, **few_heads})
    )
    for where, name, value in ((gpu, "PROMPT", 100), (gpu, "STEPS", 4), (gpu_ways, "VOCABULARY", 512), (gpu_ways, "CONTEXT", 64)):
        monkeypatch.setattr(where, name, value)
    monkeypatch.setattr(fused_products, "_OUTPUTS", 128)
    small_kernels(monkeypatch)
    with pretended(monkeypatch, tmp_path):
        running = [1, 4]
        bench = gpu_ways.Bench("tiny", 2, running)
        monkeypatch.setattr(gpu_ways, "ROWS", (4,))
        ways = bench.ways(list(gpu_ways.KINDS), running)
        assert ways[0].name == "as served"
        asked = [
            ways[0],
            *(next(way for way in ways if part in way.name) for part in ("cut into 2", "down {", "out in tiles", "context of 64")),
        ]
        for way in asked:
            for rows in way.running:
                bench.launch(rows, way)
        assert bench.layers == 2

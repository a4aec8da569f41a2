"""What it costs to compute in blocks whose row counts were measured to agree, beside a library that is given all rows at once.

    python benchmarks/invariance.py [--dtype float32 bfloat16] [--shape smollm2-135m qwen2.5-0.5b] [--layers 4] [--rounds 5]

Whole steps of models with random weights and a few layers: prefills of one prompt, and decodes of many sequences with 200 tokens
each. Rows: the largest block that is allowed (0: no blocks, no padding, no promise). Columns: milliseconds of CPU time with one
thread, which a busy machine disturbs least, best of the rounds, which take turns; in brackets the ratio to no blocks. `start` is
how long the measurement at start takes, layers and attention.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from banyan_runtime.config import ServerConfig
from banyan_runtime.model import layers
from banyan_runtime.model.attention import products
from banyan_runtime.model.invariance import RowSizes
from banyan_runtime.model.runner import ModelRunner
from banyan_runtime.model.runners import load
from banyan_runtime.step import Ragged, RowUpdates, SamplingColumns, Step, TableShape

SHAPES = {
    "smollm2-135m": {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
                     "num_key_value_heads": 3, "vocab_size": 49152},
    "qwen2.5-0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14,
                     "num_key_value_heads": 2, "vocab_size": 151936},
}  # fmt: skip
BLOCKS = (0, 64, 128, 256, 512)
DECODED = 200  # tokens before the one that is decoded
CONTEXT = 2560


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", default=["float32"])
    parser.add_argument("--shape", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    steps = {"prefill 512": (1, 512), "prefill 2048": (1, 2048), "decode 1": (1, 1), "decode 16": (16, 1), "decode 64": (64, 1)}
    for shape in options.shape:
        for dtype in options.dtype:
            runner = _runner(shape, dtype, options.layers)
            print(f"\n{shape} {dtype}, {options.layers} layers; start {_start(runner, SHAPES[shape]):.2f} s")
            print(f"{'rows':>6} " + " ".join(f"{name:>18}" for name in steps))
            for rows, times in _measure(runner, list(steps.values()), options.rounds).items():
                print(f"{rows:6} " + " ".join(f"{ms:9.1f} ({ms / none:4.2f}x)" for ms, none in times))


def _runner(shape: str, dtype: str, count: int) -> ModelRunner:
    config = SHAPES[shape] | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "max_position_embeddings": 4096, "tie_word_embeddings": True, "hidden_act": "silu",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config | {"num_hidden_layers": count}))
        options = ServerConfig(model_path=folder, device="cpu", runner="torch", dtype=dtype, load_format="dummy", max_total_tokens=64 * 256)
        runner = load(options, Path(folder), lambda *_: None)
    assert isinstance(runner, ModelRunner)
    runner.prepare(TableShape(rows=64, positions=CONTEXT))
    return runner


def _start(runner: ModelRunner, shape: dict[str, int]) -> float:
    """Seconds to measure everything again."""
    spec, decoder = runner.forward.decoder.spec, runner.forward.decoder
    layers._MeasuredLayers.KNOWN.clear()
    products.Products.KNOWN.clear()
    kernels = type(decoder.kernels)()
    inner = shape["intermediate_size"]
    zeros = {
        shape: torch.zeros(shape, dtype=decoder.dtype)
        for shape in ((spec.hidden_size + 2 * spec.kv_heads * spec.head_dim, spec.hidden_size), (spec.hidden_size, spec.hidden_size),
                      (spec.hidden_size, inner), (2 * inner, spec.hidden_size))
    }  # fmt: skip
    started = time.process_time()
    kernels.norm(torch.zeros(spec.hidden_size, dtype=decoder.dtype), 1e-5)
    for shape, weight in zeros.items():
        (kernels.gated if shape[0] == 2 * inner else kernels.linear)(weight, None)
    for part in {part.shape: part for part in torch.split(decoder.embed, layers.Head.SLICE)}.values():
        kernels.linear(part, None)
    products.Products(spec, decoder.dtype, torch.device("cpu"))
    return time.process_time() - started


def _measure(runner: ModelRunner, steps: list[tuple[int, int]], rounds: int) -> dict[int, list[tuple[float, float]]]:
    """By the largest block: milliseconds of each step, and those without blocks."""
    found, attention = runner.forward.decoder.rows, runner.forward.attention._products
    sizes = found.sizes
    assert sizes is not None, "this machine makes no promise: there is nothing to compare"
    best = {rows: [float("inf")] * len(steps) for rows in BLOCKS}
    built = [_step(*step) for step in steps]
    for _ in range(rounds + 1):
        for rows in BLOCKS:
            runner.forward.decoder.rows = RowSizes([size for size in sizes if size <= rows]) if rows else RowSizes(None)
            runner.forward.attention._products = attention if rows else _unbounded()
            for index, step in enumerate(built):
                started = time.process_time()
                runner.launch(step).result()
                best[rows][index] = min(best[rows][index], 1e3 * (time.process_time() - started))
    runner.forward.decoder.rows, runner.forward.attention._products = found, attention
    return {rows: list(zip(times, best[0], strict=True)) for rows, times in best.items()}


def _unbounded() -> products.Products:
    made = products.Products.__new__(products.Products)
    made.rows, made._items = RowSizes(None), {}
    return made


def _step(sequences: int, queries: int) -> Step:
    start = 0 if queries > 1 else DECODED
    table = np.zeros((sequences, CONTEXT), np.int32)
    for row in range(sequences):
        table[row, : start + queries] = 1 + row * (start + queries) + np.arange(start + queries)
    every = np.arange(sequences * queries)
    positions = (start + every % queries).astype(np.int32)
    cached = Ragged(table[:, :start].reshape(-1), np.arange(sequences + 1, dtype=np.int32) * start)
    ones, rows = np.ones(sequences, np.float32), np.arange(sequences, dtype=np.int32)
    return Step(
        mode="prefill" if queries > 1 else "decode",
        token_ids=(every * 7919 % 40_000).astype(np.int32),
        positions=positions,
        out_slots=table[every // queries, positions],
        rows=rows,
        query_lens=np.full(sequences, queries, np.int32),
        kv_lens=np.full(sequences, start + queries, np.int32),
        samples=np.ones(sequences, np.int32),
        sampling=SamplingColumns(
            temperature=0 * ones, top_k=np.full(sequences, -1, np.int32), top_p=ones, min_p=0 * ones, frequency_penalty=0 * ones,
            presence_penalty=0 * ones, repetition_penalty=ones, seed=np.zeros(sequences, np.uint64),
        ),
        updates=RowUpdates(rows, np.zeros(sequences, np.int32), cached),
    )  # fmt: skip


if __name__ == "__main__":
    main()

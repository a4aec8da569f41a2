"""Tokens per second of the transformers backend beside transformers' own: 16 streams beside its continuous batching, one beside `generate`.

    python benchmarks/transformers_backend.py [--shape 0.5b] [--dtype float32] [--prompt 128] [--tokens 64] [--rounds 3] [--out FILE]

All in one process, with one set of random weights, which lie in memory once, and as many threads; rounds in turns, A B A B, behind one that
is not kept.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers
from shapes import SHAPES

from banyan_runtime.config import ServerConfig
from banyan_runtime.engine.limits import EngineLimits
from banyan_runtime.engine.loop import Engine
from banyan_runtime.model.runners import load
from banyan_runtime.model.transformers_backend import weights
from banyan_runtime.model.transformers_backend.attention import NAME
from banyan_runtime.wire import Failed, Sampling, StepOutput, Submit, pack_ids

STREAMS = 16
BLOCKS = 64  # of 256 tokens


class Ours:
    """The engine over the transformers backend."""

    def __init__(self, model: Any, folder: Path, options: argparse.Namespace) -> None:
        config = ServerConfig(
            model_path=str(folder), load_format="dummy", model_impl="transformers", device="cpu", dtype=options.dtype,
            max_total_tokens=2 * STREAMS * (options.prompt + options.tokens), max_running_requests=STREAMS, disable_radix_cache=True,
        )  # fmt: skip
        with patch.object(weights, "dummy", lambda *_: model):
            runner = load(config, folder, lambda *_: None)
        self._model = model
        self._engine = Engine(runner, EngineLimits.of(config, runner.info), time.monotonic, lambda _: None)
        self._ids = itertools.count()

    def __call__(self, prompts: list[list[int]], tokens: int) -> int:
        """Tokens that were made."""
        self._model.set_attn_implementation(NAME)
        for prompt in prompts:
            sampling = Sampling(max_new_tokens=tokens, temperature=0.0)
            self._engine.handle(Submit(id=next(self._ids), token_ids=pack_ids(prompt), sampling=sampling))
        finished = made = 0
        while finished < len(prompts):
            for message in self._engine.turn():
                assert not isinstance(message, Failed), message
                if isinstance(message, StepOutput):
                    finished += len(message.finished)
                    made += len(message.token_ids) // 4
        return made


class Library:
    """transformers by itself."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def generate(self, prompts: list[list[int]], tokens: int) -> int:
        self._model.set_attn_implementation("sdpa")
        ids = torch.tensor(prompts)
        out = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0
        )
        return out.numel() - ids.numel()

    def batching(self, prompts: list[list[int]], tokens: int) -> int:
        self._model.set_attn_implementation("sdpa")
        settings = transformers.GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        room = transformers.ContinuousBatchingConfig(num_blocks=BLOCKS)  # else it takes most of the machine's memory, each time
        made = self._model.generate_batch(prompts, generation_config=settings, continuous_batching_config=room)
        return sum(len(each.generated_tokens) for each in made.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.5b", choices=SHAPES)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    name, keys = SHAPES[options.shape]
    with tempfile.TemporaryDirectory() as folder:
        config = getattr(transformers, f"{name}Config")(**keys, architectures=[f"{name}ForCausalLM"], dtype=options.dtype)
        config.save_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype)).eval()
        ours, library = Ours(model, Path(folder), options), Library(model)
    random = np.random.default_rng(1)
    prompts = random.integers(0, keys["vocab_size"], (STREAMS, options.prompt)).tolist()
    cases: dict[str, tuple[Callable[[list[list[int]], int], int], list[list[int]]]] = {
        "ours, 16": (ours, prompts), "continuous batching, 16": (library.batching, prompts),
        "ours, 1": (ours, prompts[:1]), "generate, 1": (library.generate, prompts[:1]),
    }  # fmt: skip
    speeds: dict[str, list[float]] = {name: [] for name in cases}
    for kept in range(options.rounds + 1):
        for name, (run, asked) in cases.items():
            started = time.perf_counter()
            made = run(asked, options.tokens)
            assert made == len(asked) * options.tokens, (name, made)
            if kept:
                speeds[name].append(made / (time.perf_counter() - started))
    medians = {name: statistics.median(found) for name, found in speeds.items()}
    ratios = {
        "16 streams, of continuous batching": medians["ours, 16"] / medians["continuous batching, 16"],
        "one stream, of generate": medians["ours, 1"] / medians["generate, 1"],
    }
    print(
        f"{options.shape}, {options.dtype}, prompts of {options.prompt}, transformers {transformers.__version__}, torch {torch.__version__}"
    )
    print("\n".join(f"{name:36}{value:8.2f} tokens/s" for name, value in medians.items()))
    print("\n".join(f"{name:36}{value:8.2f}" for name, value in ratios.items()))
    if options.out is not None:
        options.out.write_text(json.dumps({"speeds": speeds, "medians": medians, "ratios": ratios}, indent=1) + "\n")


if __name__ == "__main__":
    main()

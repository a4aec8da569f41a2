"""How fast weights in blocks are computed on, beside llama.cpp with the same GGUF files and as many threads.

    taskset -c 0,1 python benchmarks/quantized_speed.py FILE.gguf [...] --llama FOLDER [--rounds 3]

FOLDER has llama.cpp's `llama-bench` and `llama-batched-bench` (cmake --build build --target llama-bench llama-batched-bench, in the
folder that `compare.py` builds its server in). No server, no sampling: a step is the model and its logits on both sides, which take
turns, so a neighbour on the machine slows both.

Columns: tokens a second of one stream, of 16 (prompts of 64 tokens, then 32 more each), and of a prompt of 512, each the median over
rounds, and Banyan's over llama.cpp's; MB of weights that a step of one stream reads, times steps a second; what two threads read of
memory in the same minute, which bounds that.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from banyan_runtime.config import ServerConfig
from banyan_runtime.hub.gguf.unfold import unfold
from banyan_runtime.model import host
from banyan_runtime.model.runner import ModelRunner
from banyan_runtime.model.runners import load
from banyan_runtime.model.table import SlotTable
from banyan_runtime.step import SamplingColumns, Step, TableShape

PROMPT, NEW, LONG, STREAMS = 64, 32, 512, 16
Rates = dict[str, float]
"""Tokens a second, by column."""


class Banyan:
    """The model's own steps, through the native runner."""

    def __init__(self, file: Path, cache: Path) -> None:
        folder = unfold(file, None, cache, tokenizer=False)
        config = ServerConfig(model_path=str(folder), device="cpu", runner="native", dtype="bfloat16", max_total_tokens=STREAMS * 1024)
        runner = load(config, folder, lambda *_: None)
        assert isinstance(runner, ModelRunner)
        runner.prepare(TableShape(STREAMS, 1024))
        self._forward, self.megabytes = runner.forward, runner.info.weights_bytes / 1e6

    def rates(self) -> Rates:
        found: Rates = {}
        for column, streams in (("one", 1), ("many", STREAMS)):
            table = SlotTable(TableShape(STREAMS, 1024))
            self._step(table, streams, 0, PROMPT)
            started = time.perf_counter()
            for position in range(PROMPT, PROMPT + NEW):
                self._step(table, streams, position, 1)
            found[column] = streams * NEW / (time.perf_counter() - started)
        started = time.perf_counter()
        self._step(SlotTable(TableShape(STREAMS, 1024)), 1, 0, LONG)
        found["prompt"] = LONG / (time.perf_counter() - started)
        return found

    def _step(self, table: SlotTable, streams: int, start: int, count: int) -> None:
        positions = np.tile(np.arange(start, start + count, dtype=np.int32), streams)
        rows = np.arange(streams, dtype=np.int32)
        slots = 1 + positions + 1024 * np.repeat(rows, count).astype(np.int32)
        ids = (positions * 31 + 7) % 4000
        column, whole, ones = np.zeros(streams, np.float32), np.zeros(streams, np.int32), np.ones(streams, np.int32)
        sampling = SamplingColumns(column, whole, column, column, column, column, column, np.zeros(streams, np.uint64))
        step = Step(
            "decode" if count == 1 else "prefill", ids, positions, slots, rows, ones * count, ones * (start + count), ones, sampling
        )
        table.apply(step)
        with torch.inference_mode():
            hidden = self._forward.hidden(step, torch.from_numpy(ids.astype(np.int64)), table)
            self._forward.logits(hidden[count - 1 :: count].contiguous())


def llama(file: Path, folder: Path, threads: int) -> Rates:
    def lines(program: str, *options: str) -> list[dict[str, float]]:
        command = [str(folder / program), "-m", str(file), "-t", str(threads), *options]
        said = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True).stdout
        return [json.loads(line[line.index('{"') :]) for line in said.splitlines() if '{"' in line]  # the log comes between

    batched = ["-tb", str(threads), "-c", "4096", "-npp", str(PROMPT), "-ntg", str(NEW), "-npl", f"1,{STREAMS}", "--output-format", "jsonl"]
    one, many = (line["speed_tg"] for line in lines("llama-batched-bench", *batched))
    (prompt,) = lines("llama-bench", "-p", str(LONG), "-n", "0", "-r", "1", "-o", "jsonl")
    return {"one": one, "many": many, "prompt": prompt["avg_ts"]}


def bandwidth(threads: int) -> float:
    """GB a second that threads read of memory together, the best of three."""
    parts = [np.ones(1 << 24, np.int64) for _ in range(threads)]  # 128 MB each
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(3):
            started = time.perf_counter()
            list(pool.map(np.sum, parts))
            best = max(best, sum(part.nbytes for part in parts) / (time.perf_counter() - started) / 1e9)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--llama", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    threads = host.cores()
    print(f"{threads} threads, prompts of {PROMPT} and {NEW} more, {STREAMS} streams, a prompt of {LONG}, {options.rounds} rounds")
    print(f"{'file':28} {'one stream':>22} {f'{STREAMS} streams':>22} {'prompt':>22} {'GB/s':>5} {'of':>5}")
    for file in options.files:
        with tempfile.TemporaryDirectory() as scratch:
            banyan = Banyan(file, Path(scratch))
            banyan.rates()
            ours, theirs, probes = [], [], []
            for _ in range(options.rounds):
                probes.append(bandwidth(threads))
                ours.append(banyan.rates())
                theirs.append(llama(file, options.llama, threads))
        cells = []
        for column in ("one", "many", "prompt"):
            mine, other = (statistics.median(rates[column] for rates in side) for side in (ours, theirs))
            cells.append(f"{mine:7.1f} {other:7.1f} {mine / other:6.2f}")
        reads = statistics.median(rates["one"] for rates in ours) * banyan.megabytes / 1e3
        print(f"{file.stem[:28]:28} {' '.join(cells)} {reads:5.1f} {statistics.median(probes):5.1f}", flush=True)


if __name__ == "__main__":
    main()

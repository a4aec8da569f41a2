"""Long prompts on a CPU: are they served, does /livez stay 200 all the while, and how much memory does the engine take?

    python benchmarks/long_prompts.py [--tokens 16000 65000] [--threads 4] [--out FILE.json]

The model has the shape of Qwen2.5-0.5B and random weights. 65,000 tokens take about half an hour of four quiet AVX2 cores: attention
alone is 2 * 2 * 65,000² / 2 * 14 heads * 64 * 24 layers = 180 TFLOP.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import threading
import time
import urllib.error
import urllib.request
from datetime import date
from pathlib import Path
from typing import Any

import psutil
from served import served

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "tie_word_embeddings": True, "hidden_act": "silu", "torch_dtype": "float32",
}  # fmt: skip
NEW_TOKENS = 8
POLL_S = 0.5


class Watch:
    """Asks /livez twice a second, and looks at the engine's memory."""

    def __init__(self, url: str, pid: int) -> None:
        self.asked = 0
        self.not_200: list[str] = []
        self.peak = 0
        self._url, self._process = url, psutil.Process(pid)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(POLL_S):
            self.asked += 1
            try:
                urllib.request.urlopen(self._url + "/livez", timeout=5).read()
            except (urllib.error.URLError, TimeoutError) as error:
                self.not_200.append(repr(error))
            engines = [one for one in self._process.children(recursive=True) if "banyan_runtime.server.engine_process" in one.cmdline()]
            self.peak = max(self.peak, sum(one.memory_info().rss for one in engines))


def ask(url: str, pid: int, tokens: int) -> dict[str, Any]:
    body = {
        "input_ids": [(i * 7919) % 150_000 for i in range(tokens)],
        "sampling_params": {"max_new_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True},
    }
    watch, began = Watch(url, pid), time.monotonic()
    request = urllib.request.Request(url + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    answer = json.load(urllib.request.urlopen(request, timeout=4 * 3600))
    seconds = time.monotonic() - began
    watch.end()
    assert answer["meta_info"]["completion_tokens"] == NEW_TOKENS
    return {
        "prompt_tokens": tokens,
        "cached_tokens": answer["meta_info"]["cached_tokens"],
        "seconds": round(seconds, 1),
        "livez_asked": watch.asked,
        "livez_not_200": watch.not_200,
        "engine_peak_gib": round(watch.peak / 2**30, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16_000, 65_000])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        pool = str(max(options.tokens) + 5000)
        with served(Path(folder), "--load-format", "dummy", "--skip-tokenizer-init", "--max-total-tokens", pool) as (process, url):
            rounds = []
            for tokens in options.tokens:
                rounds.append(ask(url, process.pid, tokens))
                print(rounds[-1], flush=True)
    if options.out:
        machine = f"{platform.machine()}, {options.threads} threads"
        options.out.write_text(json.dumps({"date": str(date.today()), "machine": machine, "rounds": rounds}, indent=1) + "\n")


if __name__ == "__main__":
    main()

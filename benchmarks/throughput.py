"""Output tokens per second of the server at 1 and 16 concurrent requests, beside transformers' `generate` (batched).

    python benchmarks/throughput.py [--model catalog://smollm2-135m] [--dtype bfloat16] [--rounds 3] [--out FILE.json]

Both sides run in one session and take turns (A B A B …), never at the same time: real chat prompts, greedy, a fixed number of
new tokens (EOS ignored), the same dtype and threads. The server is measured from outside, over HTTP, streamed; transformers in a
process of its own, from the call of `generate` to its return, prompts left-padded into one batch. Medians of the rounds.
The limit by arithmetic is for one request: every decode step must read all weights once, so at most bandwidth / weight bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import aiohttp
from served import served

from banyan_runtime.hub import resolve

TOPICS = [
    "the sea",
    "bread",
    "trains",
    "the moon",
    "bees",
    "chess",
    "rain",
    "paper",
    "salt",
    "clocks",
    "bridges",
    "maps",
    "tea",
    "glass",
    "owls",
    "ice",
]
PROMPTS = [f"Write a paragraph about {topic}, its history and how people use it today." for topic in TOPICS]

PEER = """
import json, sys, time, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
path, dtype = sys.argv[1:3]
torch.set_num_threads(int(sys.argv[3]))
tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
print("ready", flush=True)
for line in sys.stdin:
    job = json.loads(line)
    chats = [[{"role": "user", "content": prompt}] for prompt in job["prompts"]]
    batch = tokenizer.apply_chat_template(chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True)
    began = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(**batch, max_new_tokens=job["tokens"], min_new_tokens=job["tokens"], do_sample=False)
    seconds = time.perf_counter() - began
    produced = (out.shape[1] - batch["input_ids"].shape[1]) * len(chats)
    print(json.dumps({"seconds": seconds, "tokens": produced}), flush=True)
"""

PROBE = """
import time, torch
torch.set_num_threads(int(__import__("sys").argv[1]))
x = torch.ones(1 << 28)
best = 0.0
for _ in range(4):
    began = time.perf_counter(); x.sum(); best = max(best, x.numel() * 4 / (time.perf_counter() - began))
print(best)
"""


async def ask(session: aiohttp.ClientSession, url: str, prompt: str, tokens: int) -> tuple[int, float]:
    """One streamed chat completion; returns tokens and seconds to the first one."""
    body = {
        "model": "m", "messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": tokens, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    began, first, used = time.perf_counter(), 0.0, 0
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                if not first and chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
                    first = time.perf_counter() - began
                if chunk.get("usage"):
                    used = chunk["usage"]["completion_tokens"]
    return used, first


async def serve_round(url: str, concurrent: int, tokens: int) -> dict[str, float]:
    """`concurrent` requests at once, all prompts of the round new to nobody: the cache is flushed before."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        await (await session.post(f"{url}/flush_cache")).read()
        began = time.perf_counter()
        done = await asyncio.gather(*(ask(session, url, prompt, tokens) for prompt in PROMPTS[:concurrent]))
        seconds = time.perf_counter() - began
    return {"seconds": seconds, "tokens": sum(used for used, _ in done), "ttft": statistics.median(first for _, first in done)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="catalog://smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / f"{date.today()}-throughput.json")
    args = parser.parse_args()
    path = resolve(args.model)
    threads = len(os.sched_getaffinity(0))
    rounds: dict[str, list[dict[str, float]]] = {}
    flags = ("--dtype", args.dtype, "--context-length", "2048", "--max-running-requests", "32")
    command = [sys.executable, "-c", PEER, str(path), args.dtype, str(threads)]
    with (
        served(path, *flags) as (_, url),
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer,
    ):
        assert peer.stdin is not None
        assert peer.stdout is not None
        assert peer.stdout.readline().strip() == "ready"
        for number in range(args.rounds + 1):  # the first is the warm-up of every batch size on both sides
            probe = float(subprocess.run([sys.executable, "-c", PROBE, str(threads)], capture_output=True, text=True, check=True).stdout)
            for concurrent in (1, 16):
                ours = asyncio.run(serve_round(url, concurrent, args.tokens))
                peer.stdin.write(json.dumps({"prompts": PROMPTS[:concurrent], "tokens": args.tokens}) + "\n")
                peer.stdin.flush()
                theirs = json.loads(peer.stdout.readline())
                if number:
                    rounds.setdefault(f"banyan {concurrent}", []).append(ours)
                    rounds.setdefault(f"transformers {concurrent}", []).append(theirs)
                    rounds.setdefault("probe", []).append({"bandwidth": probe})
                print(
                    f"round {number or 'warm-up'}, {concurrent:>2} concurrent: banyan {ours['tokens'] / ours['seconds']:7.1f} tok/s "
                    f"(ttft {1000 * ours['ttft']:.0f} ms), transformers {theirs['tokens'] / theirs['seconds']:7.1f} tok/s", flush=True,
                )  # fmt: skip

    import torch
    import transformers

    weights = sum(file.stat().st_size for file in path.glob("*.safetensors")) * (2 if args.dtype == "float32" else 1)
    bandwidth = statistics.median(entry["bandwidth"] for entry in rounds["probe"])
    rate = {name: statistics.median(r["tokens"] / r["seconds"] for r in runs) for name, runs in rounds.items() if name != "probe"}
    result: dict[str, Any] = {
        "date": str(date.today()), "machine": f"{platform.machine()}, {threads} cores", "model": args.model, "dtype": args.dtype,
        "new_tokens": args.tokens, "rounds": args.rounds, "torch": torch.__version__, "transformers": transformers.__version__,
        "tokens_per_second": {name: round(value, 1) for name, value in rate.items()},
        "ratio": {str(n): round(rate[f"banyan {n}"] / rate[f"transformers {n}"], 2) for n in (1, 16)},
        "ttft_ms": {str(n): round(1000 * statistics.median(r["ttft"] for r in rounds[f"banyan {n}"])) for n in (1, 16)},
        "read_bandwidth_gb_s": round(bandwidth / 1e9, 1), "limit_1_request_tok_s": round(bandwidth / weights, 1), "raw": rounds,
    }  # fmt: skip
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "raw"}, indent=1))


if __name__ == "__main__":
    main()

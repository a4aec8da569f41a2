"""Does memory stay where it is? Many requests of mixed lengths through a real server; the memory of every process is sampled.

    python benchmarks/soak.py [--requests 100000] [--model examples/models/tiny-chat] [--most-growth 2] [--out FILE.json]

Prompts and outputs have lognormal lengths; some share a prefix, some are streamed, sampled, penalised, scored, of several
choices, or left by their client half-way. The first tenth warms up. Afterwards the median of the last tenth of the samples may
be at most `--most-growth` percent above the median of the first, summed over the processes, or the exit code is 1. The samples
go into FILE.json and, as a picture, beside it into FILE.svg.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import re
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any, Final

import aiohttp
import psutil
from served import served

ROOT: Final = Path(__file__).parent.parent
CONCURRENT: Final = 32
SAMPLE_EVERY: Final = 500  # requests
WARM_UP: Final = 0.1  # part of the requests
WORDS: Final = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "you",
    "that",
    "it",
    "he",
    "was",
    "for",
    "on",
    "are",
    "as",
    "with",
    "his",
    "they",
    "at",
    "be",
    "this",
    "have",
    "from",
    "or",
    "one",
    "had",
    "by",
    "word",
    "but",
]


def body_of(dice: random.Random, number: int) -> tuple[str, dict[str, Any], bool]:
    """(path, body, whether the client leaves half-way) of one request."""
    length = min(900, max(1, int(dice.lognormvariate(3.0, 1.3))))
    output = min(400, max(1, int(dice.lognormvariate(1.3, 1.2))))
    shared = f"Story {dice.randrange(20)}. " if dice.random() < 0.5 else f"{number} "
    text = shared + " ".join(dice.choice(WORDS) for _ in range(length))
    body: dict[str, Any] = {"stream": dice.random() < 0.5}
    match dice.randrange(4):
        case 0 | 1:
            path = "/v1/chat/completions"
            body |= {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": output}
        case 2:
            path = "/v1/completions"
            body |= {"model": "m", "prompt": text, "max_tokens": output}
        case _:
            ids = [dice.randrange(3, 800) for _ in range(length)]
            return "/generate", body | {"input_ids": ids, "sampling_params": {"max_new_tokens": output}}, False
    if dice.random() < 0.3:
        body |= {"temperature": 0.8, "top_p": 0.9, "seed": number}
    if dice.random() < 0.2:
        body |= {"repetition_penalty": 1.1, "presence_penalty": 0.5}
    if dice.random() < 0.1:
        body |= {"n": 3}
    if dice.random() < 0.1:
        body |= {"logprobs": True, "top_logprobs": 3} if path.endswith("chat/completions") else {"logprobs": 3}
    if dice.random() < 0.1:
        body |= {"stop": ["e t", "qu"]}
    return path, body, dice.random() < 0.05


async def send(session: aiohttp.ClientSession, url: str, request: tuple[str, dict[str, Any], bool]) -> None:
    path, body, leaves = request
    async with session.post(url + path, json=body) as response:
        if response.status != 200:
            raise SystemExit(f"{path} answered {response.status}: {(await response.text())[:500]}\n{json.dumps(body)[:500]}")
        if leaves:
            await response.content.readany()
        else:
            await response.read()


def resident(server: psutil.Process) -> dict[str, int]:
    """Bytes of memory that each process of the server has made, by name; what forks share counts in parts.

    Pages of files (libraries) are left out: how they are counted depends on what else runs on the machine.
    """
    names: dict[str, int] = {}
    for process in [server, *server.children(recursive=True)]:
        try:
            command, rollup = process.cmdline(), Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            continue
        module = next((word.rpartition("banyan_runtime.")[2] for word in command if word.startswith("banyan_runtime.")), "front")
        used = re.search(r"^Pss_Anon:\s+(\d+) kB", rollup, re.MULTILINE)
        names[module] = names.get(module, 0) + (int(used[1]) * 1024 if used else 0)
    return names


async def drive(url: str, server: psutil.Process, requests: int, seed: int) -> list[dict[str, Any]]:
    dice = random.Random(seed)
    numbers = iter(range(requests))
    samples: list[dict[str, Any]] = []
    began = time.monotonic()

    async def client(session: aiohttp.ClientSession) -> None:
        for number in numbers:
            await send(session, url, body_of(dice, number))
            if number % SAMPLE_EVERY == 0:
                samples.append({"requests": number, "seconds": round(time.monotonic() - began, 1), **resident(server)})
                if number % (SAMPLE_EVERY * 10) == 0:
                    print(f"{number:>7} requests, {time.monotonic() - began:6.0f} s, {_mib(samples[-1]):7.1f} MiB", flush=True)

    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(client(session) for _ in range(CONCURRENT)))
    return samples


def processes(samples: Sequence[dict[str, Any]]) -> list[str]:
    return [name for name in samples[-1] if name not in ("requests", "seconds")]


def _mib(sample: dict[str, Any]) -> float:
    return sum(value for name, value in sample.items() if name not in ("requests", "seconds")) / 2**20


def growth(samples: Sequence[dict[str, Any]], requests: int) -> float:
    """Percent by which the last tenth of the samples after the warm-up lies above the first."""
    after = [_mib(sample) for sample in samples if sample["requests"] >= WARM_UP * requests]
    tenth = max(1, len(after) // 10)
    first, last = statistics.median(after[:tenth]), statistics.median(after[-tenth:])
    return 100 * (last - first) / first


def picture(samples: Sequence[dict[str, Any]], title: str) -> str:
    """Memory by process over the requests, as SVG."""
    width, height, left, bottom = 760, 360, 60, 40
    names = processes(samples)
    most = max(max(sample.get(name, 0) for name in names) for sample in samples) * 1.1
    last = max(1, samples[-1]["requests"])
    colours = ["#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#8c564b"]
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">']
    parts.append(f'<rect width="{width}" height="{height}" fill="white"/><text x="{left}" y="16">{title}</text>')
    for step in range(5):
        y = height - bottom - (height - bottom - 30) * step / 4
        parts.append(f'<line x1="{left}" x2="{width - 10}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{most * step / 4 / 2**20:.0f}</text>')
    parts.append(f'<text x="{width - 10}" y="{height - 10}" text-anchor="end">{last} requests; MiB by process</text>')
    for index, name in enumerate(names):
        points = " ".join(
            f"{left + (width - left - 10) * sample['requests'] / last:.1f},"
            f"{height - bottom - (height - bottom - 30) * sample.get(name, 0) / most:.1f}"
            for sample in sorted(samples, key=lambda sample: sample["requests"])
        )
        colour = colours[index % len(colours)]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts.append(f'<text x="{left + 10 + 150 * index}" y="{height - 10}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--model", type=Path, default=ROOT / "examples/models/tiny-chat")
    parser.add_argument("--most-growth", type=float, default=2.0, help="percent")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / f"{date.today()}-soak.json")
    args = parser.parse_args()
    with served(args.model, "--max-total-tokens", "4096", "--log-level-http", "warning") as (server, url):
        samples = asyncio.run(drive(url, psutil.Process(server.pid), args.requests, args.seed))
    grown = growth(samples, args.requests)
    memory = {name: round(samples[-1][name] / 2**20, 1) for name in processes(samples)}
    result = {
        "date": str(date.today()), "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores", "model": args.model.name,
        "requests": args.requests, "seconds": samples[-1]["seconds"], "growth_percent": round(grown, 2), "mib_at_the_end": memory,
        "samples": samples,
    }  # fmt: skip
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result) + "\n")
    title = f"{args.requests} requests of mixed lengths, {args.model.name}: {grown:+.2f} % after the warm-up"
    args.out.with_suffix(".svg").write_text(picture(samples, title))
    print(json.dumps({key: value for key, value in result.items() if key != "samples"}, indent=1))
    sys.exit(grown > args.most_growth)


if __name__ == "__main__":
    main()

"""Requests a second of short chat requests: the same lines as a batch of the command, as a batch of the server (/v1/batches), and sent
by a plain asyncio client, in turn, against one server.

    python benchmarks/batch_throughput.py [--lines 50000] [--rounds 1] [--concurrency 64] [--model DIR] [--output FILE.json]

Each way is measured from its start to its end: reading, checking, sending, publishing. The prompt cache is flushed before each.
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
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import openai
import torch
import uvloop

sys.path.insert(0, str(Path(__file__).parent))
from served import served

ROOT = Path(__file__).resolve().parents[1]
ENDPOINT = "/v1/chat/completions"


def body(number: int) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": f"Say {number}."}], "max_tokens": 2, "temperature": 0}


def write_lines(path: Path, count: int) -> None:
    with path.open("w") as file:
        for number in range(count):
            file.write(json.dumps({"custom_id": f"request-{number}", "method": "POST", "url": ENDPOINT, "body": body(number)}) + "\n")


async def plain(url: str, count: int, concurrency: int) -> None:
    """The client that one would write: a pool of connections, so many requests at once, answers kept in a list."""
    answers: list[dict[str, Any]] = []
    numbers = iter(range(count))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def work() -> None:
            for number in numbers:
                async with session.post(url + ENDPOINT, json=body(number)) as response:
                    assert response.status == 200, await response.text()
                    answers.append(await response.json())

        await asyncio.gather(*(work() for _ in range(concurrency)))
    assert len(answers) == count


def command(url: str, lines: Path, count: int, concurrency: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--input", str(lines), "--output", folder + "/", "--server", url, "--max-concurrency", str(concurrency)]
        subprocess.run([sys.executable, "-m", "banyan_runtime", "batch", *arguments], check=True, stderr=subprocess.DEVNULL)
        assert Path(folder, "output.jsonl").read_bytes().count(b"\n") == count


def in_server(url: str, lines: Path, count: int) -> None:
    client = openai.OpenAI(base_url=url + "/v1", api_key="none")
    with lines.open("rb") as file:
        uploaded = client.files.create(file=file, purpose="batch")
    batch = client.batches.create(input_file_id=uploaded.id, endpoint=ENDPOINT, completion_window="24h")
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(0.5)
        batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed", batch
    assert batch.request_counts is not None
    assert batch.request_counts.completed == count, batch.request_counts
    assert batch.output_file_id is not None
    assert client.files.content(batch.output_file_id).content.count(b"\n") == count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--model", type=Path, default=ROOT / "examples/models/tiny-chat")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = {"plain client": [], "command": [], "server": []}
    with tempfile.TemporaryDirectory() as folder, served(arguments.model, "--file-storage-path", folder + "/storage") as (_, url):
        lines = Path(folder, "lines.jsonl")
        write_lines(lines, arguments.lines)
        ways: dict[str, Callable[[], None]] = {
            "plain client": lambda: uvloop.run(plain(url, arguments.lines, arguments.concurrency)),
            "command": lambda: command(url, lines, arguments.lines, arguments.concurrency),
            "server": lambda: in_server(url, lines, arguments.lines),
        }
        uvloop.run(plain(url, 500, arguments.concurrency))  # what is slow the first time
        for _ in range(arguments.rounds):
            for name, way in ways.items():
                urllib.request.urlopen(urllib.request.Request(url + "/flush_cache", method="POST")).close()
                began = time.monotonic()
                way()
                seconds[name].append(time.monotonic() - began)
                print(f"{name}: {arguments.lines / seconds[name][-1]:.0f} requests/s", flush=True)
    speed = {name: round(arguments.lines / statistics.median(values), 1) for name, values in seconds.items()}
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "lines": arguments.lines,
        "rounds": arguments.rounds,
        "concurrency": arguments.concurrency,
        "requests_per_second": speed,
        "ratio_to_plain_client": {name: round(value / speed["plain client"], 3) for name, value in speed.items()},
        "load_average": os.getloadavg(),
        "machine": f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}",
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "aiohttp": aiohttp.__version__},
    }
    print(json.dumps(result, indent=2))
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""What online requests feel of a batch behind them: TTFT and ITL with and without 5,000 lines of background load.

    python benchmarks/batch_behind_online.py [--models smollm2-135m tiny-chat] [--rounds 3] [--out FILE.json]

One server; phases without and with the batch take turns (A B A B …) in one run. The batch is 5,000 chat completions of priority
-10, sent by a plain HTTP client that keeps 256 in flight, begun anew in each phase and cancelled at its end by closing all connections;
while that happens one more online request is timed. Online are streamed chats, first one every 2 s, then 4 clients at a time.
TTFT is from sending a request to its first token, ITL between two events with content. The machine may be shared: compare
ratios. The batch's tokens per second are what the server counted, less those of online requests; `alone` is without any of these.
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
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import aiohttp
from served import served

from banyan_runtime.hub import resolve

LINES: Final = 5_000
IN_FLIGHT: Final = 256
PRIORITY: Final = -10
LINE_TOKENS: Final = 64
ONLINE_TOKENS: Final = 32
EVERY_S: Final = 2.0
CLIENTS: Final = 4
QUIET_S: Final = 12.0  # before the batch counts as alone: for so long the server expects the next online request, and more
ALONE_S: Final = 8.0
TINY_CHAT: Final = Path(__file__).parent.parent / "examples" / "models" / "tiny-chat"
WORDS: Final = (
    "sea",
    "bread",
    "train",
    "moon",
    "bee",
    "chess",
    "rain",
    "paper",
    "salt",
    "clock",
    "bridge",
    "map",
    "tea",
    "glass",
    "owl",
    "ice",
)


def chat(number: int, tokens: int, **more: object) -> dict[str, object]:
    """A body whose prompt no other one shares from its first word on."""
    drawn = random.Random(number)
    text = f"{number}: " + " ".join(drawn.choice(WORDS) for _ in range(24)) + ". Write a paragraph about these things."
    messages = [{"role": "user", "content": text}]
    return {"model": "m", "messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}


@dataclass
class Felt:
    """Seconds."""

    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return len(self.ttft) * ONLINE_TOKENS

    def summary(self) -> dict[str, float]:
        both = (("ttft", self.ttft), ("itl", self.itl))
        told = {f"{name}_{what}_ms": round(1000 * at(values), 1) for name, values in both for what, at in (("p50", p50), ("p99", p99))}
        return {**told, "requests": len(self.ttft)}


def p50(values: list[float]) -> float:
    return statistics.median(values)


def p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1) + 0.5)]


class Online:
    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url, self._number = session, url, 1_000_000

    async def ask(self, felt: Felt) -> None:
        self._number += 1
        body = chat(self._number, ONLINE_TOKENS, stream=True)
        last = began = time.perf_counter()
        async with self._session.post(f"{self._url}/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                if not line.startswith(b"data: {") or not json.loads(line[6:])["choices"][0]["delta"].get("content"):
                    continue
                now = time.perf_counter()
                (felt.ttft if last == began else felt.itl).append(now - last)
                last = now

    async def generated(self) -> float:
        """Tokens that the server has generated so far, for whomever."""
        async with self._session.get(f"{self._url}/metrics") as response:
            found = re.search(r"^banyan_generation_tokens_total\{[^}]*\} (\S+)$", await response.text(), re.MULTILINE)
        assert found is not None
        return float(found[1])

    async def now_and_then(self, felt: Felt, seconds: float) -> None:
        """One request every EVERY_S, whether or not the one before has ended."""
        count = int(seconds / EVERY_S)
        await asyncio.gather(*(self._later(number * EVERY_S, felt) for number in range(count)))

    async def _later(self, seconds: float, felt: Felt) -> None:
        await asyncio.sleep(seconds)
        await self.ask(felt)

    async def several(self, felt: Felt, seconds: float) -> None:
        """CLIENTS at a time, each with the next request when its last one has ended."""
        until = time.perf_counter() + seconds
        await asyncio.gather(*(self._client(felt, until) for _ in range(CLIENTS)))

    async def _client(self, felt: Felt, until: float) -> None:
        while time.perf_counter() < until:
            await self.ask(felt)


class Batch:
    """LINES requests, IN_FLIGHT of them at a time, until it is cancelled."""

    def __init__(self, url: str, first: int) -> None:
        self.done = 0
        self.busy = 0  # answers of 429
        self._url = url
        self._numbers = iter(range(first, first + LINES))
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None), json_serialize=json.dumps
        )
        self._senders = [asyncio.create_task(self._send()) for _ in range(IN_FLIGHT)]

    async def _send(self) -> None:
        for number in self._numbers:
            while True:
                async with self._session.post(
                    f"{self._url}/v1/chat/completions", json=chat(number, LINE_TOKENS, priority=PRIORITY)
                ) as answer:
                    await answer.read()
                if answer.status != 429:
                    break
                self.busy += 1
                await asyncio.sleep(1)
            answer.raise_for_status()
            self.done += 1

    async def cancel(self) -> None:
        assert self.done < LINES, "the batch was too short"
        for sender in self._senders:
            if sender.done():
                sender.result()  # what went wrong
            sender.cancel()
        for sender in self._senders:
            with suppress(asyncio.CancelledError):
                await sender
        await self._session.close()


@dataclass
class Rounds:
    """By kind of online load, all rounds together: without and with the batch."""

    without: dict[str, Felt] = field(default_factory=dict)
    behind: dict[str, Felt] = field(default_factory=dict)
    tokens_per_second: dict[str, list[float]] = field(default_factory=dict)
    after_cancel_ttft_ms: list[float] = field(default_factory=list)
    line_429: int = 0

    def speed(self, name: str, tokens: float, seconds: float) -> None:
        self.tokens_per_second.setdefault(name, []).append(tokens / seconds)


async def measure(url: str, rounds: int, seconds: float) -> Rounds:
    told = Rounds()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        online = Online(session, url)
        loads = {"one every 2 s": online.now_and_then, "4 concurrent": online.several}
        await online.several(Felt(), 2 * EVERY_S)  # the first requests of all are slower
        for number in range(rounds):
            for name, load in loads.items():
                await load(told.without.setdefault(name, Felt()), seconds)
            batch = Batch(url, number * LINES)
            await asyncio.sleep(QUIET_S)
            before, began = await online.generated(), time.perf_counter()
            await asyncio.sleep(ALONE_S)
            told.speed("alone", await online.generated() - before, time.perf_counter() - began)
            for name, load in loads.items():
                felt = told.behind.setdefault(name, Felt())
                own, before, began = felt.tokens, await online.generated(), time.perf_counter()
                await load(felt, seconds)
                told.speed(name, await online.generated() - before - (felt.tokens - own), time.perf_counter() - began)
            felt = Felt()
            await asyncio.gather(batch.cancel(), online.ask(felt))
            told.after_cancel_ttft_ms += [round(1000 * felt.ttft[0], 1)]
            told.line_429 += batch.busy
            await asyncio.sleep(1)
            print(f"round {number + 1}: {summary(told)}", flush=True)
    return told


def summary(told: Rounds) -> dict[str, Any]:
    loads = {}
    for name, felt in told.without.items():
        without, behind = felt.summary(), told.behind[name].summary()
        ratios = {key: round(behind[key] / without[key], 2) for key in without if key.endswith("_ms")}
        loads[name] = {"without": without, "behind": behind, "ratio": ratios}
    return {
        "online": loads,
        "batch_tokens_per_second": {name: round(statistics.median(values), 1) for name, values in told.tokens_per_second.items()},
        "ttft_while_the_batch_is_cancelled_ms": told.after_cancel_ttft_ms,
        "lines_answered_429": told.line_429,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["tiny-chat", "smollm2-135m"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each kind of online load in each phase")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    results, load_before = {}, os.getloadavg()
    for name in options.models:
        model = TINY_CHAT if name == "tiny-chat" else resolve(f"catalog://{name}")
        with served(model) as (_, url):
            results[name] = summary(asyncio.run(measure(url, options.rounds, options.seconds)))
            print(name, json.dumps(results[name], indent=1), flush=True)
    if options.out:
        about = {
            "date": str(date.today()),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores shared with others, {options.threads} threads",
            "load_average": {"before": load_before, "after": os.getloadavg()},
            "versions": {"python": platform.python_version(), "torch": version("torch"), "banyan-runtime": version("banyan-runtime")},
            "rounds": options.rounds,
            "seconds": options.seconds,
            "batch": {"lines": LINES, "in_flight": IN_FLIGHT, "priority": PRIORITY, "tokens_a_line": LINE_TOKENS},
        }
        options.out.write_text(json.dumps({**about, "models": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()

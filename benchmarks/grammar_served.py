"""What streams feel of grammars: without any, with a JSON schema each, and without any beside somebody whose grammars are all new.

    python benchmarks/grammar_served.py [--model smollm2-135m] [--rounds 5] [--out FILE.json]

The three phases take turns (A B C A B C …) in one run, at 1 and at 16 streams. Each stream has a prompt of its
own and ends after TOKENS tokens: the schema asks for an array too long to end before that. The third phase has one more client, which sends
a schema that nobody has sent before every 0.2 s, and every tenth time one that cannot be compiled. ITL is the time between two events
with content, medians over all streams of a phase, then over rounds. The machine may be shared: compare ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import statistics
import time
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import aiohttp
from served import served

from banyan_runtime.hub import resolve

TOKENS: Final = 64
STREAMS: Final = (1, 16)
EVERY_S: Final = 0.2
PERSON: Final = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 3},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PEOPLE: Final = {"type": "array", "items": PERSON, "minItems": 50}
PHASES: Final = ("none", "schema", "none beside new grammars")


@dataclass
class Felt:
    """Of one phase at one number of streams."""

    itl_ms: list[float] = field(default_factory=list)  # the median of each round
    itl_p99_ms: list[float] = field(default_factory=list)
    tokens_per_second: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        return {name: round(statistics.median(values), 2) for name, values in vars(self).items()}


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "people", "schema": schema}}


class Streams:
    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url, self._number = session, url, 0

    async def phase(self, streams: int, phase: str, felt: Felt) -> None:
        noise = asyncio.ensure_future(self._new_grammars()) if phase == PHASES[2] else None
        began = time.perf_counter()
        gaps = await asyncio.gather(*(self._stream(phase == PHASES[1]) for _ in range(streams)))
        seconds = time.perf_counter() - began
        if noise is not None:
            noise.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await noise
        every = sorted(1000 * gap for one in gaps for gap in one)
        felt.itl_ms.append(statistics.median(every))
        felt.itl_p99_ms.append(every[int(0.99 * (len(every) - 1))])
        felt.tokens_per_second.append(streams * TOKENS / seconds)

    async def _stream(self, held: bool) -> list[float]:
        self._number += 1
        content = f"{self._number}: make up fifty people, as a JSON array of objects with name, age and tags."
        body = {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": TOKENS, "temperature": 0, "stream": True}
        body |= {"response_format": schema_format(PEOPLE)} if held else {"ignore_eos": True}
        gaps, last = [], 0.0
        async with self._session.post(f"{self._url}/v1/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                    now = time.perf_counter()
                    gaps += [now - last] if last else []
                    last = now
        assert len(gaps) > TOKENS // 2, "it ended early"
        return gaps

    async def _new_grammars(self) -> None:
        while True:
            self._number += 1
            schema = {"type": "object", "properties": {f"field{self._number}": PEOPLE}, "required": [f"field{self._number}"]}
            if self._number % 10 == 0:
                schema = {"type": "array", "minItems": 5, "maxItems": 2}
            body = {"model": "m", "prompt": "x", "max_tokens": 1, "json_schema": json.dumps(schema)}
            async with self._session.post(f"{self._url}/v1/completions", json=body) as response:
                assert response.status in (200, 400), await response.text()
            await asyncio.sleep(EVERY_S)


async def measure(url: str, rounds: int) -> dict[str, Any]:
    felt = {streams: {phase: Felt() for phase in PHASES} for streams in STREAMS}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0)) as session:
        asker = Streams(session, url)
        for phase in PHASES:
            await asker.phase(4, phase, Felt())  # the first of all are slower
        for _ in range(rounds):
            for streams in STREAMS:
                for phase in PHASES:
                    await asker.phase(streams, phase, felt[streams][phase])
    told: dict[str, Any] = {}
    for streams, phases in felt.items():
        told[f"{streams} streams"] = found = {phase: one.summary() for phase, one in phases.items()}
        bare = found[PHASES[0]]
        found["ratios of ITL to none"] = {phase: round(found[phase]["itl_ms"] / bare["itl_ms"], 2) for phase in PHASES[1:]}
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result: dict[str, Any] = {
        "date": str(date.today()),
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "llguidance")},
        "model": arguments.model,
        "rounds": arguments.rounds,
        "tokens": TOKENS,
    }
    folder = resolve(f"catalog://{arguments.model}")
    with served(folder) as (_, url):
        result["llguidance"] = asyncio.run(measure(url, arguments.rounds))
    result["load"] = [round(one, 1) for one in os.getloadavg()]
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()

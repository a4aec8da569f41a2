"""What drafts from the text itself bring (`--speculative-algorithm NGRAM`): tokens per second with and without, and tokens per request
and step, for texts that repeat what was said and for free ones.

    python benchmarks/drafts.py [--model catalog://smollm2-135m] [--concurrent 1 16] [--rounds 3] [--out FILE.json] [-- SERVER FLAGS]

Two servers, with the option and without, take turns (A B A B …), never at the same time: real chats, the cache flushed before each
turn. Medians of the rounds, quoted as ratios: of tokens per second from first to last, of the time from first tokens to ends, which
prompts have no part in, and of the engine's CPU seconds, which tell the most where others use the machine too (pin it to one core:
`taskset -c 0`). Greedy texts of both are compared, token counts always. Free texts at temperature 0.8 are
the case to lose in: nothing there repeats.
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
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import aiohttp
from served import served

from banyan_runtime.hub import resolve

TOPICS = ("the sea", "bread", "trains", "the moon", "bees", "chess", "rain", "paper", "salt", "clocks", "bridges", "maps", "tea", "owls")
NAMES = ("total", "balance", "amount", "credit", "saldo", "funds", "money", "deposit")
PROGRAM = """import csv
import sys


class Account:
    def __init__(self, owner, {old}=0):
        self.owner = owner
        self.{old} = {old}

    def pay_in(self, value):
        if value <= 0:
            raise ValueError("value must be positive")
        self.{old} = self.{old} + value
        return self.{old}

    def withdraw(self, value):
        if value > self.{old}:
            raise ValueError("not enough")
        self.{old} = self.{old} - value
        return self.{old}


def load(path):
    accounts = []
    with open(path) as file:
        for row in csv.DictReader(file):
            accounts.append(Account(row["owner"], float(row["{old}"])))
    return accounts


if __name__ == "__main__":
    for account in load(sys.argv[1]):
        print(account.owner, account.{old})
"""
PLACES = ("Cape Morrow", "Skerry Point", "Saint Anne's Head", "Garvan Island")


def re_emitted(number: int) -> str:
    draw = random.Random(number)
    items = [
        {"id": i, "name": draw.choice(("lamp", "chair", "table", "shelf")), "colour": draw.choice(("red", "blue", "green")),
         "price": draw.randint(5, 90), "stock": draw.randint(0, 40)} for i in range(8)
    ]  # fmt: skip
    return "Repeat this JSON list exactly, but with every price raised by 10:\n" + json.dumps(items, indent=1)


def edited(number: int) -> str:
    old = NAMES[number % len(NAMES)]
    task = f'Rename the variable "{old}" to "result{number}" in this Python file and print the whole file:'
    return f"{task}\n```python\n{PROGRAM.format(old=old)}```"


def summarised(number: int) -> str:
    year, place = 1850 + 7 * number, PLACES[number % len(PLACES)]
    return f"""Summarise the following text in a few sentences, using its own words:
The lighthouse at {place} was built in {year} by the harbour board after three ships were lost on the reef in a single winter. Its tower
is forty metres high and was made of granite that was brought from the quarries at Stonehaven by barge. The first lamp burned whale oil
and could be seen at a distance of twelve miles. In {year + 31} the lamp was replaced by one that burned paraffin under pressure, and in
{year + 63} the light became electric. The keepers lived with their families in three cottages beside the tower. They kept goats, grew
potatoes in the lee of the wall, and were visited once a fortnight by the supply boat, weather permitting. In the storm of January
{year + 82} the sea broke the windows of the lowest cottage and carried the boathouse away. Nobody was hurt, since the keepers had moved
their families into the tower the night before. The lighthouse was automated in {year + 117}. The last keeper, who had served there for
nineteen years, switched off the lamp by hand for the last time on the second of May. Today the cottages are let to visitors, and the
tower is open on Saturdays in summer."""


def free(number: int) -> str:
    return f"Write a paragraph about {TOPICS[number % len(TOPICS)]}, its history and how people use it today."


CASES: dict[str, tuple[Callable[[int], str], float]] = {  # what is asked, temperature
    "JSON repeated": (re_emitted, 0.0),
    "code edited": (edited, 0.0),
    "text summarised": (summarised, 0.0),
    "free, greedy": (free, 0.0),
    "free, sampled": (free, 0.8),
}


@dataclass(frozen=True)
class Turn:
    """One case on one server."""

    seconds: float
    tokens: int
    texts: list[str]
    drafted: float
    accepted: float
    decode_s: float  # from first tokens to ends, summed over the requests
    cpu_s: float  # of the engine

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def accept_len(self) -> float:
        """Tokens of a request in a step: each accepted draft saves one step."""
        return self.tokens / (self.tokens - self.accepted)


async def ask(session: aiohttp.ClientSession, url: str, prompt: str, temperature: float, seed: int, tokens: int) -> tuple[str, int]:
    body = {
        "model": "m", "messages": [{"role": "user", "content": prompt}], "temperature": temperature, "seed": seed, "max_tokens": tokens,
    }  # fmt: skip
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        answer = await response.json()
    return answer["choices"][0]["message"]["content"], answer["usage"]["completion_tokens"]


async def counters(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Drafts by outcome and seconds of decoding, once nothing runs any more: the engine tells them ten times a second."""
    await asyncio.sleep(0.5)
    async with session.get(f"{url}/metrics") as response:
        text = await response.text()
    found = re.findall(r'banyan_draft_tokens_total\{[^}]*outcome="(\w+)"[^}]*\} (\S+)', text)
    found += re.findall(r"banyan_(decode)_duration_seconds_sum\S* (\S+)", text)
    found += re.findall(r'banyan_process_cpu_seconds_total\{[^}]*component="(engine)"[^}]*\} (\S+)', text)
    return {name: float(value) for name, value in found}


async def turn(url: str, case: str, concurrent: int, requests: int, tokens: int) -> Turn:
    """`requests` requests, `concurrent` at a time."""
    prompt, temperature = CASES[case]
    texts, used = [""] * requests, 0
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=900)) as session:
        await (await session.post(f"{url}/flush_cache")).read()
        before = await counters(session, url)
        waiting = list(range(requests))

        async def client() -> None:
            nonlocal used
            while waiting:
                number = waiting.pop(0)
                texts[number], count = await ask(session, url, prompt(number), temperature, number, tokens)
                used += count

        began = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(concurrent)))
        seconds = time.perf_counter() - began
        after = await counters(session, url)
    accepted, refused, decode_s, cpu_s = (after[name] - before[name] for name in ("accepted", "refused", "decode", "engine"))
    return Turn(seconds, used, texts, accepted + refused, accepted, decode_s, cpu_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="catalog://smollm2-135m")
    parser.add_argument("--concurrent", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / f"{date.today()}-drafts.json")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES), metavar="CASE", help=", ".join(CASES))
    parser.add_argument("flags", nargs="*", help="of both servers")
    args = parser.parse_args()
    path = resolve(args.model)
    flags = ("--context-length", "2048", "--max-total-tokens", "32768", *args.flags)
    rows: list[dict[str, Any]] = []
    with served(path, *flags) as (_, plain), served(path, *flags, "--speculative-algorithm", "NGRAM") as (_, drafting):
        for concurrent in args.concurrent:
            for case in args.cases:
                turns: dict[str, list[Turn]] = {plain: [], drafting: []}
                for number in range(args.rounds + 1):  # the first is the warm-up of both
                    for url in turns:
                        done = asyncio.run(turn(url, case, concurrent, max(4, concurrent), args.tokens))
                        if number:
                            turns[url].append(done)
                without, with_drafts = (statistics.median(one.rate for one in turns[url]) for url in (plain, drafting))
                slow, fast = (statistics.median(one.decode_s for one in turns[url]) for url in (plain, drafting))
                cpu, less = (statistics.median(one.cpu_s for one in turns[url]) for url in (plain, drafting))
                one, other = turns[plain][0], turns[drafting][0]
                row = {
                    "case": case, "concurrent": concurrent, "ratio": round(with_drafts / without, 2), "decode_ratio": round(slow / fast, 2),
                    "cpu_ratio": round(cpu / less, 2),
                    "ratios": [round(b.rate / a.rate, 2) for a, b in zip(turns[plain], turns[drafting], strict=True)],
                    "tokens_per_request_and_step": round(other.accept_len, 2),
                    "accept_rate": round(other.accepted / other.drafted, 2) if other.drafted else None,
                    "drafted": other.drafted, "tokens": other.tokens, "same_texts": one.texts == other.texts,
                    "tokens_per_second": [round(without, 1), round(with_drafts, 1)],
                }  # fmt: skip
                rows.append(row)
                print(json.dumps(row), flush=True)
    result = {
        "date": str(date.today()), "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores", "model": args.model,
        "flags": flags, "rounds": args.rounds, "max_tokens": args.tokens, "load_average": os.getloadavg(), "rows": rows,
    }  # fmt: skip
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

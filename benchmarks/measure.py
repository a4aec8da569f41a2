"""Measures any server of OpenAI's completions API from outside: throughput, times to the first and between tokens, cache hits, errors.

    python benchmarks/measure.py bs1 conc16 prefix --url http://127.0.0.1:30000 --model m [--seed 0] [--out FILE.json]

Prompts are token ids where the server takes them, else words. `--list` names the cases. The CPU seconds of this client stand in the
result: give it a core that the server does not use.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any, Final

import uvloop
from load.cases import CASES, UnknownCase, plans
from load.client import Failed, Server
from load.plan import Plan
from load.play import play, takes_ids
from load.summary import Percentiles, Summary

NOTHING: Final = Percentiles(math.nan, math.nan, math.nan)


def table(summaries: dict[str, Summary]) -> str:
    """A line a plan; times in milliseconds."""
    head = (
        f"{'case':16} {'requests':>8} {'errors':>6} {'wall s':>8} {'out tok/s':>9} {'TTFT p50':>9} {'p99':>7} {'TPOT p50':>9} "
        f"{'ITL p50':>8} {'p99':>7} {'E2E p50':>8} {'p99':>7} {'cached':>6} {'client CPU s':>12}"
    )
    lines = [head]
    for name, one in summaries.items():
        ttft, tpot, itl, e2e = (times or NOTHING for times in (one.ttft_s, one.tpot_s, one.itl_s, one.e2e_s))
        cached = "" if one.cache_hit_rate is None else f"{one.cache_hit_rate:.0%}"
        lines.append(
            f"{name:16} {one.requests:8} {sum(one.errors.values()):6} {one.wall_s:8.2f} {one.output_tokens_per_s:9.1f} "
            f"{_ms(ttft.p50):>9} {_ms(ttft.p99):>7} {_ms(tpot.p50):>9} {_ms(itl.p50):>8} "
            f"{_ms(itl.p99):>7} {_ms(e2e.p50):>8} {_ms(e2e.p99):>7} {cached:>6} {one.client_cpu_s:12.2f}"
        )
        lines += [f"  {count} times: {error}" for error, count in one.errors.items()]
    return "\n".join(lines)


def _ms(seconds: float) -> str:
    return "" if math.isnan(seconds) else f"{1000 * seconds:.1f}"


async def measure(asked: list[Plan], server: Server, prompts: str) -> dict[str, Summary]:
    ids = prompts == "ids" or (prompts == "auto" and await takes_ids(server))
    return {plan.name: Summary.of(await play(plan, server, ids=ids)) for plan in asked}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=["bs1", "conc16"], metavar="CASE")
    parser.add_argument("--list", action="store_true", help="name the cases and end")
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="of the server, without /v1/completions")
    parser.add_argument("--model", default="m")
    parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY", ""), help="default: OPENAI_API_KEY")
    parser.add_argument("--prompts", choices=["auto", "ids", "words"], default="auto")
    parser.add_argument("--body", type=json.loads, default={"ignore_eos": True}, help="JSON that every request has beside its own")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**9, help="of the prompts; default: new ones, which no cache has")
    parser.add_argument("--out", type=Path, help="file for the numbers, JSON")
    options = parser.parse_args()
    if options.list:
        print("\n".join(f"{case:14} {words}" for case, words in CASES.items()))
        return
    try:
        asked = [plan for case in options.cases for plan in plans(case, options.seed)]
        server = Server(options.url, options.model, api_key=options.api_key, extra=options.body)
        found = uvloop.run(measure(asked, server, options.prompts))
    except (UnknownCase, Failed, ValueError) as error:
        sys.exit(str(error))
    print(table(found))
    if options.out:
        result: dict[str, Any] = {
            "url": options.url,
            "seed": options.seed,
            "cases": {name: dataclasses.asdict(one) for name, one in found.items()},
        }
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""What the host costs around the model: the scheduler's turn, the prefix cache, a streamed token, a request, a start. One table.

    python benchmarks/host.py [--rounds 3] [--out FILE.json]

Each line is a script of its own (engine_turn.py, prefix_cache.py, front.py, front_requests.py, startup.py), here with few rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import engine_turn
import front
import front_requests
import prefix_cache
import startup
from comparison.probe import cpu_model

from banyan_runtime.hub import resolve

ROOT = Path(__file__).parents[1]


def lines(rounds: int) -> Iterator[tuple[str, float, str]]:
    """What, how much, in which unit; one after another, as they are measured."""
    for rows in (1, 64, 256):
        for overlap, asking in ((False, False), (True, False), (True, True)):
            words = f"{', one step in flight' if overlap else ''}{', half with penalties and log probabilities' if asking else ''}"
            cost = statistics.median(engine_turn.measure(rows, 200, overlap=overlap, asking=asking) for _ in range(rounds))
            yield f"scheduler turn, {rows} running{words}", cost, "us"
    for what, cost in prefix_cache.measure(1_000_000).items():
        yield f"prefix cache of 1,000,000 tokens: {what}", cost, "us"
    for streams in (16, 256):
        cost = statistics.median(front.measure(ROOT, streams, 100, 0.008) for _ in range(rounds))
        yield f"front, CPU time of a streamed token at {streams} streams", cost, "us"
    found = front_requests.median_of(rounds, 2000, 64)
    yield "front, 64 clients, an engine that answers at once", found["requests_per_s"], "requests/s"
    yield "front, CPU time of a request", found["front_us"], "us"
    yield "the processes that plan, CPU time of a request", found["prepare_us"], "us"
    for phase, seconds in startup.measure(resolve("catalog://smollm2-135m"), rounds).items():
        yield f"start of SmolLM2-135M, files cached: {phase}", seconds, "s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / f"{date.today()}-host.json")
    options = parser.parse_args()
    found, load = [], os.getloadavg()[0]
    for what, value, unit in lines(options.rounds):
        found.append({"what": what, "value": round(value, 3), "unit": unit})
        print(f"{what:92} {value:10.2f} {unit}", flush=True)
    result = {
        "date": date.today().isoformat(), "cpu": cpu_model(), "cores": os.cpu_count(), "python": sys.version.split()[0],
        "load_average": [round(load, 1), round(os.getloadavg()[0], 1)], "rounds": options.rounds, "lines": found,
    }  # fmt: skip
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

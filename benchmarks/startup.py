"""Seconds from the command to the first answer, and what each phase of the start took.

    python benchmarks/startup.py [--model catalog://smollm2-135m] [--rounds 3] [--cpus 0,1] [-- FLAGS OF SERVE]

The model's files are in the machine's cache from the second start on. Medians of the rounds behind a first one.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import time
import urllib.request
from pathlib import Path

from served import served

from banyan_runtime.hub import resolve

PHASE = re.compile(r'^banyan_startup_phase_seconds\{.*phase="(\w+)".*\} (\S+)$', re.MULTILINE)


def start(model: Path, flags: tuple[str, ...], cpus: str) -> dict[str, float]:
    """Seconds until the server is ready, seen from outside, and by phase, as it tells itself."""
    began = time.monotonic()
    with served(model, *flags, cpus=cpus) as (_, url):
        ready = time.monotonic() - began
        page = urllib.request.urlopen(f"{url}/metrics", timeout=30).read().decode()
    return {"ready": ready, **{phase: float(seconds) for phase, seconds in PHASE.findall(page)}}


def measure(model: Path, rounds: int, flags: tuple[str, ...] = (), cpus: str = "") -> dict[str, float]:
    """Medians of `rounds` starts behind one that does not count."""
    found = [start(model, flags, cpus) for _ in range(rounds + 1)][1:]
    return {phase: statistics.median(one.get(phase, 0.0) for one in found) for phase in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="catalog://smollm2-135m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cpus", default="", help="of the server, 0,1 for instance; default: all")
    parser.add_argument("flags", nargs="*", help="flags of serve, behind --")
    options = parser.parse_args()
    if others := os.sched_getaffinity(0) - {int(cpu) for cpu in options.cpus.split(",") if cpu}:
        os.sched_setaffinity(0, others)  # who looks on takes nothing away, where there is room
    for phase, seconds in measure(resolve(options.model), options.rounds, tuple(options.flags), options.cpus).items():
        print(f"{phase:12} {seconds:6.2f} s")


if __name__ == "__main__":
    main()

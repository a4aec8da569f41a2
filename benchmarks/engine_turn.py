"""Microseconds that the engine itself needs for one turn of decoding: scheduling, building the step, noting its results.

    python benchmarks/engine_turn.py [--rows 256] [--turns 400]

The runner under it does nothing, and its time is taken off. Half of the rows have penalties and want log probabilities with the
5 likeliest tokens, in the second table. Medians over the turns; the limit that we hold ourselves to is 100 µs at 256 rows.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from banyan_runtime.engine.limits import EngineLimits
from banyan_runtime.step import Handle, Step, StepResult
from banyan_runtime.wire import LogprobRequest
from tests.unit.engine.replay import Replay


class Timed:
    """Adds up what the runner under the engine takes."""

    def __init__(self, replay: Replay) -> None:
        self.seconds = 0.0
        self._launch = replay.runner.launch
        replay.runner.launch = self.launch  # type: ignore[method-assign,assignment]

    def launch(self, step: Step) -> Handle:
        start = time.perf_counter()
        handle = self._launch(step)
        self.seconds += time.perf_counter() - start
        return _TimedHandle(self, handle)


class _TimedHandle:
    def __init__(self, timed: Timed, handle: Handle) -> None:
        self._timed = timed
        self._handle = handle

    def result(self) -> StepResult:
        return self._handle.result()


def measure(rows: int, turns: int, *, overlap: bool, asking: bool) -> float:
    """Median microseconds of a turn."""
    limits = EngineLimits(context_len=4096, pool_tokens=1 << 18, max_running=rows, chunk=None, overlap=overlap, vocab_size=1000)
    replay = Replay(limits)
    for number in range(rows):
        wanted = asking and number % 2 == 1
        replay.submit(
            [number % 1000, *range(30)],
            max_new=turns + 100,
            penalty=1.1 if wanted else 1.0,
            logprobs=LogprobRequest(output_top=5) if wanted else None,
        )
    for _ in range(20):
        replay.turn()
    timed = Timed(replay)
    costs = []
    for _ in range(turns):
        timed.seconds = 0.0
        start = time.perf_counter()
        replay.engine.turn()
        costs.append(time.perf_counter() - start - timed.seconds)
    return statistics.median(costs) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--turns", type=int, default=400)
    arguments = parser.parse_args()
    print("rows   normal  overlap   normal, asking  overlap, asking   (microseconds a turn)")
    for rows in arguments.rows:
        cells = [measure(rows, arguments.turns, overlap=overlap, asking=asking) for asking in (False, True) for overlap in (False, True)]
        print(f"{rows:4} {cells[0]:8.0f} {cells[1]:8.0f} {cells[2]:16.0f} {cells[3]:16.0f}")


if __name__ == "__main__":
    main()

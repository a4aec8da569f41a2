"""Microseconds of the prefix cache when a million tokens are in it: finding a prompt, adding one, making room.

    python benchmarks/prefix_cache.py [--tokens 1000000]

The tree holds conversations of 2,048 tokens, of which the first 1,024 are one of 16 system prompts. Medians of 1,000 calls.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Final

import numpy as np

from banyan_runtime.engine.memory.prefixes import PrefixTree

SYSTEM, OWN, SYSTEMS, VOCAB = 1024, 1024, 16, 100_000
CALLS: Final = 1000


class Filled:
    """A tree with at least `tokens` tokens, and what is in it."""

    def __init__(self, tokens: int, page_size: int = 1) -> None:
        self._dice = np.random.default_rng(1)
        self.tree = PrefixTree(page_size)
        self.systems = [self._text(SYSTEM) for _ in range(SYSTEMS)]
        self.keys: list[bytes] = []
        while self.tree.evictable < tokens:
            self.keys.append(self.fresh())
            self.insert(self.keys[-1])

    def _text(self, length: int) -> bytes:
        return self._dice.integers(0, VOCAB, length, dtype=np.int32).tobytes()

    def fresh(self) -> bytes:
        """A conversation that is not there yet but for its system prompt."""
        return self.systems[self._dice.integers(SYSTEMS)] + self._text(OWN)

    def unknown(self) -> bytes:
        return self._text(SYSTEM + OWN)

    def insert(self, key: bytes) -> None:
        self.tree.insert(key, np.arange(len(key) // 4, dtype=np.int32), "")


def microseconds(call: Callable[[bytes], object], keys: list[bytes]) -> float:
    """Median of calls, one for each key."""
    costs = []
    for key in keys:
        began = time.perf_counter()
        call(key)
        costs.append(time.perf_counter() - began)
    return statistics.median(costs) * 1e6


def measure(tokens: int) -> dict[str, float]:
    """Microseconds by what is done."""
    filled = Filled(tokens)
    tree = filled.tree
    known = [filled.keys[place] for place in np.random.default_rng(2).integers(0, len(filled.keys), CALLS)]
    fresh = [filled.fresh() for _ in range(CALLS)]

    def locked(key: bytes) -> None:
        node, _ = tree.match(key, "")
        tree.lock(node)
        tree.unlock(node)

    return {
        "match, 2,048 tokens cached": microseconds(lambda key: tree.match(key, ""), known),
        "match, 1,024 of 2,048 tokens cached": microseconds(lambda key: tree.match(key, ""), fresh),
        "match, nothing cached": microseconds(lambda key: tree.match(key, ""), [filled.unknown() for _ in range(CALLS)]),
        "match, lock and unlock": microseconds(locked, known),
        "insert, 1,024 of 2,048 tokens new": microseconds(filled.insert, fresh),
        "evict 1,024 tokens": microseconds(lambda _: tree.evict(OWN), known),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    for what, cost in measure(parser.parse_args().tokens).items():
        print(f"{what:40} {cost:8.1f} us")


if __name__ == "__main__":
    main()

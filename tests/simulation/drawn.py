"""Which planted defects the gate looks for: a few, chosen by the commit's hash, so that each has its turn."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import TypeVar

from tests.support.paths import ROOT

T = TypeVar("T")


def drawn(items: Sequence[T], count: int) -> list[T]:
    """`count` of `items`, one after the other from a place that the commit decides; the first ones where there is no git."""
    try:
        told = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return list(items[:count])
    start = int(told.stdout[:8], 16) if told.returncode == 0 else 0
    return [items[(start + number) % len(items)] for number in range(min(count, len(items)))]

"""What runs the lines of a batch, as the keeper sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from banyan_runtime.batch.host.documents import Counts, Ending, Tokens
from banyan_runtime.batch.host.lifecycle import Published

Report = Callable[[Counts, Tokens], None]
"""Told whenever more lines are durable; the total does not matter."""


@dataclass(frozen=True, slots=True)
class Task:
    """One batch to run: its input's bytes, and where its results go (a prefix that ends in '/')."""

    id: str
    input: str
    output: str
    endpoint: str


class Runner(Protocol):
    """Both go on from where an earlier attempt, in this process or another, has stopped. They raise StoreError, and UserError."""

    async def work(self, task: Task, report: Report) -> None:
        """Run all lines. Cancelled, it aborts what is in flight and returns at once; what is done stays."""

    async def publish(self, task: Task, ending: Ending) -> Published:
        """Write the results. Unless `ending` is completed, lines that were not run get an error line that says so."""

"""The metric series of a run: their names and labels, and where each number comes from. The names are an interface."""

from __future__ import annotations

from banyan_runtime.batch.instrumented import DIRECTIONS, OPERATIONS
from banyan_runtime.batch.progress import Progress
from banyan_runtime.exposition import Page


class Metrics:
    """The page of /metrics over the counters of one run."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._page = page = Page({})
        statuses = ("completed", "failed", "cancelled", "expired")
        self._lines = page.cells("banyan_batch_lines_total", "counter", "Input lines with an outcome.", status=statuses)
        self._remaining = page.cell("banyan_batch_lines_remaining", "gauge", "Input lines without an outcome.")
        self._retries = page.cell("banyan_batch_line_retries_total", "counter", "Tries beyond a line's first.")
        self._in_flight = page.cell("banyan_batch_requests_in_flight", "gauge", "Requests sent and not answered.")
        self._limit = page.cell("banyan_batch_concurrency_limit", "gauge", "Requests that may be in flight now.")
        self._tokens = page.cells(
            "banyan_batch_tokens_total", "counter", "Tokens of answered lines.", kind=("prompt", "cached", "completion")
        )
        self._errors = page.cells(
            "banyan_batch_s3_errors_total", "counter", "Failed storage calls, after the client's retries.", operation=OPERATIONS
        )
        self._bytes = page.cells(
            "banyan_batch_s3_bytes_total", "counter", "Bytes read from and written to the storage.", direction=DIRECTIONS
        )

    def text(self) -> bytes:
        """The page as the counters are now."""
        progress, usage = self._progress, self._progress.usage
        self._lines[("completed",)].value = progress.completed
        self._lines[("failed",)].value = progress.failed
        self._remaining.value = 0 if progress.total is None else progress.total - progress.completed - progress.failed
        self._retries.value = progress.retries
        self._in_flight.value = progress.in_flight
        self._limit.value = progress.limit
        self._tokens[("prompt",)].value = usage.prompt_tokens
        self._tokens[("cached",)].value = usage.cached_tokens
        self._tokens[("completion",)].value = usage.completion_tokens
        for (operation,), cell in self._errors.items():
            cell.value = progress.storage_errors[operation]
        for (direction,), cell in self._bytes.items():
            cell.value = progress.storage_bytes[direction]
        return self._page.text()

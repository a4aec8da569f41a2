"""Runs a batch: lines from a source, through a client, into a sink. What to do is decided in `protocol` and `retries`;
here it is done, with clocks, sleeps, tasks and threads.
"""

from __future__ import annotations

import asyncio
import datetime
import functools
import random
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, TypeVar

from banyan_runtime.batch.client import Answer, Client, NoAnswer
from banyan_runtime.batch.errors import AccessDenied, InputInvalid, ModelNotFound, ServerGone
from banyan_runtime.batch.limiter import ConcurrencyLimiter
from banyan_runtime.batch.lines import Invalid, LineParser, Request
from banyan_runtime.batch.progress import Progress
from banyan_runtime.batch.protocol import Window
from banyan_runtime.batch.records import Manifest, Record, answered, invalid, record_id, unanswered
from banyan_runtime.batch.retries import Again, Concurrency, Health, RetryPolicy, ServerLost, Tries, Trouble, next_try, trouble_of
from banyan_runtime.batch.sink import Sink
from banyan_runtime.batch.source import LineReader, Scan, Source

WINDOW_LINES: Final = 1024  # or 4 times the concurrency: lines that may be finished behind one slow line
WINDOW_BYTES: Final = 256 << 20
WRITE_INTERVAL_S: Final = 0.05  # results are written in gulps, not one by one

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Job:
    """What to run."""

    run: str  # identity of the run: written into the results, and the same when it is tried again
    endpoint: str
    max_concurrency: int = 64
    policy: RetryPolicy = field(default_factory=RetryPolicy)


def check(scan: Scan, source: Source, parser: LineParser) -> None:
    """For --on-invalid-line fail: refuse an input with bad lines. Raises InputInvalid with the first of them."""
    problems = scan.problems
    if not problems and len(scan.suspects):
        problems = [item for item in source.items(parser, scan.suspects.again()) if isinstance(item, Invalid)]
    if problems:
        first = problems[0]
        raise InputInvalid(
            f"line {first.number}: {first.code}: {first.message} ({len(problems)} bad lines; "
            "--on-invalid-line record puts them into errors.jsonl and runs the others)"
        )


class Worker:
    """One run over one source. Every line of the source ends in exactly one record of the sink."""

    def __init__(self, job: Job, client: Client, sink: Sink, progress: Progress) -> None:
        self._job = job
        self._client = client
        self._sink = sink
        self._progress = progress
        # one thread each: an abort must come after the write that is still under way
        self._reading = ThreadPoolExecutor(1, "batch-read")
        self._writing = ThreadPoolExecutor(1, "batch-write")
        self._health = Health()
        self._limiter = ConcurrencyLimiter(Concurrency(maximum=job.max_concurrency))
        self._window = Window(max_lines=max(WINDOW_LINES, 4 * job.max_concurrency), max_bytes=WINDOW_BYTES)
        self._finished = asyncio.Event()  # a line got its record, or the last line was read
        self._room = asyncio.Event()
        self._all_read = False

    async def run(self, source: Source, parser: LineParser, scan: Scan) -> Manifest:
        """Run all lines and publish. Cancelled or failed, it publishes nothing; once publishing began, it ends it."""
        self._progress.begin(scan.total, time.monotonic())
        try:
            reader = LineReader(source.items(parser, scan.suspects), self._reading)
            await self._run_lines(reader)
            self._progress.end(time.monotonic())
            manifest = await _to_its_end(self._in_thread(lambda: self._publish(source)))
        except BaseException:
            source.stop()
            await _to_its_end(self._in_thread(self._sink.abort))
            raise
        finally:
            self._reading.shutdown(wait=False)
            self._writing.shutdown(wait=False)
        self._progress.phase = "done"
        return manifest

    async def _run_lines(self, reader: LineReader) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._write())
                await self._feed(reader, group)
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from failed  # the first failure stopped the others

    async def _feed(self, reader: LineReader, group: asyncio.TaskGroup) -> None:
        async for item in reader:
            while not self._window.has_room:
                self._room.clear()
                await self._room.wait()
            if isinstance(item, Invalid):
                ordinal = self._window.begin(0)
                self._finish(ordinal, invalid(record_id(self._job.run, ordinal), item))
            else:
                ordinal = self._window.begin(len(item.body))
                group.create_task(self._line(ordinal, item))
        assert self._window.begun == self._progress.total, "both passes over the input see the same lines"
        self._all_read = True
        self._finished.set()

    async def _line(self, ordinal: int, request: Request) -> None:
        """Send one line until it has an outcome."""
        record = record_id(self._job.run, ordinal)
        tries = Tries(time.monotonic(), self._health.successes)
        while True:
            async with self._limiter.slot(ordinal) as epoch:
                self._show_load()
                outcome = await self._client.post(request.body)
                trouble = outcome.trouble if isinstance(outcome, NoAnswer) else trouble_of(outcome.status)
                if trouble is Trouble.BUSY:
                    self._limiter.concurrency.refused(epoch)
                elif trouble is None:
                    self._limiter.concurrency.passed()
            self._show_load()
            if isinstance(outcome, Answer) and trouble is None:
                self._refuse_misconfigured(outcome)
                break
            assert trouble is not None
            retry_after_s = outcome.retry_after_s if isinstance(outcome, Answer) else None
            decision = next_try(
                tries,
                trouble,
                self._health,
                self._job.policy,
                now=time.monotonic(),
                jitter=random.random(),
                retry_after_s=retry_after_s,
            )
            if isinstance(decision, ServerLost):
                said = outcome.message if isinstance(outcome, NoAnswer) else f"status {outcome.status}"
                raise ServerGone(f"the server has served nothing for {decision.silent_s:.0f} s (last: {said}); nothing was published")
            if not isinstance(decision, Again):
                if isinstance(outcome, NoAnswer):
                    outcome = NoAnswer(trouble, f"{outcome.message}; {decision.reason}")
                break
            self._progress.retries += 1
            await asyncio.sleep(decision.after_s)
        if isinstance(outcome, NoAnswer):
            self._finish(ordinal, unanswered(record, request.custom_id, "server_error", outcome.message))
        else:
            request_id = outcome.request_id or record
            self._finish(ordinal, answered(record, request.custom_id, outcome.status, request_id, outcome.body, outcome.usage))

    def _refuse_misconfigured(self, answer: Answer) -> None:
        """Stop a job that can't work instead of writing one error line for each of its lines."""
        if not self._health.answered(answer.status, self._progress.total or 1):
            return
        said = answer.body[:300].decode(errors="replace")
        if answer.status in (401, 403):
            raise AccessDenied(f"the server refuses the API key ({answer.status} on every line; see --api-key-file): {said}")
        raise ModelNotFound(f"the server has no such model or endpoint ({answer.status} on every line): {said}")

    def _finish(self, ordinal: int, record: Record) -> None:
        if record.kind == "output":
            self._progress.completed += 1
        else:
            self._progress.failed += 1
        if record.usage is not None:
            self._progress.usage.add(record.usage)
        self._window.finish(ordinal, record)
        self._finished.set()

    def _show_load(self) -> None:
        self._progress.in_flight = self._limiter.in_flight
        self._progress.limit = self._limiter.concurrency.limit

    async def _write(self) -> None:
        """Write records as they become next in order, until the last line is written."""
        while not (self._all_read and self._window.open == 0):
            await self._finished.wait()
            self._finished.clear()
            if records := self._window.take():
                await self._in_thread(functools.partial(self._sink.write, records))
                self._room.set()
                await asyncio.sleep(WRITE_INTERVAL_S)

    def _publish(self, source: Source) -> Manifest:
        return self._sink.publish(
            created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
            endpoint=self._job.endpoint,
            inputs=source.files,
            counts=self._progress.counts,
            usage=self._progress.usage,
        )

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._writing, work)


async def _to_its_end(work: Coroutine[None, None, T]) -> T:
    """Await `work` even if this task is cancelled meanwhile: half a publication helps nobody, and a whole one is success."""
    task = asyncio.ensure_future(work)
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise
        except Exception:
            break
    return task.result()

"""Runs a batch's lines with the code of `banyan-runtime batch`, against the server that this host belongs to."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Final

from banyan_runtime.batch.documents import Plan, Reason
from banyan_runtime.batch.hands import Hands
from banyan_runtime.batch.host.boot import Boot
from banyan_runtime.batch.host.documents import Counts, Ending, Tokens
from banyan_runtime.batch.host.lifecycle import Published
from banyan_runtime.batch.host.runner import Report, Task
from banyan_runtime.batch.host.tally import Tally
from banyan_runtime.batch.order import Order, Pace
from banyan_runtime.batch.planner import Cut
from banyan_runtime.batch.progress import Progress
from banyan_runtime.batch.records import ERRORS, OUTPUT, Manifest, Usage
from banyan_runtime.batch.run import Run
from banyan_runtime.batch.sender import Expected, Sender, Target
from banyan_runtime.storage.open import Location
from banyan_runtime.storage.patience import Patience
from banyan_runtime.storage.store import ObjectStore

log = logging.getLogger("banyan")

PRIORITY: Final = -100  # below 0 is background
WHOLE: Final = Cut(lines=1 << 40, bytes=1 << 50)  # one shard: one host works on it, and sorts its lines by their beginnings
REPORT_S: Final = 0.5
THREADS: Final = 8
LAST_WRITES_S: Final = 6.0  # for what is done, and for giving the work back, where the storage is slow to take it
LEASE_S: Final = 30.0
CHECKPOINT_S: Final = 2.0  # where finished lines are no journal: what a killed host did since runs again
SEGMENT_BYTES: Final = 1 << 30  # of scratch space: the whole of nearly every input is sorted
PATIENCE_S: Final = 300.0  # with a storage that is away; then a new attempt begins
CONCURRENCY: Final = (16, 64, 512)  # lines in flight: at least, where nothing is known of the engine, at most
_REASONS: Final[dict[Ending, Reason]] = {"cancelled": "cancelled", "expired": "expired", "failed": "failed"}


class BatchRunner:
    """A `Runner`. `open_store` opens the whole storage: tasks name keys in it. Each attempt opens it for itself, so that its waiting
    can be ended without the others'.
    """

    def __init__(self, boot: Boot, open_store: Callable[[Patience], ObjectStore], tally: Tally | None = None) -> None:
        self._boot = boot
        self._tally = tally or Tally()
        self._open_store = open_store
        self._hands = Hands(THREADS, "batch")
        fewest, unknown, most = CONCURRENCY
        # twice what the engine computes at once: there is always one that waits, and never a queue that takes long to drain
        self._concurrency = max(fewest, min(most, 2 * boot.max_running)) if boot.max_running else unknown

    def close(self) -> None:
        """To be called before the event loop is closed."""
        self._hands.close()

    async def work(self, task: Task, report: Report) -> None:
        progress, patience = Progress(), self._patience(task)
        run = await self._run(task, progress, patience)
        working = asyncio.ensure_future(self._work(task, run, progress, report))
        try:
            await asyncio.shield(working)
        except asyncio.CancelledError:
            run.quit()
            working.cancel()
            await asyncio.wait({working}, timeout=LAST_WRITES_S)
            patience.stop.set()
            await asyncio.wait({working})
            raise

    async def _work(self, task: Task, run: Run, progress: Progress, report: Report) -> None:
        if await run.claim() is not None:
            return
        plan = await run.plan()
        telling = asyncio.ensure_future(_tell(progress, report))
        try:
            await self._send(task, run, plan)
        finally:
            telling.cancel()
            _report(progress, report)
            self._tally.retries += progress.retries

    async def _send(self, task: Task, run: Run, plan: Plan) -> None:
        target = Target(
            self._boot.server,
            task.endpoint,
            api_key=self._boot.key,
            max_concurrency=self._concurrency,
        )
        models = frozenset(plan.models) if plan.models is not None else None
        served, left = await run.begun()
        async with Sender(target, Expected(left, models, served_before=served)) as sender:
            await run.work(sender)

    async def publish(self, task: Task, ending: Ending) -> Published:
        run = await self._run(task, Progress(), self._patience(task))
        manifest = await run.claim()
        if manifest is None:
            await run.plan()
            manifest = await run.merge(_REASONS.get(ending))
        return _published(task, manifest)

    def _patience(self, task: Task) -> Patience:
        return Patience(PATIENCE_S, lambda text: log.warning("batch %s: %s", task.id, text))

    async def _run(self, task: Task, progress: Progress, patience: Patience) -> Run:
        store = await self._hands.do(lambda: self._open_store(patience))
        order = Order(
            output=Location(store, task.output),
            endpoint=task.endpoint,
            input=Location(store, task.input),
            priority=PRIORITY,
            force_priority=True,
            run=task.id,
            cut=WHOLE,
            patience=patience,
            pace=Pace(self._concurrency, checkpoint_s=CHECKPOINT_S, lease_s=LEASE_S, segment_bytes=SEGMENT_BYTES),
        )
        return Run(order, progress, self._hands, lambda text: log.info("batch %s: %s", task.id, text))


def _published(task: Task, manifest: Manifest) -> Published:
    counts, output, errors = manifest.request_counts, manifest.output, manifest.errors
    endings: dict[str, Ending] = {"completed": "completed", "cancelled": "cancelled", "expired": "expired"}
    return Published(
        output=task.output + OUTPUT if output.lines else None,
        output_bytes=output.bytes,
        errors=task.output + ERRORS if errors.lines else None,
        errors_bytes=errors.bytes,
        counts=Counts(counts.total, counts.completed, counts.failed),
        tokens=_tokens(manifest.usage),
        ending=endings.get(manifest.outcome, "failed"),
    )


def _tokens(usage: Usage) -> Tokens:
    return Tokens(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens, usage.total_tokens, usage.reasoning_tokens)


def _report(progress: Progress, report: Report) -> None:
    report(Counts(0, progress.completed, progress.failed), _tokens(progress.usage))


async def _tell(progress: Progress, report: Report) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            await asyncio.sleep(REPORT_S)
            _report(progress, report)

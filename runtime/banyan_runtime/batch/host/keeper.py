"""Looks after batches: takes those that nobody looks after, and brings each to its end, whatever was done of it before.

Nothing is remembered here that is not in storage, so a host that was killed is replaced by one that begins the same way. With several
hosts over one storage a batch belongs to one at a time; another takes it when it has not changed for a while, by its own clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

from msgspec.structs import replace

from banyan_runtime.batch import identity
from banyan_runtime.batch.host import lifecycle
from banyan_runtime.batch.host.batches import RESULTS, Batches
from banyan_runtime.batch.host.documents import BatchDocument, Counts, FileDocument, Problem, Tokens
from banyan_runtime.batch.host.examine import Rules, examine
from banyan_runtime.batch.host.files import FOLDER as FILES
from banyan_runtime.batch.host.files import Files
from banyan_runtime.batch.host.lifecycle import Published, Step
from banyan_runtime.batch.host.refusals import Refusal, is_full
from banyan_runtime.batch.host.reserve import ROOM
from banyan_runtime.batch.host.runner import Runner, Task
from banyan_runtime.batch.host.shelf import Held, Storage
from banyan_runtime.batch.host.tally import Tally
from banyan_runtime.errors import UserError
from banyan_runtime.storage.store import StoreError

log = logging.getLogger("banyan")

SCAN_S: Final = 5.0
BEAT_S: Final = 2.0  # between two writes of how far a batch is
IDLE_BEATS: Final = 5  # so many times as long while nothing changes
LEASE_S: Final = 30.0  # without a change: its owner is gone
RETRY_S: Final = 5.0  # doubled from one failure to the next
LAST_RETRY_S: Final = 15.0  # well within a lease: a batch that fails stays with the host that counts how often it does
BUGS: Final = 5  # one after the other, and the batch ends
GIVE_UP_S: Final = 86_400.0  # after its window a batch ends, whatever it still waits for
LASTING_S: Final = 3600.0  # if nothing else came of it for so long: a host that was off for days meets errors that pass, as any other
LEAST_FREE: Final = 64 << 10  # bytes
SWEEP_S: Final = 60.0
TIDY_SWEEPS: Final = 60  # so many sweeps between two that look at everything
LEFTOVERS_S: Final = 86_400.0  # uploads that nobody has finished by then
UPLOADED: Final = (f"{FILES}file-", f"{RESULTS}batch_")  # others may have theirs in the same bucket
RUNNING: Final = 4
EXAMINING: Final = 8
FINAL: Final = frozenset({64, 65, 78, 79})  # exit codes of errors that another attempt meets again; credentials (77) are renewed

HeldBatch = Held[BatchDocument]


@dataclass(slots=True)
class Look:
    """What the keeper knows of a batch that it looks after."""

    held: HeldBatch  # as it was last seen
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    counts: Counts = field(default_factory=Counts)
    tokens: Tokens = field(default_factory=Tokens)
    running: bool = False  # it has one of the places for batches whose lines are run
    failures: int = 0  # one after the other
    failing_since: float = 0.0  # when the first of them came, monotonic seconds

    def failed(self) -> None:
        if self.failures == 0:
            self.failing_since = time.monotonic()
        self.failures += 1


class Keeper:
    """One per host. `owner` names the host; two that live at a time never have the same name."""

    def __init__(
        self,
        storage: Storage,
        batches: Batches,
        files: Files,
        runner: Runner,
        *,
        owner: str,
        models: tuple[str, ...],
        tally: Tally | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._storage = storage
        self._batches = batches
        self._files = files
        self._runner = runner
        self._owner = owner
        self._models = models
        self._tally = tally or Tally()
        self._clock = clock
        self._looks: dict[str, Look] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._foreign: dict[str, tuple[str, float]] = {}  # tag and since when (monotonic seconds) of batches that others have
        self._kick = asyncio.Event()
        self._examining = ThreadPoolExecutor(2, "examine")
        self.storage_full = False
        self._full_at = 0.0  # when it was last found to be so, monotonic seconds
        self.statuses: dict[str, int] = {}  # batches that have not ended

    async def run(self) -> None:
        """Until cancelled; batches that are under way are then left as they are for whoever comes next."""
        sweeping = asyncio.create_task(self._sweep())
        try:
            while True:
                self._kick.clear()
                try:
                    await self._scan()
                except StoreError as error:
                    self._note(error)
                except Exception:
                    log.exception("looking for batches failed")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(SCAN_S):  # wait_for would lose a cancellation that meets a kick
                        await self._kick.wait()
        finally:
            sweeping.cancel()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(sweeping, *self._tasks, return_exceptions=True)

    def kick(self, batch: str) -> None:
        """Somebody changed the batch."""
        if (look := self._looks.get(batch)) is not None:
            look.wake.set()
        self.seek()

    def seek(self) -> None:
        """There is perhaps a new batch."""
        self._kick.set()

    def live(self, batch: BatchDocument) -> BatchDocument:
        """The batch with its counts as they are at this moment."""
        look = self._looks.get(batch.id)
        if look is None or batch.ended or look.counts.completed + look.counts.failed < batch.counts.completed + batch.counts.failed:
            return batch
        return replace(batch, counts=replace(look.counts, total=batch.counts.total), tokens=look.tokens)

    # --- which batches ---

    async def _scan(self) -> None:
        held = await self._batches.open()
        await self._look_at_the_room()
        self.statuses = {}
        for each in held:
            self.statuses[each.document.status] = self.statuses.get(each.document.status, 0) + 1
        self._foreign = {one.document.id: self._foreign[one.document.id] for one in held if one.document.id in self._foreign}
        for each in held:
            if each.document.id not in self._looks and self._abandoned(each) and self._room(each.document):
                self._begin(each)

    def _abandoned(self, held: HeldBatch) -> bool:
        batch = held.document
        if batch.owner is None or batch.owner == self._owner or identity.is_gone(batch.owner):
            return True
        tag, since = self._foreign.get(batch.id, ("", 0.0))
        now = time.monotonic()
        if tag != held.tag:
            self._foreign[batch.id] = held.tag, now
            return False
        return now - since > LEASE_S

    def _room(self, batch: BatchDocument) -> bool:
        running = sum(look.running for look in self._looks.values())
        if batch.status == "in_progress":
            return running < RUNNING or self._over(batch)
        return batch.status != "validating" or len(self._looks) - running < EXAMINING

    def _over(self, batch: BatchDocument) -> bool:
        """Whether its window is."""
        return batch.expires_at <= self._clock()

    def _begin(self, held: HeldBatch) -> None:
        name = held.document.id
        look = self._looks[name] = Look(held, counts=held.document.counts, tokens=held.document.tokens)
        look.running = held.document.status == "in_progress" and not self._over(held.document)
        task = asyncio.create_task(self._look_after(look), name=name)
        self._tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            del self._looks[name]
            self._kick.set()

        task.add_done_callback(ended)

    # --- one batch ---

    async def _look_after(self, look: Look) -> None:
        name = look.held.document.id
        step: Step | None = lifecycle.claimed(self._owner, look.held.document)
        try:
            while True:
                try:
                    look.held = await self._batches.get(name)
                    if step is not None:
                        look.held = await self._batches.advance(look.held, step)
                    step = None
                    batch = look.held.document
                    if batch.ended or batch.owner != self._owner:
                        return
                    look.wake.clear()
                    if batch.status == "validating":
                        await self._examine(look)
                    elif batch.status != "in_progress":
                        await self._publish(look)
                    elif self._over(batch):
                        await self._advance(look, lifecycle.finalizing("expired", int(self._clock())))
                    elif look.running:
                        await self._run(look)
                    else:  # others may be older, or another host be free
                        await self._batches.advance(look.held, lifecycle.released(self._owner))
                        return
                    look.failures = 0
                except Refusal:
                    raise
                except Exception as error:
                    look.failed()
                    step = self._failed(error, look)
                    if step is None:
                        step = self._beaten(look)
                        await _pause(look, min(RETRY_S * 2 ** min(look.failures - 1, 10), LAST_RETRY_S))
        except Refusal as refusal:
            log.warning("batch %s is left alone: %s", name, refusal.message)
        except asyncio.CancelledError:
            with contextlib.suppress(StoreError, Refusal):
                await self._batches.advance(look.held, lifecycle.released(self._owner))
            raise

    async def _examine(self, look: Look) -> None:
        batch = look.held.document
        rules = Rules(batch.endpoint, self._models)
        loop = asyncio.get_running_loop()
        async with self._beating(look):
            found = await loop.run_in_executor(self._examining, examine, self._storage.store, batch.input, rules)
        now = int(self._clock())
        if found.problems:
            await self._advance(look, lifecycle.refused(found.problems, now))
            first = found.problems[0]  # its message repeats what clients wrote
            log.info("batch %s failed: %s%s", batch.id, first.code, "" if first.line is None else f" in line {first.line}")
        else:
            await self._advance(look, lifecycle.validated(found.total, found.model or self._models[0], now))

    async def _run(self, look: Look) -> None:
        """Run lines until they are all done, the window is over, or somebody changed the batch."""
        if self.storage_full:
            await _pause(look, RETRY_S)
            await self._advance(look, self._beaten(look))
            return

        def report(counts: Counts, tokens: Tokens) -> None:
            self._tally.ran(look.counts, counts)
            look.counts, look.tokens = counts, tokens

        work = asyncio.ensure_future(self._runner.work(self._task(look.held.document), report))
        woken = asyncio.ensure_future(look.wake.wait())
        try:
            async with self._beating(look) as beating:
                while not (work.done() or woken.done() or beating.done() or self._over(look.held.document)):
                    left = look.held.document.expires_at - self._clock()
                    await asyncio.wait({work, woken, beating}, timeout=min(BEAT_S, left), return_when=asyncio.FIRST_COMPLETED)
                    await self._look_at_the_room()
                    if self.storage_full and not work.done():  # what is done is still written, into the reserve
                        await self._storage.call(self._storage.reserve.release)
                        return
                if beating.done():
                    beating.result()
                if woken.done() or beating.done():
                    return
        finally:
            woken.cancel()
            work.cancel()
            await asyncio.wait({work})
        if not work.cancelled():
            work.result()
        await self._advance(look, lifecycle.finalizing("expired" if work.cancelled() else "completed", int(self._clock())))

    @contextlib.asynccontextmanager
    async def _beating(self, look: Look) -> AsyncIterator[asyncio.Task[None]]:
        """Show other hosts meanwhile that the batch is looked after. The task ends early when it is not ours any more."""
        beating = asyncio.create_task(self._beat(look))
        try:
            yield beating
        finally:
            beating.cancel()
            await asyncio.wait({beating})
            if not beating.cancelled():
                beating.exception()  # whoever works with the batch next meets it, too

    async def _beat(self, look: Look) -> None:
        """Write how far the batch is, whenever that has changed and now and then all the same, until it has gone another way. A
        storage that does not take it ends nothing: mostly nobody else can take the batch then, and if one does, this host hears of it."""
        status, told = look.held.document.status, look.held.document.counts
        for beat in itertools.count(1):
            await asyncio.sleep(BEAT_S)
            changed = (look.counts.completed, look.counts.failed) != (told.completed, told.failed)
            if not changed and beat % IDLE_BEATS:
                continue
            try:
                told = (await self._advance(look, self._beaten(look))).counts
            except StoreError as error:
                self._note(error)
            if look.held.document.status != status or look.held.document.owner != self._owner:
                return

    async def _publish(self, look: Look) -> None:
        batch = look.held.document
        published: Published | None = None
        if batch.in_progress_at is not None:
            assert batch.ending is not None
            async with self._beating(look):
                published = await self._runner.publish(self._task(batch), batch.ending)
                await self._make_files(batch, published)
        batch = await self._advance(look, lifecycle.ended(published, int(self._clock())))
        counts = batch.counts
        if batch.ended:
            self._tally.ran(look.counts, counts)
            self._tally.ended(batch)
        log.info("batch %s %s: %d of %d completed, %d failed", batch.id, batch.status, counts.completed, counts.total, counts.failed)

    async def _make_files(self, batch: BatchDocument, published: Published) -> None:
        assert batch.reserved is not None
        now = int(self._clock())
        expires = None if batch.output_expires_after is None else now + batch.output_expires_after
        sides = ((published.output, published.output_bytes, "output"), (published.errors, published.errors_bytes, "error"))
        for chosen, (content, size, side) in zip(batch.reserved, sides, strict=True):
            if content is not None:
                name = f"{batch.id}_{side}.jsonl"
                document = FileDocument(
                    id=chosen, size=size, created_at=now, filename=name, purpose="batch_output", content=content, expires_at=expires
                )
                await self._files.add(document)

    def _failed(self, error: Exception, look: Look) -> Step | None:
        """The way to the end of a batch that met an error which is no single line's; None: to wait and try again."""
        batch, now = look.held.document, int(self._clock())
        if isinstance(error, UserError) and error.exit_code in FINAL:
            log.error("batch %s: %s", batch.id, error)
            problem = Problem(type(error).__name__, str(error))
        elif isinstance(error, (StoreError, UserError, OSError)):
            if isinstance(error, StoreError) or is_full(error):
                self._note(error)
            else:
                log.warning("batch %s waits: %s", batch.id, error)
            if now <= batch.expires_at + GIVE_UP_S or time.monotonic() - look.failing_since < LASTING_S:
                return None
            log.error("batch %s is given up: its window has been over for a day", batch.id)
            problem = Problem("unavailable", "What the batch needs was not available until a day after its window.")
        else:
            log.error("batch %s: a bug stopped work on it, %d of %d times", batch.id, look.failures, BUGS, exc_info=error)
            if look.failures < BUGS:
                return None
            problem = Problem("internal_error", "The server failed to work on the batch; its log says why.")
        if batch.status == "in_progress":
            return lifecycle.by(self._owner, lifecycle.finalizing("failed", now, [problem]))
        return lifecycle.by(self._owner, lifecycle.spoiled(problem, now))

    def _beaten(self, look: Look) -> Step:
        return lifecycle.beaten(self._owner, look.counts, look.tokens)

    def _task(self, batch: BatchDocument) -> Task:
        return Task(batch.id, batch.input, self._batches.results(batch.id), batch.endpoint)

    async def _advance(self, look: Look, step: Step) -> BatchDocument:
        """Take a step with a batch that is ours; returns it as it is then."""
        look.held = await self._batches.advance(look.held, lifecycle.by(self._owner, step))
        return look.held.document

    # --- the storage ---

    async def _look_at_the_room(self) -> None:
        await self._storage.call(self._storage.reserve.fill)
        free = self._storage.reserve.free
        # where nobody knows, a try tells
        full = free < LEAST_FREE if free is not None else self.storage_full and time.monotonic() - self._full_at < RETRY_S
        if full and not self.storage_full:
            log.error("storage_full: batches wait until there is room. %s", ROOM if free is not None else "")
        elif self.storage_full and not full:
            log.info("there is room in the storage again" if free is not None else "whether there is room in the storage is tried again")
        self.storage_full = full

    def _note(self, error: Exception) -> None:
        if is_full(error) and not self.storage_full:
            room = ROOM if self._storage.reserve.free is not None else ""
            log.error("storage_full: batches wait until there is room (%s). %s", error, room)
        elif not is_full(error):
            log.warning("batches wait for the storage: %s", error)
        if is_full(error):
            self.storage_full, self._full_at = True, time.monotonic()

    async def _sweep(self) -> None:
        for count in itertools.count():
            try:
                await self._files.sweep()
                if count % TIDY_SWEEPS == 0:
                    await self._batches.sweep()
                    for folder in UPLOADED:
                        await self._storage.call(self._storage.store.sweep, self._storage.below + folder, LEFTOVERS_S)
            except StoreError as error:
                self._note(error)
            except Exception:
                log.exception("sweeping the storage failed")
            await asyncio.sleep(SWEEP_S)


async def _pause(look: Look, seconds: float) -> None:
    """Until then, or until somebody changes the batch."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await look.wake.wait()

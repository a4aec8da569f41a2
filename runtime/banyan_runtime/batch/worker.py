"""Works on a run's shards: claims them, sends their lines, records what comes back. What to do is decided in `protocol` and `leases`;
here it is done, with clocks, tasks and threads.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final, Protocol, TypeVar

from msgspec import structs

from banyan_runtime.batch import entries, identity, protocol
from banyan_runtime.batch.client import Answer
from banyan_runtime.batch.documents import Keys, Part, Plan, Reason, State, Stop
from banyan_runtime.batch.executor import Executor
from banyan_runtime.batch.hands import Hands, to_its_end
from banyan_runtime.batch.leases import Leases
from banyan_runtime.batch.lines import LineParser
from banyan_runtime.batch.order import Pace
from banyan_runtime.batch.progress import Progress, Shards
from banyan_runtime.batch.protocol import Held, Known, Steps
from banyan_runtime.batch.recorder import Journal, Parts, works_on
from banyan_runtime.batch.records import answered, invalid, record_id, unanswered
from banyan_runtime.batch.segments import Ready, Segment, segments
from banyan_runtime.batch.sender import Failed
from banyan_runtime.batch.shards import ShardRun
from banyan_runtime.batch.source import Source
from banyan_runtime.storage.open import Location
from banyan_runtime.storage.patience import Patience

COMMIT_S: Final = 0.02  # finished lines are made durable in groups
PART_BYTES: Final = 8 << 20  # results held back for one part
UNRECORDED_BYTES: Final = (
    16 << 20
)  # results held in memory, all shards together; beyond, no line is started until the storage has taken some
LOOK_S: Final = 10.0  # how often other workers' shards and the stop marker are looked at
FIRST_LOOK_S: Final = 0.3
LEAST_WAITING: Final = 16  # lines that may wait for another try while as many as may be are in flight
SHOW_S: Final = 0.2
LONGEST_CHECKPOINT_S: Final = 15.0  # that checkpoints are thinned out to

T = TypeVar("T")


class Sends(Protocol):
    """What a line goes through."""

    async def send(self, body: bytes, *, key: bytes, order: int, clear: Callable[[], Awaitable[None]] | None = None) -> Answer | Failed: ...

    def quit(self) -> None: ...


class Worker:
    """One worker of a run."""

    def __init__(
        self,
        location: Location,
        plan: Plan,
        source: Source,
        parser: LineParser,
        sender: Sends,
        progress: Progress,
        pace: Pace,
        hands: Hands,
        patience: Patience,
        check: Callable[[], Awaitable[None]],
        say: Callable[[str], None],
    ) -> None:
        """`check` is asked now and then, and raises what ends the work."""
        self._patience = patience
        self._check = check
        self._say = say
        self._location = location
        self._plan = plan
        self._keys = Keys(plan.run)
        self._source = source
        self._parser = parser
        self._sender = sender
        self._progress = progress
        self._pace = pace
        self._hands = hands
        self._executor = Executor(location, patience)
        self._journal = works_on(location)
        index = identity.own_index()
        self._me = protocol.Worker(identity.own_name(), index)
        self._leases = Leases(len(plan.shards), lease_s=pace.lease_s, index=index or 0)
        self._looked_at = time.monotonic()
        self._shown_at = 0.0
        self._runs: dict[int, ShardRun] = {}
        self._slots = asyncio.Semaphore(pace.max_concurrency + max(LEAST_WAITING, pace.max_concurrency))
        self._dirty = asyncio.Event()  # something is to be recorded
        self._changed = asyncio.Event()  # a shard ended, was lost, or was seen to have changed
        self._relieved = asyncio.Event()  # not too much waits to be recorded
        self._relieved.set()
        self._quit = asyncio.Event()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._last_pass = False
        self._predecessors: set[str] = set()
        self.stopped: Reason | None = None  # why the whole run is to end

    def quit(self) -> None:
        """Start no more lines; what is in flight may still end."""
        if not self._quit.is_set():
            self._slots.release()  # who waits to start a line sees that it shall not
        self._quit.set()
        self._sender.quit()
        self._changed.set()
        self._relieved.set()

    async def work(self, grace_s: Callable[[], float] = lambda: 0.0) -> bool:
        """Work until every shard has ended (True), or until it is told to quit, or the run is stopped (False). Told to quit, it waits
        `grace_s()` for what is in flight.

        However it ends, what was finished is recorded and shards are given back, as far as the storage answers. Raises what the
        sender and the storage raise.
        """
        await self._look_around()
        self._find_predecessors()
        recording = asyncio.ensure_future(self._recording())
        others = [asyncio.ensure_future(task) for task in (self._feed(), self._looking())]
        try:
            await asyncio.wait([others[0], self._failed], return_when=asyncio.FIRST_COMPLETED)
            if self._quit.is_set() and self.stopped is None and not self._failed.done():
                await self._settled(grace_s())
        finally:
            self.quit()
            lines = [task for run in self._runs.values() for task in run.tasks]
            for task in (*others, *lines):
                task.cancel()
            self._last_pass = True
            self._dirty.set()
            await to_its_end(asyncio.gather(*others, *lines, recording, return_exceptions=True))
            self._show(kept=not self._journal)  # a journal has all but what ended in the last moment, and its state knows of less
        for task in (others[0], recording):
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error
        if self._failed.done():
            self._failed.result()
        return not self._leases.open

    # --- lines ---

    async def _feed(self) -> None:
        while (run := await self._next_shard()) is not None:
            lines = self._source.shard(run.shard)
            steps = segments(run.shard, lines, self._parser, frozenset(run.done).__contains__, self._pace.segment_bytes)
            while (segment := await self._hands.do(functools.partial(next, steps, None))) is not None:
                with contextlib.closing(segment):
                    await self._start_lines(run, segment)
                if self._quit.is_set() or run.lost:
                    break
            else:
                run.loaded = True
                self._dirty.set()

    async def _start_lines(self, run: ShardRun, segment: Segment) -> None:
        for ordinal, line in segment.invalid:
            run.finish(ordinal, invalid(record_id(self._plan.run, run.shard.first + ordinal), line))
        self._dirty.set()
        for ready in segment.ready:
            await self._slots.acquire()
            await self._relieved.wait()
            if self._quit.is_set() or run.lost:
                self._slots.release()
                return
            task = asyncio.ensure_future(self._line(run, ready, segment.body(ready)))
            run.tasks.add(task)
            task.add_done_callback(functools.partial(self._line_ended, run))

    async def _line(self, run: ShardRun, line: Ready, body: bytes) -> None:
        """Send one line until it has an outcome."""
        ordinal = run.shard.first + line.ordinal
        record = record_id(self._plan.run, ordinal)
        try:
            outcome = await self._sender.send(body, key=line.prefix, order=ordinal, clear=functools.partial(self._sure, run))
            if isinstance(outcome, Failed):
                finished = unanswered(record, line.custom_id, outcome.code, outcome.message)
            else:
                finished = answered(record, line.custom_id, outcome.status, outcome.request_id or record, outcome.body, outcome.usage)
        except Exception as error:  # no line's fault: it ends the worker
            self._fail(error)
            return
        if run.lost:
            return
        run.finish(line.ordinal, finished)
        self._progress.did(finished)
        self._relieve()
        self._dirty.set()

    def _relieve(self) -> None:
        """Start lines only while not too much waits to be recorded."""
        if sum(one.unrecorded_bytes for one in self._runs.values()) > UNRECORDED_BYTES and not self._quit.is_set():
            self._relieved.clear()
        else:
            self._relieved.set()

    async def _sure(self, run: ShardRun) -> None:
        """Where others may have taken the shard, since this process stood still or the storage took nothing, wait until it is seen to be
        ours still: of a lost one no line goes out."""
        while time.monotonic() - run.ours_at >= self._pace.lease_s:
            run.confirmed.clear()
            self._dirty.set()  # its state is due to be written, which tells
            await run.confirmed.wait()

    def _line_ended(self, run: ShardRun, task: asyncio.Task[None]) -> None:
        run.tasks.discard(task)
        self._slots.release()
        if task.cancelled() or self._failed.done():
            run.gaps = True
        if not run.tasks:
            self._dirty.set()

    def _fail(self, error: Exception) -> None:
        if not self._failed.done():
            self._failed.set_exception(error)
            self._failed.exception()  # it is raised by work(), or beside another one
        self.quit()

    async def _settled(self, grace_s: float) -> None:
        """Wait for what is in flight."""
        tasks = [task for run in self._runs.values() for task in run.tasks]
        if tasks and grace_s > 0:
            await asyncio.wait(tasks, timeout=grace_s)

    # --- shards ---

    async def _next_shard(self) -> ShardRun | None:
        """Claim a shard. None: all have ended, or it is time to quit."""
        while not self._quit.is_set() and self._leases.open:
            number = self._leases.next(self._runs, time.monotonic(), self._is_gone)
            if number is None:
                await self._wait_for_others()
                continue
            known = self._leases.known(number) or Known(number, State(), None)
            known = await self._hands.do(functools.partial(self._sound, known))
            began = time.monotonic()
            got = await self._do(protocol.claim_shard(self._keys, known, self._me, identity.nonce(), journal=self._journal))
            self._note(got)
            if isinstance(got, Held):
                opened = got.state.open
                recorder = Journal(self._location, opened, self._patience) if opened is not None else Parts(self._location)
                run = self._runs[number] = ShardRun(got, self._plan.shards[number], recorder, began)
                return run
        return None

    async def _wait_for_others(self) -> None:
        """All shards that have not ended are somebody's."""
        self._changed.clear()
        theirs = len(self._leases.open) - len(self._runs)
        self._progress.waiting_for_others = f"{theirs} shards that other workers have" if theirs and not self._runs else ""
        wait = self._leases.next_expiry(self._runs, time.monotonic())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), LOOK_S if wait is None else min(LOOK_S, wait + 0.05))
        self._progress.waiting_for_others = ""

    def _sound(self, known: Known) -> Known:
        """The shard without parts that cannot be read any more: their lines run again."""
        sound = []
        for part in known.state.parts:
            where = self._location.child(part.key)
            try:
                collections.deque(entries.entries(where.store, [(where.key, part)]), maxlen=0)
            except (entries.DamagedPart, entries.PartGone) as error:
                self._say(f"warning: {error}; its {part.completed + part.failed} lines run again")
            else:
                sound.append(part)
        return known if len(sound) == len(known.state.parts) else replace(known, state=structs.replace(known.state, parts=sound))

    def _find_predecessors(self) -> None:
        """Who has our name or our place in the Job at our start has ended: no second container of a pod, and no second pod for a place,
        is started before the first has ended.
        """
        states = [known.state for shard in list(self._leases.open) if (known := self._leases.known(shard)) is not None]
        found = {state.owner for state in states if state.owner is not None and state.index is not None and state.index == self._me.index}
        self._predecessors = {self._me.name, *found}

    def _is_gone(self, owner: str) -> bool:
        return owner in self._predecessors or identity.is_gone(owner)

    def _note(self, got: Held | Known) -> None:
        self._leases.note(Known(got.shard, got.state, got.tag), time.monotonic())

    async def _write(self, run: ShardRun, steps: Steps[Held | Known]) -> None:
        """Write the shard's state: it is as we wrote it then, or another's."""
        began = time.monotonic()
        got = await self._do(steps)
        self._note(got)
        if isinstance(got, Held):
            run.held = got
            run.ours_at = began
            run.confirmed.set()
            if got.state.owner is None:
                self._runs.pop(got.shard, None)
                self._changed.set()
            return
        run.lost = True
        run.pending.clear()
        run.unrecorded_bytes = 0
        for task in run.tasks:
            task.cancel()
        self._runs.pop(got.shard, None)
        self._relieve()
        self._changed.set()

    # --- recording: one task a shard, so that no state is written twice at a time ---

    async def _recording(self) -> None:
        tick = min(self._pace.lease_s / 3, self._pace.checkpoint_s)
        try:
            while not self._last_pass:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._dirty.wait(), tick)
                self._dirty.clear()
                for run in list(self._runs.values()):
                    self._begin_recording(run)
                if time.monotonic() - self._shown_at >= SHOW_S:
                    self._show()
                if not self._failed.done():
                    await self._stop_at_too_many_errors()
                await asyncio.sleep(0 if self._last_pass else COMMIT_S)
            under_way = [run.recording for run in self._runs.values() if run.recording is not None]
            await asyncio.gather(*under_way, return_exceptions=True)
            done = await asyncio.gather(*(self._record_shard(run) for run in list(self._runs.values())), return_exceptions=True)
            self._show()
            for error in done:
                if isinstance(error, BaseException):
                    raise error
        except Exception as error:
            self._fail(error)
            raise

    def _begin_recording(self, run: ShardRun) -> None:
        if run.recording is None or run.recording.done():
            run.recording = asyncio.ensure_future(self._record_shard(run))
            run.recording.add_done_callback(functools.partial(self._recorded, run))

    def _recorded(self, run: ShardRun, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._fail(error)
        if run.pending or run.ended:
            self._dirty.set()  # it was busy when this came

    async def _record_shard(self, run: ShardRun) -> None:
        """Make what is finished durable when it is time to, and say in the shard's state what there is to say."""
        try:
            await self._record(run)
        except BaseException:
            run.gaps = True  # lines that it had in hand may be in no part, or in one that no state names
            raise
        finally:
            if run.lost:
                await self._hands.do(run.recorder.close)

    async def _record(self, run: ShardRun) -> None:
        now = time.monotonic()
        leaves = self._last_pass and not run.ended
        ends = run.loaded and not run.tasks and not run.gaps
        # a state that names many parts is long, and is written anew each time
        patience_s = max(self._pace.checkpoint_s, min(LONGEST_CHECKPOINT_S, 0.01 * len(run.held.state.parts)))
        due = run.recorder.journal or leaves or ends or run.unrecorded_bytes >= PART_BYTES or now - run.recorded_at >= patience_s
        part = None
        if run.pending and due:
            part = await self._make_durable(run)
        if run.lost:
            return
        nonce = identity.nonce()
        if ends and not run.pending:
            closed = await self._hands.do(run.recorder.close)
            lacking = run.lacking(part, closed)
            assert not lacking, f"shard {run.held.shard} would end without {lacking} of its lines"
            await self._write(run, protocol.finish(self._keys, run.held, nonce, add=part, closed=closed))
        elif leaves:
            closed = await self._hands.do(run.recorder.close)
            await self._write(run, protocol.give_back(self._keys, run.held, nonce, add=part, closed=closed))
        elif part is not None or now - run.ours_at >= self._pace.lease_s / 3:
            await self._write(run, protocol.record(self._keys, run.held, nonce, add=part, open=run.recorder.opened()))

    async def _make_durable(self, run: ShardRun) -> Part | None:
        lines, run.pending = run.pending, []
        under_way = run.unrecorded_bytes
        key = self._keys.part(run.held.shard, run.held.state.epoch, run.held.state.seq, identity.nonce())
        recording = asyncio.ensure_future(self._hands.do(functools.partial(run.recorder.record, lines, key)))
        try:
            while not run.lost and not (await asyncio.wait([recording], timeout=self._pace.lease_s / 3))[0]:
                # the storage is slow: whoever looks shall see that the owner lives
                await self._write(run, protocol.record(self._keys, run.held, identity.nonce()))
        finally:
            await asyncio.wait([recording])  # whatever becomes of the state: the last pass uses the same recorder
        part = await recording
        run.unrecorded_bytes -= 0 if run.lost else under_way
        self._relieve()
        run.recorded_at = time.monotonic()
        return part

    async def _stop_at_too_many_errors(self) -> None:
        if self._plan.too_many(self._progress.failed) and self.stopped is None:
            try:
                self.stopped = await self._do(protocol.stop_run(self._keys, Stop("too-many-errors", identity.nonce())))
                self.quit()
            except Exception as error:  # what is finished is recorded all the same
                self._fail(error)

    # --- others ---

    async def _looking(self) -> None:
        wait = FIRST_LOOK_S
        while True:
            await asyncio.sleep(wait * random.uniform(0.8, 1.2))
            wait = min(LOOK_S, wait * 2)
            try:
                await self._look_around()
            except Exception as error:
                self._fail(error)
                return

    async def _look_around(self) -> None:
        """Look at the shards that others may have, and whether the run is stopped. The list tells which states to read."""
        stop = await self._do(protocol.read(self._keys.stop))
        if stop is not None:
            self.stopped = Stop.decode(stop.body).reason
            self.quit()
        await self._check()
        tags = await self._hands.do(self._listed)
        changed = []
        for shard in list(self._leases.open):
            known, tag = self._leases.known(shard), tags.get(self._location.child(self._keys.state(shard)).key)
            if shard in self._runs or (known is not None and known.tag == tag):
                continue
            if tag is None:
                self._note(Known(shard, State(), None))
            else:
                changed.append(shard)
        for got in await asyncio.gather(*(self._do(protocol.look_at(self._keys, shard)) for shard in changed)):
            if got.shard not in self._runs:
                self._note(got)
        now = time.monotonic()
        if (blind := now - self._looked_at - 2 * LOOK_S) > 0:
            self._leases.forgive(blind)
        self._looked_at = now
        self._changed.set()
        self._show()

    def _listed(self) -> dict[str, str]:
        folder = self._location.child(self._keys.folder + "shards/")
        return {info.key: info.tag for info in folder.store.list(folder.key)}

    def _show(self, *, kept: bool = False) -> None:
        """Counts of the whole run: our own shards as they are, others' as they were last seen. `kept`: of our own, too, only what their
        states name; what a storage has not taken from us in the end is lost, and somebody else does it once more."""
        self._shown_at = time.monotonic()
        progress, totals = self._progress, self._leases.totals
        earlier = self._plan.completes.lines if self._plan.completes is not None else 0
        completed, failed, usage = earlier + totals.completed, totals.failed, structs.replace(totals.usage)
        for run in () if kept else self._runs.values():
            recorded = run.held.state
            completed, failed = completed + run.completed - recorded.completed, failed + run.failed - recorded.failed
            usage.add(run.usage)
            usage.add(recorded.usage, -1)
        progress.completed, progress.failed, progress.usage = completed, failed, usage
        progress.shards = Shards(len(self._plan.shards), totals.ended, len(self._runs))

    async def _do(self, steps: Steps[T]) -> T:
        return await self._hands.do(lambda: self._executor.run(steps))

"""What the processes do: workers of a run, those who end one early, users who clean up, strangers who leave a file."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from banyan_runtime.batch import ordinals, protocol
from banyan_runtime.batch.documents import Keys, Outcome, Owner, Part, Plan, Shard, State, Stop
from banyan_runtime.batch.protocol import Assembled, Held, Known, Published, Removed, Steps, Taken, Unfinished
from banyan_runtime.batch.records import ERRORS, MANIFEST, OUTPUT, Manifest, RequestCounts, ResultFile, Usage
from tests.simulation.batch.process import Append, Delete, Drop, Process, Put, Remove, Run, Sleep, Unreachable
from tests.simulation.batch.store import Line, part_of

if TYPE_CHECKING:
    from tests.simulation.batch.run import Simulation

LEASE_S: Final = 30.0
T = TypeVar("T")
Part_ = Generator[Any, Any, T]


@dataclass
class Habits:
    """How a worker goes about it. The defaults are right; plants change them."""

    part_before_state: bool = True
    drops_what_it_lost: bool = True
    manifest_before_removal: bool = True
    finished_before_removal: bool = True


HABITS = Habits()


def patient(make: Callable[[], Steps[T]]) -> Part_[T]:
    """A procedure that the storage's absence ended is begun anew."""
    while True:
        try:
            return (yield from make())
        except Unreachable:
            continue


class Worker:
    def __init__(self, sim: Simulation, me: Process) -> None:
        self.sim, self.me, self.rng = sim, me, me.rng
        self.owner: Owner
        self.plan: Plan
        self.keys: Keys
        self._seen: dict[int, tuple[str | None, float]] = {}

    def run(self) -> Run:
        me = self.me
        claimed = yield from patient(lambda: protocol.claim_output(me.claim, me.gone))
        me.told = claimed
        if isinstance(claimed, Taken):
            self.sim.checks.refused(me, claimed)
            return "refused"
        if isinstance(claimed, Published):
            assert me.claim.run in (None, claimed.manifest.run)
            return "published before"
        self.sim.checks.claimed(me, claimed)
        self.owner = me.owner = claimed.owner
        self.keys = Keys(self.owner.run)
        if me.job.letter in self.sim.unplannable and not self.sim.calm and (yield from protocol.read(self.keys.plan)) is None:
            yield from patient(lambda: protocol.release_output(self.owner, me.nonce(), finished=True))
            return "could not plan"
        plan = self.sim.plan_of(self.owner.run, me.nonce())
        self.plan = me.plan = yield from patient(lambda: protocol.settle_plan(self.keys, plan))
        if me.job.stops is not None:
            yield from self._stop(me.job.stops)
        while True:
            if not (yield from self._work()):
                return (yield from self._leave())
            if self.rng.random() < 0.2:
                yield Sleep(self.rng.random() * 60)
            if not HABITS.manifest_before_removal:
                yield from self._clean()
            merged = yield from patient(lambda: protocol.merge(self.keys, self.owner, self.plan, self._manifest, me.nonce()))
            me.told = merged
            if isinstance(merged, Unfinished):
                continue
            if isinstance(merged, Removed):
                self.sim.checks.removed_before(me)
                return "removed before"
            if isinstance(merged, Taken):
                self.sim.checks.displaced(me, merged)
                return "taken"
            self.sim.checks.published(me, merged)
            if not HABITS.finished_before_removal:
                yield from self._clean()
            yield from patient(lambda: protocol.release_output(self.owner, me.nonce(), finished=True))
            yield from self._clean()
            return "published"

    def _leave(self) -> Part_[str]:
        yield from patient(lambda: protocol.release_output(self.owner, self.me.nonce(), finished=False))
        return "left"

    def _stop(self, reason: Any) -> Part_[None]:
        yield from patient(lambda: protocol.stop_run(self.keys, Stop(reason, self.me.nonce())))
        yield from self._freeze()

    def _freeze(self) -> Part_[None]:
        shards = list(range(len(self.plan.shards)))
        self.rng.shuffle(shards)
        for shard in shards:
            yield from patient(lambda shard=shard: protocol.freeze(self.keys, shard, self.me.nonce()))

    def _clean(self) -> Part_[None]:
        """Remove the parts that the states name."""
        for shard in range(len(self.plan.shards)):
            known = yield from patient(lambda shard=shard: protocol.look_at(self.keys, shard))
            for part in known.state.all_parts:
                yield Remove(part.key)

    def _manifest(self, output: Assembled, errors: Assembled, states: list[State], outcome: Outcome) -> Manifest:
        made = ((OUTPUT, output), (ERRORS, errors))
        files = [ResultFile(name, one.tag or "", one.bytes, one.sha256, one.lines) for name, one in made]
        completed, failed = sum(state.completed for state in states), sum(state.failed for state in states)
        counts = RequestCounts(self.plan.total, completed, failed)
        # another process would have made it at another time
        return Manifest(1, self.owner.run, self.me.holder, "", [], *files, counts, Usage(), outcome)

    # --- shards ---

    def _work(self) -> Part_[bool]:
        """Returns whether all shards have ended; if not, the process has to go."""
        count = len(self.plan.shards)
        order = [(self.me.index + step) % count for step in range(count)]
        while True:
            stop = yield from protocol.read(self.keys.stop)
            if stop is not None and (self.sim.calm or self.rng.random() < 0.7):
                yield from self._freeze()
                return True
            ended = 0
            for shard in order:
                if self._must_go():
                    return False
                known = yield from patient(lambda shard=shard: protocol.look_at(self.keys, shard))
                if known.state.term is None and self._is_free(known):
                    got = yield from patient(lambda known=known: self._claim(known))
                    if isinstance(got, Held):
                        yield from self._shard(got)
                ended += known.state.term is not None
            if ended == count:
                return True
            yield Sleep(LEASE_S * (0.1 + 0.4 * self.rng.random()))

    def _must_go(self) -> bool:
        return self.sim.now >= self.me.leaves_at

    def _claim(self, known: Known) -> Steps[Held | Known]:
        worker = protocol.Worker(self.me.name, self.me.index)
        return protocol.claim_shard(self.keys, known, worker, self.me.nonce(), journal=self.sim.store.journal)

    def _is_free(self, known: Known) -> bool:
        now = self.me.clock(self.sim.now)
        tag, since = self._seen.get(known.shard, (None, now))
        if known.tag != tag:
            since = now
        self._seen[known.shard] = (known.tag, since)
        # whoever bore our name before us is gone, we think
        return known.state.owner in (None, self.me.name) or now - since >= LEASE_S

    def _shard(self, held: Held) -> Part_[None]:
        """Work on a shard until it is done, lost or given back."""
        rng, shard = self.rng, self.plan.shards[held.shard]
        done = {one for part in held.state.parts for one in ordinals.read(part.lines)}
        todo = [one for one in range(shard.lines) if one not in done]
        if rng.random() < 0.3:
            rng.shuffle(todo)
        book = _Book(self, held)
        for one in todo:
            yield Sleep(rng.choice((0.5, 2.0, 2.0, 15.0)))
            book.add(self.sim.checks.ran(self.me, shard, held.shard, held.state.epoch, one))
            if self._must_go():
                break
            if rng.random() < 0.1 and (yield from protocol.read(self.keys.stop)) is not None:
                break
            if rng.random() < 0.5 and not (yield from book.checkpoint()):
                return
        else:
            yield from book.leave(protocol.finish)
            return
        yield from book.leave(protocol.give_back)


class _Book:
    """The finished lines of a shard that is held, recorded and not."""

    def __init__(self, worker: Worker, held: Held) -> None:
        self._worker, self._held = worker, held
        self._me, self._sim, self._keys = worker.me, worker.sim, worker.keys
        self._new: list[Line] = []
        self._journal: list[Line] = []

    def add(self, line: Line) -> None:
        self._new.append(line)

    def checkpoint(self) -> Part_[bool]:
        """Whether the shard is still held."""
        if not self._new or self._me.rng.random() < 0.1:
            opened = self._held.state.open
            return (yield from self._write(lambda nonce, _: protocol.record(self._keys, self._held, nonce, open=opened), ()))
        lines = self._take()
        if not self._sim.store.journal:
            return (yield from self._write(lambda nonce, part: protocol.record(self._keys, self._held, nonce, add=part), lines))
        yield from self._append(lines)
        if self._me.rng.random() < 0.5:
            return True
        grown = replace_bytes(part_of(self._open.key, self._journal, ordered=False))
        return (yield from self._write(lambda nonce, _: protocol.record(self._keys, self._held, nonce, open=grown), ()))

    def leave(self, how: Callable[..., Steps[Held | Known]]) -> Part_[None]:
        lines = self._take()
        if not self._sim.store.journal:
            yield from self._write(lambda nonce, part: how(self._keys, self._held, nonce, add=part), lines)
            return
        if lines:
            yield from self._append(lines)
        closed = part_of(self._open.key, self._journal, ordered=False)
        yield from self._write(lambda nonce, _: how(self._keys, self._held, nonce, closed=closed), ())

    @property
    def _open(self) -> Part:
        assert self._held.state.open is not None
        return self._held.state.open

    def _take(self) -> list[Line]:
        lines, self._new = sorted(self._new), []
        return lines

    def _append(self, lines: list[Line]) -> Part_[None]:
        yield Append(self._open.key, lines)
        self._journal += lines

    def _write(self, make: Callable[[str, Part | None], Steps[Held | Known]], lines: list[Line] | tuple[()]) -> Part_[bool]:
        state, part = self._held.state, None
        if lines:
            part = part_of(self._keys.part(self._held.shard, state.epoch, state.seq + 1, self._me.nonce()), lines, ordered=True)
            if HABITS.part_before_state:
                yield Put(part.key, lines)
        got = yield from patient(lambda: make(self._me.nonce(), part))
        if isinstance(got, Known) and not HABITS.drops_what_it_lost and got.state.term is None and got.tag is not None:
            got = yield from patient(lambda: make_on(self._keys, got, self._me.nonce(), part))
        if not isinstance(got, Held):
            self._sim.saw("a shard was lost")
            return False
        if part is not None and not HABITS.part_before_state:
            yield Put(part.key, lines)
        self._held = got
        self._sim.checks.acknowledged(self._me, got, lines or self._journal)
        return True


def replace_bytes(part: Part) -> Part:
    """A journal that is still open: counts are what they were."""
    return Part(part.key, 0, part.lines, part.completed, part.failed, part.usage, part.ordered)


def make_on(keys: Keys, known: Known, nonce: str, part: Part | None) -> Steps[Held | Known]:
    """What must not be done: add a part to a state that another owner wrote."""
    assert known.tag is not None
    return protocol.record(keys, Held(known.shard, known.state, known.tag), nonce, add=part)


def user(sim: Simulation, me: Process) -> Run:
    """Waits for a run's results and until nobody works on it, takes them away, and starts the next one. Who takes results away while
    the run's processes still live may see a manifest again: nothing in S3 can hold that back.
    """
    for _ in range(30):
        yield Sleep(LEASE_S * me.rng.random())
        if sim.checks.vouched is not None and not sim.works_on(sim.checks.vouched.run):
            break
    else:
        return "nothing came"
    names = [OUTPUT, ERRORS]
    names.insert(0 if me.rng.random() < 0.8 else me.rng.randrange(3), MANIFEST)
    for name in names:
        yield Delete(name)
    if me.rng.random() < 0.8:
        sim.starts_another()
    return "took the results away"


def stranger(sim: Simulation, me: Process) -> Run:
    yield Sleep(LEASE_S * 4 * me.rng.random())
    name = me.rng.choice((OUTPUT, ERRORS, MANIFEST, MANIFEST))
    yield Drop(name, me.rng.choice((b"", b"mine\n", b"{}")))
    return "left a file"


def shards(lines: list[int]) -> list[Shard]:
    made: list[Shard] = []
    for count in lines:
        first = sum(shard.lines for shard in made)
        made.append(Shard(0, first, first + count, first + 1, first, count, first + count))
    return made

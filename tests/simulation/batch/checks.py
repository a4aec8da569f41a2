"""What must never be, looked at after every write, and what must have come about in the end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from banyan_runtime.batch.documents import FOLDER, OWNER, Keys, Owner, Shard, State
from banyan_runtime.batch.protocol import Claimed, Held, Published, Taken
from banyan_runtime.batch.records import ERRORS, MANIFEST, OUTPUT, Manifest, ResultFile, manifest_head
from tests.simulation.batch.process import Process
from tests.simulation.batch.store import Line, Object

if TYPE_CHECKING:
    from tests.simulation.batch.run import Simulation

RESULTS: Final = (OUTPUT, ERRORS, MANIFEST)
NOT_RUN: Final = frozenset({"cancelled", "expired", "failed", "too-many-errors"})


class Violation(AssertionError):
    """Something that must never be, was."""


class Checks:
    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self.vouched: Manifest | None = None  # the complete manifest that is there
        self._touched = False  # whether somebody took away or left a file since
        self.disturbed = False  # whether anybody ever did
        self.completed: set[str] = set()  # runs whose manifest was there
        self._acknowledged: defaultdict[tuple[str, int], dict[int, str]] = defaultdict(dict)
        self._answers: dict[tuple[str, int, str], None] = {}
        self._ran = 0

    # --- at every write ---

    def changed(self, key: str, before: Object | None, after: Object | None, by: Process | None) -> None:
        if by is not None and after is not None:
            by.wrote.append(key)
        if key == OWNER:
            self._owner_changed(before, after, by)
        if key not in RESULTS:
            return
        if by is None:  # a user or a stranger
            self._touched = self.disturbed = True
        elif before is not None and before.run != by.writing:
            assert by.owner is not None
            if not by.owner.overwrite and (before.run is None or before.run not in by.owner.previous):
                self._fail(f"{by.name} replaced {key} of {before.run or 'somebody'}, without having been told to overwrite")
        if key == MANIFEST:
            self._manifest_changed(before, after)
        if self.vouched is not None and not self._touched:
            self._compare(self.vouched)

    def _owner_changed(self, before: Object | None, after: Object | None, by: Process | None) -> None:
        assert after is not None
        assert by is not None
        was, now = Owner.decode(before.body) if before is not None else None, Owner.decode(after.body)
        if was is None:
            return
        over = was.finished or was.run in self.completed
        if was.run != now.run and not over and not by.claim.overwrite:
            self._fail(f"{by.name} took the output from the unfinished {was.run}, without having been told to overwrite")
        if was.run == now.run and was.finished and not now.finished and was.run in self.completed:
            self._fail(f"{by.name} says of the finished {was.run} that it is not")

    def _manifest_changed(self, before: Object | None, after: Object | None) -> None:
        head = manifest_head(after.body) if after is not None else None
        if after is None or after.run is None or head is None:
            self.vouched = None
            return
        if not head.complete:
            self.vouched, self._touched = None, False
            return
        self.vouched = manifest = Manifest.decode(after.body)
        self.completed.add(manifest.run)
        self._sim.saw(f"outcome {manifest.outcome}")
        if self._touched and before is not None and before.run == manifest.run:
            return  # somebody took results away while they were published: nothing helps
        self._touched = False
        self._compare(manifest)
        self._count(manifest)

    def _compare(self, manifest: Manifest) -> None:
        """The results are those of the manifest."""
        for name, said in ((OUTPUT, manifest.output), (ERRORS, manifest.errors)):
            there = self._sim.store.objects.get(name)
            if there is None:
                self._fail(f"the manifest of {manifest.run} vouches for {name}, which is not there")
            if ResultFile(name, there.tag, len(there.body), self._sim.store.digest(there.body), there.body.count(b"\n")) != said:
                self._fail(f"the manifest of {manifest.run} vouches for {name} as it is not: it is {there.run}'s")

    def _count(self, manifest: Manifest) -> None:
        """Every line is there once, in order, as it was acknowledged."""
        run, store = manifest.run, self._sim.store
        keys, seen = Keys(run), set[int]()
        shards = self._sim.plan(run).shards
        for name in (OUTPUT, ERRORS):
            last = -1
            for told in store.objects[name].body.decode().splitlines():
                whose, number, answer = told.split(" ")
                ordinal = int(number)
                if whose != run:
                    self._fail(f"{name} of {run} has a line of {whose}")
                if ordinal in seen:
                    self._fail(f"{run} has line {ordinal} twice")
                if ordinal < last:
                    self._fail(f"{name} of {run} is not in the input's order")
                seen.add(ordinal)
                last = ordinal
                shard = next(index for index, one in enumerate(shards) if one.first <= ordinal < one.first + one.lines)
                state = State.decode(store.objects[keys.state(shard)].body)
                self._line(run, shards[shard], shard, state, ordinal, answer)
        if len(seen) != (total := sum(shard.lines for shard in shards)):
            self._fail(f"{run} has {len(seen)} of {total} lines")
        if manifest.output.lines != manifest.request_counts.completed:
            self._fail(f"{run} counts {manifest.request_counts.completed} completed lines, and wrote {manifest.output.lines}")

    def _line(self, run: str, shard: Shard, number: int, state: State, ordinal: int, answer: str) -> None:
        kept = self._acknowledged[run, number].get(ordinal - shard.first)
        if kept is not None and answer != kept:
            self._fail(f"line {ordinal} of {run} was recorded as {kept}, and is published as {answer}")
        if answer in NOT_RUN and state.term != "frozen":
            self._fail(f"line {ordinal} of {run} is {answer}, but its shard is {state.term}")
        if answer not in NOT_RUN and (run, ordinal, answer) not in self._answers:
            self._fail(f"line {ordinal} of {run} has an answer that nobody gave")

    # --- what processes do ---

    def ran(self, me: Process, shard: Shard, number: int, epoch: int, one: int) -> Line:
        """A line is sent to the server."""
        run = me.writing
        self._ran += 1
        there = self._sim.store.objects.get(Keys(run).state(number))
        state = State.decode(there.body) if there is not None else State()
        if state.epoch == epoch and state.term is None and state.owner == me.name:  # else it was lost, and not yet noticed
            if one in self._acknowledged[run, number]:
                self._fail(f"{me.name} runs line {shard.first + one} of {run}, which was recorded")
            if self._is_durable(run, number, one):
                self._fail(f"{me.name} runs line {shard.first + one} of {run}, which is in a journal")
        answer = f"a{self._ran}"
        self._answers[run, shard.first + one, answer] = None
        return Line(one, self._sim.rng.random() < 0.7, answer)

    def _is_durable(self, run: str, number: int, one: int) -> bool:
        """Whether a journal had the line before anybody who wanted to take the shard measured how far it counts."""
        prefix = Keys(run).part(number, 0, 0, "").rpartition("/")[2][:6]
        store = self._sim.store
        for key, journal in store.journals.items():
            if key.startswith(f"{FOLDER}/{run}/parts/{prefix}"):
                counted = journal.lines[: store.measured.get(key)]
                if any(line.ordinal == one for line in counted):
                    return True
        return False

    def acknowledged(self, me: Process, held: Held, lines: Sequence[Line]) -> None:
        """The state names these lines, and its writer was told so."""
        kept = self._acknowledged[me.writing, held.shard]
        for line in lines:
            if kept.setdefault(line.ordinal, line.answer) != line.answer:
                self._fail(f"line {line.ordinal} of shard {held.shard} of {me.writing} was acknowledged twice")

    def removed(self, me: Process, key: str) -> None:
        run = key.removeprefix(f"{FOLDER}/").partition("/")[0]
        if run not in self.completed:
            self._fail(f"{me.name} removes a part of {run}, which has no manifest yet")

    # --- how processes end ---

    def claimed(self, me: Process, claimed: Claimed) -> None:
        if claimed.owner.run != me.claim.run and me.claim.run is not None:
            self._fail(f"{me.name} asked for {me.claim.run} and was given {claimed.owner.run}")

    def refused(self, me: Process, taken: Taken) -> None:
        self._sim.saw("a run was refused")
        owner = self._owner()
        if (taken.holder or "").partition(".")[0] == me.holder:
            self._fail(f"{me.name} was refused because of its own claim")
        if any(key != OWNER for key in me.wrote):
            self._fail(f"{me.name} was refused, but wrote {me.wrote}")
        if me.claim.overwrite and owner is not None and me.claim.run not in (owner.run, *owner.previous):
            self._fail(f"{me.name} may overwrite, and was refused")

    def displaced(self, me: Process, taken: Taken) -> None:
        """A run was refused when it wanted to publish."""
        self._sim.saw("a run was displaced")
        owner = self._owner()
        if owner is not None and owner.run == me.writing and not self.disturbed:
            self._fail(f"{me.name} could not publish {me.writing}, to which the output belongs: {taken}")

    def published(self, me: Process, published: Published) -> None:
        self._sim.saw("a run was published")
        if published.manifest.run != me.writing or me.writing not in self.completed:
            self._fail(f"{me.name} holds {me.writing} for published, and it is not")

    def removed_before(self, me: Process) -> None:
        self._sim.saw("a run's parts were gone")
        if me.writing not in self.completed or not self.disturbed:
            self._fail(f"{me.name} misses parts of {me.writing}, whose results are there or never were")

    # --- in the end ---

    def at_rest(self, fresh: Process) -> None:
        """Faults are over, everybody has ended, and `fresh` was started for the run to which the output belongs."""
        owner = self._owner()
        if owner is None:
            if not self.disturbed:
                self._fail(f"{fresh.name} ended with {fresh.ended}, and the output belongs to nobody")
            return
        if self.vouched is not None and self.vouched.run == owner.run:
            return
        if owner.finished and self.disturbed:
            return  # a user took the results away
        if self.strangers_in_the_way() and not owner.overwrite:
            return
        self._fail(f"{owner.run} is not published in the end: {fresh.name} {fresh.ended}, {fresh.told}")

    def strangers_in_the_way(self) -> bool:
        objects = self._sim.store.objects
        return any(name in objects and objects[name].run is None for name in RESULTS)

    def _owner(self) -> Owner | None:
        held = self._sim.store.objects.get(OWNER)
        return Owner.decode(held.body) if held is not None else None

    def _fail(self, text: str) -> None:
        raise Violation(text)

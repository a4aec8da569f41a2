"""The protocol of a run, without I/O, clock or chance: whose an output is, who works on which shard, what is finished, what is published.

Every procedure is a generator. It yields a call to the storage, is sent the answer, and returns what it decided; `executor.py`
carries the calls out on a store, and a simulator on one that loses answers, delays writes and crashes. Between two calls anything may
happen: the process may die, or be stopped for an hour while others go on. What holds nevertheless:

- Every mutable fact is one small object that is only written on the condition that it is as it was read, and each writing carries a
  nonce, so who meets a conflict can tell its own write, whose answer was lost, from another's.
- A shard's state names the parts with its finished lines. Parts are written before the state that names them and never again, under
  names that nobody else uses. What no state names does not exist.
- Who lost a shard drops what it has not yet recorded: the next owner runs those lines again.
- A shard ends once: `done` by its owner or `frozen` by whoever ends the run early. Results are a function of the ended states alone,
  so whoever merges makes the same bytes.
- The manifest is written last. Where another run was here before, a placeholder of the same run stands in its place before any result
  is written. So a run that was displaced cannot write its manifest any more once its successor has begun to replace results. Where
  nobody was before, there is none: whoever waits for the file `manifest.json` sees it when all is there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

import msgspec

from banyan_runtime.batch.documents import OWNER, Keys, Outcome, Owner, Part, Plan, Reason, State, Stop
from banyan_runtime.batch.records import ERRORS, MANIFEST, OUTPUT, Manifest, Publishing, manifest_head

MAX_PREVIOUS: Final = 16

# --- calls and their answers ---


@dataclass(frozen=True, slots=True)
class Read:
    """Answer: Found or None. Carried out until it is answered."""

    key: str


@dataclass(frozen=True, slots=True)
class Write:
    """Write `body` if the object's tag is still `if_match`, or if there is none (None). Answer: Written, LOST or UNCLEAR."""

    key: str
    body: bytes
    if_match: str | None


@dataclass(frozen=True, slots=True)
class Measure:
    """How far the journal `part` can be read. Answer: the part as it is, closed."""

    part: Part


@dataclass(frozen=True, slots=True)
class Look:
    """The tag of a result and the run that wrote it. Answer: Seen or None."""

    name: str


@dataclass(frozen=True, slots=True)
class Assemble:
    """Write the result `name` from the shards' ended states, on the condition of a Write. Answer: Assembled, whose tag is None if
    the condition did not hold, or if that is unclear; or GONE."""

    name: str
    states: Sequence[State]
    outcome: Outcome
    if_match: str | None


@dataclass(frozen=True, slots=True)
class Compare:
    """Whether the result that is there has the very bytes that Assemble would write. Answer: Assembled, whose tag is None if not, or
    if there is none any more; or GONE."""

    name: str
    states: Sequence[State]
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Found:
    body: bytes
    tag: str


@dataclass(frozen=True, slots=True)
class Seen:
    tag: str
    size: int
    run: str | None  # as the object says; None: it is not a run's result


@dataclass(frozen=True, slots=True)
class Written:
    tag: str


@dataclass(frozen=True, slots=True)
class Assembled:
    tag: str | None
    bytes: int
    sha256: str
    lines: int


class _Sign:
    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


LOST: Final = _Sign("LOST")  # the condition did not hold
UNCLEAR: Final = _Sign("UNCLEAR")  # no answer, or one that says nothing: it may have happened, or happen later
GONE: Final = _Sign("GONE")  # a part that a state names is not there any more

Call: TypeAlias = Read | Write | Measure | Look | Assemble | Compare
T = TypeVar("T")
Steps: TypeAlias = Generator[Call, Any, T]
MakeManifest: TypeAlias = Callable[["Assembled", "Assembled", Sequence[State], Outcome], Manifest]


def read(key: str) -> Steps[Found | None]:
    found = yield Read(key)
    assert found is None or isinstance(found, Found), found
    return found


def write(key: str, body: bytes, if_match: str | None) -> Steps[Written | Found | None]:
    """Write once, whatever becomes of the answers. Returns Written, or what is there in its stead (None: nothing is)."""
    while True:
        answer = yield Write(key, body, if_match)
        if isinstance(answer, Written):
            return answer
        assert answer in (LOST, UNCLEAR), answer
        found = yield from read(key)
        if found is not None and found.body == body:
            return Written(found.tag)  # ours: bodies carry a nonce
        if (found.tag if found is not None else None) != if_match:
            return found
        # as it was: the write got lost on its way, or met another one that came to nothing


# --- whose the output is ---


@dataclass(frozen=True, slots=True)
class Claim:
    """Who asks for an output."""

    run: str | None  # None: any name will do, and a run that was left unfinished by the same command is taken up
    new_run: str  # the name if it is a new one
    digest: str
    holder: str
    nonce: str
    started_at: str
    overwrite: bool = False


@dataclass(frozen=True, slots=True)
class Claimed:
    owner: Owner
    resumed: bool


@dataclass(frozen=True, slots=True)
class Published:
    """This run's results are there already."""

    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Taken:
    """Another run's, or somebody else's, results are in the way, or will be."""

    name: str  # of the object that says so
    run: str | None
    finished: bool
    holder: str | None = None
    started_at: str = ""


def claim_output(claim: Claim, gone: Iterable[str] = ()) -> Steps[Claimed | Published | Taken]:
    """Make the output this run's own, find that it is, or refuse. `gone`: holders that are known not to run any more."""
    gone = frozenset(gone)
    while True:
        held = yield from read(OWNER)
        manifest = yield from read(MANIFEST)
        said = manifest_head(manifest.body) if manifest is not None else None
        if manifest is not None and said is not None and said.complete and said.run == claim.run:
            return Published(Manifest.decode(manifest.body))
        owner = Owner.decode(held.body) if held is not None else None
        if owner is not None:
            published = said is not None and said.complete and said.run == owner.run
            left = claim.run is None and owner.digest == claim.digest and (owner.holder in (None, claim.holder) or owner.holder in gone)
            left = left and not (owner.damaged and claim.overwrite)
            if manifest is not None and published and left and not owner.finished:  # it died between its manifest and its last word
                return Published(Manifest.decode(manifest.body))
            finished = owner.finished or published
            if not finished and owner.run == claim.run and (owner.overwrite or not claim.overwrite):
                return Claimed(owner, resumed=True)
            if owner.finished and owner.run == claim.run and (yield from read(Keys(owner.run).plan)) is None:
                finished = False  # it ended before there was a plan, so nothing of it is lost
            if not finished and (left or owner.run == claim.run):
                overwrite = owner.overwrite or claim.overwrite
                renewed = msgspec.structs.replace(owner, nonce=claim.nonce, holder=claim.holder, finished=False, overwrite=overwrite)
                assert held is not None
                if isinstance((yield from write(OWNER, renewed.encode(), held.tag)), Written):
                    return Claimed(renewed, resumed=True)
                continue
            used = claim.run is not None and claim.run in (owner.run, *owner.previous)
            if used or (not finished and not claim.overwrite):
                return Taken(OWNER, owner.run, finished, owner.holder, owner.started_at)
        if not claim.overwrite:
            for name in (MANIFEST, OUTPUT, ERRORS):
                seen = yield Look(name)
                if seen is not None:
                    return Taken(name, seen.run or (owner.run if owner is not None else None), True)
        previous = [owner.run, *owner.previous][:MAX_PREVIOUS] if owner is not None else []
        mine = Owner(
            run=claim.run or claim.new_run,
            nonce=claim.nonce,
            digest=claim.digest,
            holder=claim.holder,
            started_at=claim.started_at,
            overwrite=claim.overwrite,
            previous=previous,
        )
        got = yield from write(OWNER, mine.encode(), None if held is None else held.tag)
        if isinstance(got, Written):
            return Claimed(mine, resumed=False)


def release_output(owner: Owner, nonce: str, *, finished: bool, unchanged: bool = False, damaged: bool = False) -> Steps[None]:
    """Say that nobody works on the run any more: it was left in good order, and the same command may take it up, or it is published.

    `damaged`: it was left because its parts cannot be read. `unchanged`: only if nobody has taken the run up since `owner` was read.
    """
    while True:
        held = yield from read(OWNER)
        there = Owner.decode(held.body) if held is not None else None
        if held is None or there is None or there.run != owner.run or (unchanged and there.nonce != owner.nonce):
            return
        finished, damaged = finished or there.finished, damaged or there.damaged
        left = msgspec.structs.replace(there, nonce=nonce, holder=None, finished=finished, damaged=damaged)
        if isinstance((yield from write(OWNER, left.encode(), held.tag)), Written):
            return


def settle_plan(keys: Keys, plan: Plan) -> Steps[Plan]:
    """The plan of the run: this one, or the one that was written before."""
    got = yield from write(keys.plan, plan.encode(), None)
    if isinstance(got, Written):
        return plan
    assert got is not None, "a plan is never removed"
    return Plan.decode(got.body, plan.run)


# --- shards ---


@dataclass(frozen=True, slots=True)
class Worker:
    """Who claims a shard."""

    name: str
    index: int | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """A shard as its owner last wrote it."""

    shard: int
    state: State
    tag: str


@dataclass(frozen=True, slots=True)
class Known:
    """A shard as it was last read; no state: it was not begun."""

    shard: int
    state: State
    tag: str | None


def look_at(keys: Keys, shard: int) -> Steps[Known]:
    found = yield from read(keys.state(shard))
    return Known(shard, State.decode(found.body, keys.state(shard)), found.tag) if found is not None else Known(shard, State(), None)


def claim_shard(keys: Keys, known: Known, me: Worker, nonce: str, *, journal: bool) -> Steps[Held | Known]:
    """Take a shard that is free or whose owner is given up. Returns it, or how it is now if another was faster.

    `journal`: finished lines go into a journal that grows (a folder), not into a new part at each checkpoint.
    """
    was = known.state
    assert was.term is None, "an ended shard has no owner"
    parts = yield from _closed(was)
    epoch = was.epoch + 1
    opened = Part(keys.part(known.shard, epoch, 0, nonce), ordered=False) if journal else None
    state = State(epoch, me.name, me.index, nonce, was.seq + 1, parts, opened)
    return (yield from _advance(keys, known, state))


def record(keys: Keys, held: Held, nonce: str, *, add: Part | None = None, open: Part | None = None) -> Steps[Held | Known]:
    """A checkpoint of the owner: another part that was written, or how far its journal is. Without either it shows that the owner lives."""
    was = held.state
    parts = was.parts if add is None else [*was.parts, add]
    state = State(was.epoch, was.owner, was.index, nonce, was.seq + 1, parts, open or was.open)
    return (yield from _advance(keys, Known(held.shard, was, held.tag), state))


def finish(keys: Keys, held: Held, nonce: str, *, add: Part | None = None, closed: Part | None = None) -> Steps[Held | Known]:
    """All lines of the shard have their outcome; `closed` is the journal as it ended."""
    return (yield from _leave(keys, held, nonce, add, closed, done=True))


def give_back(keys: Keys, held: Held, nonce: str, *, add: Part | None = None, closed: Part | None = None) -> Steps[Held | Known]:
    """The owner goes before all lines are done; another may take the shard at once."""
    return (yield from _leave(keys, held, nonce, add, closed, done=False))


def _leave(keys: Keys, held: Held, nonce: str, add: Part | None, closed: Part | None, *, done: bool) -> Steps[Held | Known]:
    was = held.state
    assert (was.open is None) == (closed is None), "an open journal is closed with its shard"
    parts = [*was.parts, *(part for part in (add, closed) if part is not None and part.bytes)]  # an empty journal has perhaps no file
    state = State(was.epoch, None, was.index, nonce, was.seq + 1, parts, None, "done" if done else None)
    return (yield from _advance(keys, Known(held.shard, was, held.tag), state))


def freeze(keys: Keys, shard: int, nonce: str) -> Steps[State]:
    """End a shard as it is, whoever works on it; one that has ended stays as it ended."""
    while True:
        known = yield from look_at(keys, shard)
        was = known.state
        if was.term is not None:
            return was
        parts = yield from _closed(was)
        state = State(was.epoch + 1, None, None, nonce, was.seq + 1, parts, None, "frozen")
        got = yield from _advance(keys, known, state)
        if isinstance(got, Held):
            return got.state


def _closed(state: State) -> Steps[list[Part]]:
    """The parts of a shard whose owner is to lose it. What it still adds to its journal will not be read."""
    if state.open is None:
        return state.parts
    part = yield Measure(state.open)
    assert isinstance(part, Part), part
    return [*state.parts, part] if part.bytes else state.parts


def _advance(keys: Keys, known: Known, state: State) -> Steps[Held | Known]:
    got = yield from write(keys.state(known.shard), state.encode(), known.tag)
    if isinstance(got, Written):
        return Held(known.shard, state, got.tag)
    if got is None:  # somebody removed it; it is as if it had not been begun
        return Known(known.shard, State(), None)
    return Known(known.shard, State.decode(got.body, keys.state(known.shard)), got.tag)


# --- the end ---


def stop_run(keys: Keys, stop: Stop) -> Steps[Reason]:
    """Tell all workers that the run ends early; returns why, which the first to say so decides."""
    got = yield from write(keys.stop, stop.encode(), None)
    return stop.reason if not isinstance(got, Found) else Stop.decode(got.body).reason


@dataclass(frozen=True, slots=True)
class Unfinished:
    """There are shards that have not ended."""

    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Removed:
    """What the run had recorded is not there any more: it was published, and its results were taken away since."""


def outcome_of(plan: Plan, states: Sequence[State], stopped: Reason | None) -> Outcome | None:
    """How a run ended. One that was stopped after its last line was done is complete. None: it was stopped, and nothing tells why."""
    if plan.too_many(sum(state.failed for state in states)):
        return "too-many-errors"
    if missing(plan, states) == 0:
        return "completed"
    return stopped


def missing(plan: Plan, states: Sequence[State]) -> int:
    """Lines that were not run."""
    kept = plan.completes.lines if plan.completes is not None else 0
    return plan.total - kept - sum(state.completed + state.failed for state in states)


def merge(keys: Keys, owner: Owner, plan: Plan, make: MakeManifest, nonce: str) -> Steps[Published | Taken | Unfinished | Removed]:
    """Publish the results once every shard has ended: output, errors, then the manifest."""
    there: Found | None = yield from read(MANIFEST)
    if (mine := _own(there, owner)) is not None:
        return Published(mine)
    states = []
    for shard in range(len(plan.shards)):
        states.append((yield from look_at(keys, shard)).state)
    if unfinished := tuple(shard for shard, state in enumerate(states) if state.term is None):
        return Unfinished(unfinished)
    stop = yield from read(keys.stop)
    outcome = outcome_of(plan, states, Stop.decode(stop.body).reason if stop is not None else None)
    if outcome is None:  # what said so is not there any more
        return (yield from _removed(owner))
    for attempt in itertools.count():
        below: str | None = None  # the tag of what stands where the manifest will
        if there is not None or owner.overwrite or owner.previous:
            placed = yield from _place(owner, there, f"{nonce}-{attempt}")
            if not isinstance(placed, Written):
                return placed
            below = placed.tag
        results = []
        for name in (OUTPUT, ERRORS):
            got = yield from _assemble(name, owner, states, outcome)
            if not isinstance(got, Assembled):
                return got
            results.append(got)
        if (taken := (yield from _displaced(owner))) is not None:
            return taken
        manifest = make(results[0], results[1], states, outcome)
        wrote = yield from write(MANIFEST, manifest.encode(), below)
        if isinstance(wrote, Written):
            return Published(manifest)
        there = wrote  # another worker of this run was faster, or our placeholder was removed or replaced
    raise AssertionError("unreachable")


def _own(found: Found | None, owner: Owner) -> Manifest | None:
    """The manifest that was found, if it is this run's."""
    head = manifest_head(found.body) if found is not None else None
    return Manifest.decode(found.body) if found is not None and head is not None and head.complete and head.run == owner.run else None


def _place(owner: Owner, found: Found | None, nonce: str) -> Steps[Written | Published | Taken]:
    """Put our placeholder where the manifest will stand: from then on no run that was displaced can write its own.

    Each attempt writes another one, so none that comes late can be taken for that on which a manifest was to be written.
    """
    for attempt in itertools.count():
        head = manifest_head(found.body) if found is not None else None
        if found is not None and head is not None and head.run == owner.run:
            return Published(Manifest.decode(found.body)) if head.complete else Written(found.tag)
        if (taken := (yield from _displaced(owner))) is not None:
            return taken
        if found is not None and not _may_replace(owner, head.run if head is not None else None):
            return Taken(MANIFEST, head.run if head is not None else None, head is not None and head.complete)
        body = Publishing(owner.run, f"{nonce}-{attempt}").encode()
        answer = yield Write(MANIFEST, body, found.tag if found is not None else None)
        if isinstance(answer, Written):
            return answer
        found = yield from read(MANIFEST)
    raise AssertionError("unreachable")


def _assemble(name: str, owner: Owner, states: Sequence[State], outcome: Outcome) -> Steps[Assembled | Published | Taken | Removed]:
    """Write one result, unless an earlier attempt of this run has."""
    while True:
        seen = yield Look(name)
        if seen is not None:
            there = yield Compare(name, states, outcome)
            if there is GONE:
                return (yield from _removed(owner))
            assert isinstance(there, Assembled), there
            # another run's is written anew although its bytes are right: who was displaced may still wait to replace just that object
            if there.tag is not None and (seen.run == owner.run or not _may_replace(owner, seen.run)):
                return there
            # what is not ours is replaced only while the output is: a successor claims it before it writes
            if (taken := (yield from _displaced(owner))) is not None:
                return taken
            if seen.run != owner.run and not _may_replace(owner, seen.run):
                return Taken(name, seen.run, False)
        got = yield Assemble(name, states, outcome, seen.tag if seen is not None else None)
        if got is GONE:
            return (yield from _removed(owner))
        assert isinstance(got, Assembled), got
        if got.tag is not None:
            return got


def _may_replace(owner: Owner, run: str | None) -> bool:
    """Whether what another run, or somebody else, has left or still writes may be replaced."""
    return owner.overwrite or run in owner.previous


def _removed(owner: Owner) -> Steps[Published | Taken | Removed]:
    """Parts are removed when the run is published: another worker of it was faster."""
    if (mine := _own((yield from read(MANIFEST)), owner)) is not None:
        return Published(mine)
    return (yield from _displaced(owner)) or Removed()


def _displaced(owner: Owner) -> Steps[Taken | None]:
    """Whether another run has taken the output."""
    held = yield from read(OWNER)
    there = Owner.decode(held.body) if held is not None else None
    return None if there is not None and there.run == owner.run else Taken(OWNER, there.run if there is not None else None, False)

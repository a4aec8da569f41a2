"""Defects, each put in with one small patch: what the simulation has to find, and what it cannot find because it does no harm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import msgspec
import pytest

from banyan_runtime.batch import protocol
from banyan_runtime.batch.documents import Keys, Owner, Part, Plan, State
from banyan_runtime.batch.protocol import (
    LOST,
    Assemble,
    Assembled,
    Claim,
    Compare,
    Found,
    Held,
    Known,
    Look,
    Published,
    Steps,
    Taken,
    Unfinished,
    Write,
    Written,
)
from banyan_runtime.batch.records import ERRORS, MANIFEST, OUTPUT
from tests.simulation.batch import run, store
from tests.simulation.batch.programs import HABITS
from tests.simulation.batch.store import ANY, Line, Store

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Plant:
    defect: str
    patch: Patch
    says: str  # what the simulation says of it, as a pattern
    within: int  # schedules
    crowded: bool | None = None  # needs several runs that displace each other within a moment
    seed: int = 1  # where thousands of schedules are needed from 1 on, one that shows it, so that the test is quick


def _unconditional(key: str, body: bytes, if_match: str | None) -> Steps[Written]:
    while True:
        answer = yield Write(key, body, ANY)
        if isinstance(answer, Written):
            return answer


def _advance_without_condition(keys: Keys, known: Known, state: State) -> Steps[Held]:
    wrote = yield from _unconditional(keys.state(known.shard), state.encode(), None)
    return Held(known.shard, state, wrote.tag)


def _only_within(patch: pytest.MonkeyPatch, procedure: str, name: str, instead: Any) -> None:
    """Replace `name` for as long as a step of `procedure` is taken."""
    real, was = getattr(protocol, procedure), getattr(protocol, name)

    def patched(*arguments: Any, **named: Any) -> Steps[Any]:
        steps, answer = real(*arguments, **named), None
        while True:
            setattr(protocol, name, instead)
            try:
                call = steps.send(answer)
            except StopIteration as end:
                return end.value
            finally:
                setattr(protocol, name, was)
            answer = yield call

    patch.setattr(protocol, procedure, patched)


def no_fencing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(protocol, "_advance", _advance_without_condition)


def checkpoint_without_condition(patch: pytest.MonkeyPatch) -> None:
    _only_within(patch, "record", "_advance", _advance_without_condition)
    _only_within(patch, "_leave", "_advance", _advance_without_condition)


def shard_claimed_without_condition(patch: pytest.MonkeyPatch) -> None:
    _only_within(patch, "claim_shard", "_advance", _advance_without_condition)


def frozen_without_condition(patch: pytest.MonkeyPatch) -> None:
    _only_within(patch, "freeze", "_advance", _advance_without_condition)


def output_claimed_without_condition(patch: pytest.MonkeyPatch) -> None:
    _only_within(patch, "claim_output", "write", _unconditional)


def state_before_its_part(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HABITS, "part_before_state", False)


def lost_lines_added_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HABITS, "drops_what_it_lost", False)


def parts_removed_before_the_manifest(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HABITS, "manifest_before_removal", False)


def parts_removed_before_it_is_said(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HABITS, "finished_before_removal", False)


def parts_by_prefix(patch: pytest.MonkeyPatch) -> None:
    real = store.rendered

    def rendered(where: Store, plan: Plan, name: str, states: Sequence[State], outcome: Any) -> tuple[bytes, int] | None:
        keys, listed = Keys(plan.run), []
        for number, state in enumerate(states):
            prefix = keys.part(number, 0, 0, "").removesuffix("-0-0-.records")
            found = [Part(key) for key in where.parts if key.startswith(prefix)]
            found += [Part(key, len(one.lines)) for key, one in where.journals.items() if key.startswith(prefix)]
            listed.append(State(term=state.term, parts=found))
        return real(where, plan, name, listed, outcome)

    patch.setattr(run, "rendered", rendered)


def missing_parts_passed_over(patch: pytest.MonkeyPatch) -> None:
    def lines_of(self: Store, state: State) -> list[Line]:
        there = [part for part in state.parts if part.key in self.parts or part.key in self.journals]
        return real(self, State(parts=there)) or []

    real = Store.lines_of
    patch.setattr(Store, "lines_of", lines_of)


def manifest_before_the_results(patch: pytest.MonkeyPatch) -> None:
    def merge(keys: Keys, owner: Owner, plan: Plan, make: Any, nonce: str) -> Steps[Published | Taken | Unfinished]:
        states = []
        for shard in range(len(plan.shards)):
            states.append((yield from protocol.look_at(keys, shard)).state)
        if unfinished := tuple(shard for shard, state in enumerate(states) if state.term is None):
            return Unfinished(unfinished)
        outcome = protocol.outcome_of(plan, states, "cancelled")
        there: list[Assembled] = []
        for name in (OUTPUT, ERRORS):
            there.append((yield Compare(name, states, outcome)))
        manifest = make(*there, states, outcome)
        yield from protocol.write(MANIFEST, manifest.encode(), None)
        for name in (OUTPUT, ERRORS):
            yield Assemble(name, states, outcome, None)
        return Published(manifest)

    patch.setattr(protocol, "merge", merge)


def no_placeholder(patch: pytest.MonkeyPatch) -> None:
    """The condition of the manifest is what was there when the merge began."""

    def place(owner: Owner, found: Found | None, nonce: str) -> Steps[Written]:
        return Written(found.tag if found is not None else None)  # type: ignore[arg-type]
        yield

    patch.setattr(protocol, "_place", place)


def results_without_condition(patch: pytest.MonkeyPatch) -> None:
    def assemble(name: str, owner: Owner, states: Sequence[State], outcome: Any) -> Steps[Assembled]:
        while True:
            got = yield Assemble(name, states, outcome, ANY)
            if isinstance(got, Assembled) and got.tag is not None:
                return got

    patch.setattr(protocol, "_assemble", assemble)


def manifest_without_condition(patch: pytest.MonkeyPatch) -> None:
    real = protocol.write
    patch.setattr(protocol, "write", lambda key, body, tag: (_unconditional if key == MANIFEST else real)(key, body, tag))


def displaced_and_not_noticed(patch: pytest.MonkeyPatch) -> None:
    def displaced(owner: Owner) -> Steps[None]:
        return None
        yield

    patch.setattr(protocol, "_displaced", displaced)


def predictable_part_names(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Keys, "part", lambda self, shard, epoch, seq, nonce: f"{self.folder}parts/{shard:06}-{seq}.records")


def journal_not_measured(patch: pytest.MonkeyPatch) -> None:
    """Who takes a shard counts what the last checkpoint said of its journal."""

    def closed(state: State) -> Steps[list[Part]]:
        return state.parts
        yield

    patch.setattr(protocol, "_closed", closed)


def no_read_back(patch: pytest.MonkeyPatch) -> None:
    def write(key: str, body: bytes, if_match: str | None) -> Steps[Written | Found | None]:
        while True:
            answer = yield Write(key, body, if_match)
            if isinstance(answer, Written):
                return answer
            found = yield from protocol.read(key)
            if answer is LOST or (found.tag if found is not None else None) != if_match:
                return found

    patch.setattr(protocol, "write", write)


def anybodys_file_is_replaced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(protocol, "_may_replace", lambda owner, run: owner.overwrite or bool(owner.previous))


def a_late_release_counts(patch: pytest.MonkeyPatch) -> None:
    def release(owner: Owner, nonce: str, *, finished: bool) -> Steps[None]:
        while True:
            held = yield from protocol.read(protocol.OWNER)
            if held is None or Owner.decode(held.body).run != owner.run:
                return
            left = msgspec.structs.replace(Owner.decode(held.body), nonce=nonce, holder=None, finished=finished)
            if isinstance((yield from protocol.write(protocol.OWNER, left.encode(), held.tag)), Written):
                return

    patch.setattr(protocol, "release_output", release)


def another_runs_empty_file_is_ours(patch: pytest.MonkeyPatch) -> None:
    real = protocol._assemble

    def assemble(name: str, owner: Owner, states: Sequence[State], outcome: Any) -> Steps[Any]:
        steps, answer = real(name, owner, states, outcome), None
        while True:
            try:
                call = steps.send(answer)
            except StopIteration as end:
                return end.value
            answer = yield call
            if isinstance(call, Look) and answer is not None:
                there = yield Compare(name, states, outcome)
                if isinstance(there, Assembled) and there.tag is not None:
                    return there

    patch.setattr(protocol, "_assemble", assemble)


def empty_results_are_alike(patch: pytest.MonkeyPatch) -> None:
    """In a bucket all empty objects have one ETag, so who was displaced between its last look at the owner and the request that
    replaces an empty file can still replace its successor's. No condition of S3 tells the two apart; the manifest's hash does."""
    real = Store._tag
    patch.setattr(Store, "_tag", lambda self, body: self.digest(body) if not body and not self.journal else real(self, body))


def parts_that_are_gone_end_the_process(patch: pytest.MonkeyPatch) -> None:
    def removed(owner: Owner) -> Steps[None]:
        raise AssertionError("a part is not there")
        yield

    patch.setattr(protocol, "_removed", removed)


def own_claim_not_known(patch: pytest.MonkeyPatch) -> None:
    """What a lost answer hides of a claim is met by the next attempt of the same process as somebody else's."""
    real, attempts = protocol.claim_output, count()

    def claim_output(claim: Claim, gone: Any = ()) -> Steps[Any]:
        return (yield from real(replace(claim, holder=f"{claim.holder}.{next(attempts)}"), gone))

    patch.setattr(protocol, "claim_output", claim_output)


def empty_journal_named(patch: pytest.MonkeyPatch) -> None:
    def leave(keys: Keys, held: Held, nonce: str, add: Part | None, closed: Part | None, *, done: bool) -> Steps[Held | Known]:
        was = held.state
        parts = [*was.parts, *(part for part in (add, closed) if part is not None)]
        state = State(was.epoch, None, was.index, nonce, was.seq + 1, parts, None, "done" if done else None)
        return (yield from protocol._advance(keys, Known(held.shard, was, held.tag), state))

    patch.setattr(protocol, "_leave", leave)


PLANTS = (
    Plant("the state of a shard is written without condition", no_fencing, "line|vouches for|frozen", 500),
    Plant("a checkpoint is written without condition", checkpoint_without_condition, "line|vouches for|frozen", 500),
    Plant("a shard is claimed without condition", shard_claimed_without_condition, "line|vouches for|frozen", 500),
    Plant("a shard is frozen without condition", frozen_without_condition, "line|vouches for|frozen", 3000),
    Plant("an output is claimed without condition", output_claimed_without_condition, "", 3000),
    Plant("the state names a part before it is written", state_before_its_part, "", 3000),
    Plant("lines of a lost shard are added to its next owner's", lost_lines_added_again, "line|twice|frozen", 3000),
    Plant("parts are removed before the manifest is written", parts_removed_before_the_manifest, "which has no manifest yet", 100),
    Plant(
        "parts are removed before the owner says that the run is finished",
        parts_removed_before_it_is_said,
        "removed before",
        10000,
        seed=3230906571,
    ),
    Plant("a merge lists parts by prefix", parts_by_prefix, "line|vouches for", 3000),
    Plant("a merge passes over parts that are gone", missing_parts_passed_over, "line|vouches for", 3000),
    Plant("the manifest is written before the results", manifest_before_the_results, "vouches for", 100),
    Plant("no placeholder stands where results are replaced", no_placeholder, "vouches for", 3000),
    Plant("results are written without condition", results_without_condition, "vouches for|replaced", 3000),
    Plant("the manifest is written without condition", manifest_without_condition, "", 3000),
    Plant("a run does not notice that it was displaced", displaced_and_not_noticed, "", 3000),
    Plant("names of parts can be foretold", predictable_part_names, "", 3000),
    Plant("a journal is not measured when its shard is taken", journal_not_measured, "", 3000),
    Plant("what a lost answer hides is not read back", no_read_back, "", 3000),
    Plant("a run with a predecessor replaces anybody's file", anybodys_file_is_replaced, "without having been", 10000, seed=1582107685),
    Plant("a late release says that a finished run is not", a_late_release_counts, "that it is not", 3000),
    Plant("parts that are gone are an error", parts_that_are_gone_end_the_process, "a part is not there", 3000),
    Plant("a process does not know its own claim", own_claim_not_known, "its own claim", 3000),
    Plant("a journal without lines is named", empty_journal_named, "misses parts", 3000),
    Plant("another run's empty file is taken for ours", another_runs_empty_file_is_ours, "vouches for", 10000, True, 3184864899),
    Plant("all empty results have one tag", empty_results_are_alike, "vouches for", 10000, True, 2995158575),
)

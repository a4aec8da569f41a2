"""Which shard a worker takes up next, on a clock of the test's own."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace

import pytest

from banyan_runtime.batch import worker
from banyan_runtime.batch.documents import Part, State
from banyan_runtime.batch.leases import Leases
from banyan_runtime.batch.protocol import Known
from banyan_runtime.batch.records import Usage


def owned(shard: int, tag: str, by: str = "other") -> Known:
    return Known(shard, State(epoch=1, owner=by), tag)


def nobody(_: str) -> bool:
    return False


def test_a_shard_that_nobody_has_comes_before_one_whose_owner_is_silent() -> None:
    leases = Leases(3, lease_s=10)
    leases.note(owned(0, "a"), now=0)
    assert leases.next({1}, 100, nobody) == 2
    assert leases.next({1, 2}, 100, nobody) == 0


def test_an_owner_is_given_up_when_its_state_has_not_changed_for_the_lease() -> None:
    leases = Leases(1, lease_s=10)
    leases.note(owned(0, "a"), now=0)
    leases.note(owned(0, "a"), now=9)
    assert leases.next((), 9.9, nobody) is None
    assert leases.next_expiry((), 9.0) == 1.0
    assert leases.next((), 10.0, nobody) == 0
    leases.note(owned(0, "b"), now=10)
    assert leases.next((), 19.0, nobody) is None


def test_nobodys_silence_counts_while_nobody_could_be_seen() -> None:
    leases = Leases(1, lease_s=10)
    leases.note(owned(0, "a"), now=0)
    leases.forgive(300)  # the storage was away
    assert leases.next((), 305, nobody) is None
    assert leases.next((), 310, nobody) == 0


def test_who_is_known_to_have_ended_is_given_up_at_once() -> None:
    leases = Leases(1, lease_s=10)
    leases.note(owned(0, "a", by="dead"), now=0)
    assert leases.next((), 0, lambda owner: owner == "dead") == 0


def test_what_a_dead_worker_had_begun_comes_before_what_nobody_has() -> None:
    leases = Leases(3, lease_s=10)
    leases.note(owned(2, "a", by="dead"), now=0)
    assert leases.next((), 0, lambda owner: owner == "dead") == 2


def test_workers_do_not_all_begin_with_the_same_shard() -> None:
    first = [Leases(1000, lease_s=10, index=index).next((), 0, nobody) for index in range(16)]
    ordered = sorted(one for one in first if one is not None)
    assert len(ordered) == 16
    assert min(later - earlier for earlier, later in itertools.pairwise(ordered)) > 20
    assert {Leases(2, lease_s=10, index=index).next((), 0, nobody) for index in range(16)} == {0, 1}


def test_sums_follow_the_states() -> None:
    leases = Leases(2, lease_s=10)
    leases.note(Known(0, State(owner="o", parts=[Part("p", completed=3, failed=1, usage=Usage(completion_tokens=5))]), "a"), 0)
    leases.note(Known(1, State(parts=[Part("q", completed=2)], term="done"), "b"), 0)
    leases.note(Known(0, State(parts=[Part("p", completed=4, failed=2, usage=Usage(completion_tokens=9))], term="done"), "c"), 1)
    totals = leases.totals
    assert (totals.completed, totals.failed, totals.ended, totals.usage.completion_tokens) == (6, 2, 2, 9)
    assert not leases.open


def test_a_line_waits_where_others_may_have_taken_its_shard_until_it_is_seen_to_be_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others count from the last write, however short this process stood still; and from the claim, where nothing was written since."""
    now = 0.0
    monkeypatch.setattr(worker.time, "monotonic", lambda: now)

    async def scenario() -> None:
        nonlocal now
        run = SimpleNamespace(ours_at=0.0, confirmed=asyncio.Event())
        one = SimpleNamespace(_pace=SimpleNamespace(lease_s=30.0), _dirty=asyncio.Event())
        now = 29.0
        await worker.Worker._sure(one, run)  # type: ignore[arg-type]
        assert not one._dirty.is_set()
        now = 38.9
        line = asyncio.ensure_future(worker.Worker._sure(one, run))  # type: ignore[arg-type]
        await one._dirty.wait()
        run.confirmed.set()  # a write that began too long ago
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not line.done()
        run.ours_at = 38.0
        run.confirmed.set()
        await line

    asyncio.run(scenario())

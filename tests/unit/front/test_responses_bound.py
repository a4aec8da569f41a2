"""How much is kept of responses: the oldest give way to new ones, and to whatever else lies on their disk."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from banyan_runtime.batch.host.reserve import Reserve
from banyan_runtime.front.openai.responses import store
from banyan_runtime.front.openai.responses.quota import BLOCK_BYTES
from banyan_runtime.front.openai.responses.store import ResponseStore, most_bytes, new_id
from banyan_runtime.storage.local import LocalStore
from banyan_runtime.storage.store import Unreachable
from tests.unit.front.kept import NOW, Clock, files, record, status
from tests.unit.front.support import run

BLOCKS = 10
MOST = BLOCKS * BLOCK_BYTES  # a record of these tests takes one block


def bounded(folder: Path, clock: Clock, **options: Any) -> ResponseStore:
    return ResponseStore(str(folder), clock=clock, most_bytes=MOST, **options)


def test_the_oldest_give_way_as_responses_are_written(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock, ids = Clock(), []
        kept = bounded(tmp_path, clock)
        for _ in range(40):
            clock.now += 1  # of an hour's sweep there is none
            ids.append(new_id(clock.now))
            kept.save(ids[-1], record())
            await kept.settle()
            assert len(files(tmp_path)) <= BLOCKS
        assert files(tmp_path) == sorted(ids[-len(files(tmp_path)) :])
        assert len(files(tmp_path)) >= BLOCKS * 0.8
        for here in (kept, bounded(tmp_path, clock)):  # and elsewhere, or after a restart
            assert [await here.load(one) is not None for one in ids] == [one in files(tmp_path) for one in ids]

    run(scenario)


def test_one_that_is_on_its_way_while_room_is_made_for_the_next_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true_put, true_sweep = LocalStore.put, ResponseStore._sweep
    looked = threading.Event()

    def put(self: LocalStore, *asked: Any, **options: Any) -> Any:
        assert looked.wait(10)
        return true_put(self, *asked, **options)

    def sweep(self: ResponseStore, *asked: Any) -> int:
        try:
            return true_sweep(self, *asked)
        finally:
            looked.set()

    async def scenario() -> None:
        clock = Clock()
        kept = bounded(tmp_path, clock)
        for turn in range(3 * BLOCKS):
            clock.now += 1
            kept.save(new_id(clock.now), record())
            if turn % 2:  # two at once: the second makes room while the first, for which there was some, is on its way
                await kept.settle()
                looked.clear()
            elif turn == 0:
                await kept.settle()
                monkeypatch.setattr(ResponseStore, "_sweep", sweep)
                monkeypatch.setattr(LocalStore, "put", put)
            assert len(files(tmp_path)) <= BLOCKS

    run(scenario)


def test_one_that_is_larger_than_the_bound_keeps_no_other_out(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = Clock()
        kept = bounded(tmp_path, clock)
        for _ in range(BLOCKS):
            clock.now += 1
            kept.save(new_id(clock.now), record())
            await kept.settle()
        clock.now += 1
        kept.save(new_id(clock.now), record(size=MOST))
        await kept.settle()
        kept.save(one := new_id(clock.now), record())
        await kept.settle()
        assert one in files(tmp_path)

    run(scenario)


def test_what_an_earlier_server_left_counts(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = Clock()
        before = ResponseStore(str(tmp_path), clock=clock)
        for _ in range(40):
            clock.now += 1
            before.save(new_id(clock.now), record())
        await before.settle()
        clock.now += 1
        bounded(tmp_path, clock).save(one := new_id(clock.now), record())
        await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()})
        assert len(files(tmp_path)) <= BLOCKS
        assert one in files(tmp_path)

    run(scenario)


def test_a_response_that_runs_stays_though_it_is_the_oldest(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = Clock()
        running = new_id(clock.now)
        kept = bounded(tmp_path, clock, live={running: None})
        kept.save(running, record("in_progress", background=True))
        for _ in range(40):
            clock.now += 1
            kept.save(new_id(clock.now), record())
            await kept.settle()
        kept.save(running, record("completed", background=True))
        await kept.settle()
        assert not kept.was_removed(running)
        assert status(await bounded(tmp_path, clock).load(running)) == "completed"

    run(scenario)


def test_a_response_larger_than_the_bound_is_kept_in_memory_and_pushes_nobody_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        kept, ids = bounded(tmp_path, Clock()), [new_id(NOW), new_id(NOW)]
        kept.save(ids[0], record())
        await kept.settle()
        kept.save(ids[1], record(size=MOST))
        await kept.settle()
        assert files(tmp_path) == [ids[0]]
        assert [status(await kept.load(one)) for one in ids] == ["completed"] * 2

    with caplog.at_level(logging.WARNING, "banyan"):
        run(scenario)
    assert f"--response-store-bytes={MOST}" in caplog.text


def test_nothing_is_written_while_what_is_there_cannot_be_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def away(self: LocalStore, prefix: str) -> Any:
        tried.append(prefix)
        raise Unreachable(self.uri(prefix), "it is away")

    async def scenario() -> None:
        clock, ids = Clock(), [new_id(NOW) for _ in range(20)]
        kept = bounded(tmp_path, clock)
        with monkeypatch.context() as outage:
            outage.setattr(LocalStore, "list", away)
            for one in ids:
                kept.save(one, record())
                await kept.settle()
            assert (files(tmp_path), len(tried)) == ([], 1)
        assert [status(await kept.load(one)) for one in ids] == ["completed"] * 20
        clock.now += store.NO_ROOM_S
        kept.save(one := new_id(clock.now), record())
        await kept.settle()
        assert files(tmp_path) == [one]

    run(scenario)


def test_the_last_bytes_of_a_disk_are_left_to_files_and_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free = [store.LEFT_BYTES + (1 << 20)]
    monkeypatch.setattr(Reserve, "free", property(lambda self: free[0]))

    async def scenario() -> None:
        clock = Clock()
        kept, ids = bounded(tmp_path, clock), [new_id(NOW) for _ in range(5)]
        kept.save(ids[0], record())
        await kept.settle()
        free[0] = store.LEFT_BYTES - (1 << 20)
        for one in ids[1:]:
            kept.save(one, record())
            await kept.settle()
        assert files(tmp_path) == ids[:1]
        assert [status(await kept.load(one)) for one in ids] == ["completed"] * 5
        free[0] = store.LEFT_BYTES + (1 << 20)
        kept.save(late := new_id(NOW), record())
        await kept.settle()
        assert files(tmp_path) == sorted([ids[0], late])

    with caplog.at_level(logging.WARNING, "banyan"):
        run(scenario)
    (told,) = caplog.messages
    assert "64 MiB" in told
    assert "--response-store-bytes" in told


def test_on_a_disk_that_is_full_of_responses_the_oldest_give_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever they may take; where they are not what fills it, none goes in vain."""
    others = [0]
    size = store.LEFT_BYTES + 20 * BLOCK_BYTES
    monkeypatch.setattr(Reserve, "free", property(lambda self: size - others[0] - BLOCK_BYTES * len(files(tmp_path))))

    async def scenario() -> None:
        clock, ids = Clock(), []
        kept = ResponseStore(str(tmp_path), clock=clock, most_bytes=1 << 30)
        for _ in range(50):
            clock.now += 1
            ids.append(new_id(clock.now))
            kept.save(ids[-1], record())
            await kept.settle()
            assert files(tmp_path)[-1] == ids[-1]
        assert 16 <= len(files(tmp_path)) <= 20
        left, others[0] = files(tmp_path), 60 * BLOCK_BYTES
        clock.now += store.NO_ROOM_S
        kept.save(new_id(clock.now), record())
        await kept.settle()
        assert files(tmp_path) == left

    run(scenario)


def test_several_that_find_the_disk_full_at_once_make_room_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = store.LEFT_BYTES + 40 * BLOCK_BYTES
    monkeypatch.setattr(Reserve, "free", property(lambda self: size - BLOCK_BYTES * len(files(tmp_path))))

    async def scenario() -> None:
        clock, ids = Clock(), [new_id(NOW + number) for number in range(44)]
        kept = ResponseStore(str(tmp_path), clock=clock, most_bytes=1 << 30)
        for one in ids[:40]:
            kept.save(one, record())
            await kept.settle()
        for one in ids[40:]:
            kept.save(one, record())
        await kept.settle()
        assert {*ids[40:]} <= {*files(tmp_path)}
        assert len(files(tmp_path)) >= 36  # a tenth is made room of each time

    run(scenario)


def test_one_that_may_not_be_stored_pushes_nobody_aside_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    monkeypatch.setattr(Reserve, "free", property(lambda self: store.LEFT_BYTES + (9 - len(files(tmp_path))) * BLOCK_BYTES))

    async def scenario() -> None:
        clock, ids = Clock(), [new_id(NOW + number) for number in range(8)]
        kept = bounded(tmp_path, clock)
        for one in ids:
            kept.save(one, record())
            await kept.settle()
        kept.save(new_id(NOW + 9), record(size=2 * MOST))
        await kept.settle()
        assert files(tmp_path) == ids

    run(scenario)
    assert f"--response-store-bytes={MOST}" in caplog.text


def test_old_responses_go_though_the_disk_has_no_room_for_new_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = [store.LEFT_BYTES * 2]
    monkeypatch.setattr(Reserve, "free", property(lambda self: free[0]))

    async def scenario() -> None:
        clock = Clock()
        kept = ResponseStore(str(tmp_path), 100.0, clock)
        kept.save(new_id(NOW), record())
        await kept.settle()
        free[0] = 0
        clock.now += store.SWEEP_EVERY_S + 1
        kept.save(new_id(clock.now), record())
        await kept.settle()
        assert files(tmp_path) == []

    run(scenario)


def test_a_folder_has_a_bound_by_itself_and_a_bucket_only_where_one_is_set() -> None:
    asked = [(None, "/srv/kept"), (None, "file:///srv/kept"), (None, "s3://bucket/kept"), (5, "/srv/kept"), (5, "s3://bucket/kept")]
    assert [most_bytes(*one) for one in asked] == [1 << 30, 1 << 30, None, 5, 5]

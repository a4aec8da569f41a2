"""What is kept of responses: in memory within bounds, in the storage in the order of their states, for a while."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from banyan_runtime.front.errors import ApiError
from banyan_runtime.front.openai.responses import store
from banyan_runtime.front.openai.responses.store import ResponseStore, new_id
from banyan_runtime.storage.local import LocalStore
from banyan_runtime.storage.store import Unreachable
from tests.unit.front.kept import NOW, Clock, files, log_of, record, status
from tests.unit.front.support import run


def test_the_states_of_a_response_reach_the_storage_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    true_put = LocalStore.put

    def put(self: LocalStore, key: str, data: bytes, **options: Any) -> Any:
        if b"queued" in data:  # the first state is slow, as an object store may be
            begun.set()
            assert go_on.wait(10)
        return true_put(self, key, data, **options)

    monkeypatch.setattr(LocalStore, "put", put)

    async def scenario() -> None:
        one, kept = new_id(NOW), ResponseStore(str(tmp_path), clock=Clock())
        kept.save(one, record("queued", background=True))
        waiting = ResponseStore(str(tmp_path), clock=Clock())
        await kept._asked(lambda place: begun.wait(10))
        kept.save(one, record("in_progress", background=True))
        kept.save(one, record("completed", background=True))
        go_on.set()
        await kept.settle()
        assert status(await waiting.load(one)) == "completed"

    run(scenario)


def test_a_state_that_comes_while_old_responses_are_swept_away_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    true_sweep = ResponseStore._sweep

    def sweep(self: ResponseStore, *asked: Any) -> int:  # slow, as the list of a bucket may be
        begun.set()
        assert go_on.wait(10)
        return true_sweep(self, *asked)

    monkeypatch.setattr(ResponseStore, "_sweep", sweep)

    async def scenario() -> None:
        one, kept = new_id(NOW), ResponseStore(str(tmp_path), clock=Clock())
        kept.save(one, record("queued", background=True))
        await kept._asked(lambda place: begun.wait(10))
        kept.save(one, record("completed", background=True))
        go_on.set()
        await kept.settle()
        other = ResponseStore(str(tmp_path), clock=Clock())
        assert status(await other.load(one)) == "completed"

    run(scenario)


def test_what_runs_on_another_server_is_read_anew_each_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        here, there = ResponseStore(str(tmp_path), clock=Clock()), ResponseStore(str(tmp_path), clock=Clock())
        one = new_id(NOW)
        for state in ("queued", "in_progress", "completed"):
            there.save(one, record(state, background=True))
            await there.settle()
            assert status(await here.load(one)) == state

    run(scenario)


@pytest.mark.parametrize("background", [False, True])
def test_one_that_another_server_removed_is_gone_here_too(tmp_path: Path, background: bool) -> None:
    async def scenario() -> None:
        here, there, one = ResponseStore(str(tmp_path), clock=Clock()), ResponseStore(str(tmp_path), clock=Clock()), new_id(NOW)
        here.save(one, record("completed", background=background))
        await here.settle()
        assert await here.load(one) is not None
        await there.remove(one)
        assert await here.load(one) is None
        assert here.was_removed(one)

    run(scenario)


def test_a_storage_that_vanishes_takes_no_response_along_and_nothing_is_written_in_its_place(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "kept", tmp_path / "elsewhere"

    async def scenario() -> None:
        kept, one, other = ResponseStore(str(folder), clock=Clock()), new_id(NOW), new_id(NOW)
        kept.save(one, record("queued", background=True))
        await kept.settle()
        folder.rename(elsewhere)
        kept.save(one, record("completed", background=True))
        kept.save(other, record("completed"))
        await kept.settle()
        assert [status(await kept.load(each)) for each in (one, other)] == ["completed"] * 2
        assert not folder.exists()
        elsewhere.rename(folder)
        assert status(await kept.load(one)) == "completed"

    run(scenario)


def test_a_response_is_forgotten_when_its_time_is_over_and_its_file_with_the_next_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = Clock()
        kept, old = ResponseStore(str(tmp_path), 100.0, clock), new_id(NOW)
        kept.save(old, record())
        await kept.settle()
        clock.now += 99
        assert await kept.load(old) is not None
        clock.now += 2
        assert await kept.load(old) is None
        clock.now += store.SWEEP_EVERY_S
        young = new_id(clock.now)
        kept.save(young, record())
        await kept.settle()
        assert files(tmp_path) == [young]

    run(scenario)


def test_a_store_that_keeps_for_no_time_keeps_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        kept, one = ResponseStore(str(tmp_path), 0.0, Clock()), new_id(NOW)
        kept.save(one, record())
        await kept.settle()
        assert (await kept.load(one), files(tmp_path)) == (None, [])

    run(scenario)


def test_a_removed_response_is_gone_even_if_it_was_just_being_written(tmp_path: Path) -> None:
    async def scenario() -> None:
        kept, one = ResponseStore(str(tmp_path), clock=Clock()), new_id(NOW)
        kept.save(one, record())
        await kept.remove(one)
        await kept.settle()
        assert (await kept.load(one), files(tmp_path)) == (None, [])

    run(scenario)


def test_a_removed_response_does_not_come_back_with_a_read_that_was_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    true_get = LocalStore.get

    def get(self: LocalStore, key: str) -> bytes:
        found = true_get(self, key)
        begun.set()
        assert go_on.wait(10)
        return found

    async def scenario() -> None:
        one, kept = new_id(NOW), ResponseStore(str(tmp_path), clock=Clock())
        kept.save(one, record())
        await kept.settle()
        here = ResponseStore(str(tmp_path), clock=Clock())
        monkeypatch.setattr(LocalStore, "get", get)
        reading = asyncio.create_task(here.load(one))
        await asyncio.to_thread(begun.wait, 10)
        await here.remove(one)
        go_on.set()
        assert await reading is None
        assert await here.load(one) is None

    run(scenario)


def test_a_removed_response_is_not_saved_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        one, kept = new_id(NOW), ResponseStore(str(tmp_path), clock=Clock())
        kept.save(one, record("in_progress", background=True))
        await kept.remove(one)
        kept.save(one, record(background=True))
        await kept.settle()
        assert (await kept.load(one), files(tmp_path)) == (None, [])

    run(scenario)


@pytest.mark.parametrize("lost", [False, True])
def test_what_is_removed_by_way_of_another_server_is_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: bool) -> None:
    true_put = LocalStore.put

    async def scenario() -> None:
        one, here, there = new_id(NOW), ResponseStore(str(tmp_path), clock=Clock()), ResponseStore(str(tmp_path), clock=Clock())
        for state in ("queued", "in_progress"):
            here.save(one, record(state, background=True))
            await here.settle()
        if lost:  # the answer to a write

            def put(self: LocalStore, key: str, data: bytes, **options: Any) -> Any:
                true_put(self, key, data, **options)
                raise Unreachable(self.uri(key), "it is away")

            monkeypatch.setattr(LocalStore, "put", put)
            here.save(one, record("in_progress", background=True))
            await here.settle()
            monkeypatch.setattr(LocalStore, "put", true_put)
            here.save(one, record("in_progress", background=True))
            await here.settle()
        assert not here.was_removed(one)
        await there.remove(one)
        here.save(one, record("completed", background=True))
        await here.settle()
        assert here.was_removed(one)
        assert [await store.load(one) for store in (here, there)] == [None, None]
        assert files(tmp_path) == []

    run(scenario)


def test_a_storage_that_was_away_for_the_first_state_has_the_next_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def put(self: LocalStore, key: str, data: bytes) -> Any:
        raise Unreachable(self.uri(key), "it is away")

    async def scenario() -> None:
        one, kept = new_id(NOW), ResponseStore(str(tmp_path), clock=Clock())
        with monkeypatch.context() as away:
            away.setattr(LocalStore, "put", put)
            kept.save(one, record("queued", background=True))
            await kept.settle()
        kept.save(one, record("completed", background=True))
        await kept.settle()
        assert status(await ResponseStore(str(tmp_path), clock=Clock()).load(one)) == "completed"

    run(scenario)


def test_what_the_storage_would_not_remove_can_be_removed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def delete(self: LocalStore, key: str) -> None:
        raise Unreachable(self.uri(key), "it is away")

    async def scenario() -> None:
        one, kept = new_id(NOW), ResponseStore(str(tmp_path), clock=Clock())
        kept.save(one, record())
        await kept.settle()
        with monkeypatch.context() as away:
            away.setattr(LocalStore, "delete", delete)
            with pytest.raises(ApiError):
                await kept.remove(one)
        assert await kept.load(one) is not None
        await kept.remove(one)
        assert (await kept.load(one), files(tmp_path)) == (None, [])

    run(scenario)


def test_a_removal_that_failed_leaves_what_is_in_memory_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(self: LocalStore, key: str, *_: Any, **__: Any) -> Any:
        raise Unreachable(self.uri(key), "it is away")

    async def scenario() -> None:
        one, kept = new_id(NOW), ResponseStore(str(tmp_path), clock=Clock())
        with monkeypatch.context() as outage:
            outage.setattr(LocalStore, "put", away)
            outage.setattr(LocalStore, "delete", away)
            kept.save(one, record())
            kept.logs.keep(one, log_of(1))
            with pytest.raises(ApiError):
                await kept.remove(one)
        assert status(await kept.load(one)) == "completed"
        assert kept.logs.find(one) is not None
        await kept.remove(one)
        assert (await kept.load(one), kept.logs.find(one)) == (None, None)

    run(scenario)


def test_what_another_server_removed_is_not_revived_after_a_removal_that_failed_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def delete(self: LocalStore, key: str) -> None:
        raise Unreachable(self.uri(key), "it is away")

    async def scenario() -> None:
        one, here, there = new_id(NOW), ResponseStore(str(tmp_path), clock=Clock()), ResponseStore(str(tmp_path), clock=Clock())
        here.save(one, record("in_progress", background=True))
        with monkeypatch.context() as away:
            away.setattr(LocalStore, "delete", delete)
            with pytest.raises(ApiError):
                await here.remove(one)
        await there.remove(one)
        here.save(one, record("completed", background=True))
        await here.settle()
        assert here.was_removed(one)
        assert files(tmp_path) == []

    run(scenario)


@pytest.mark.parametrize("fails", [True, False])
def test_a_state_that_comes_during_a_removal_is_kept_if_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    begun, go_on = threading.Event(), threading.Event()
    true_delete = LocalStore.delete

    def delete(self: LocalStore, key: str) -> None:
        begun.set()
        assert go_on.wait(10)
        if fails:
            raise Unreachable(self.uri(key), "it is away")
        true_delete(self, key)

    monkeypatch.setattr(LocalStore, "delete", delete)

    async def scenario() -> None:
        one, kept = new_id(NOW), ResponseStore(str(tmp_path), clock=Clock())
        kept.save(one, record("in_progress", background=True))
        await kept.settle()
        removal = asyncio.create_task(kept.remove(one))
        await asyncio.to_thread(begun.wait, 10)
        assert await kept.load(one) is None
        assert not kept.was_removed(one)
        kept.save(one, record("completed", background=True))
        go_on.set()
        await asyncio.wait({removal})
        assert (removal.exception() is not None) == fails
        await kept.settle()
        stored = await ResponseStore(str(tmp_path), clock=Clock()).load(one)
        assert status(await kept.load(one)) == status(stored) == ("completed" if fails else None)

    run(scenario)


@pytest.mark.parametrize("where", [None, "below a file"])
def test_without_a_storage_responses_are_kept_in_memory(where: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "secret-name").write_text("no folder")

    async def scenario() -> None:
        kept = ResponseStore(where and str(tmp_path / "secret-name" / "folder"), clock=Clock())
        ids = [new_id(NOW) for _ in range(20)]
        for one in ids:
            kept.save(one, record())
        await kept.settle()
        assert [status(await kept.load(one)) for one in ids] == ["completed"] * 20

    with caplog.at_level(logging.WARNING, "banyan"):
        run(scenario)
    assert len(caplog.messages) == (0 if where is None else 2), "told once that it cannot be used, and once that they are in memory only"


def test_a_storage_that_does_not_answer_is_an_error_without_its_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def get(self: LocalStore, key: str) -> bytes:
        raise Unreachable(self.uri(key), "it is away")

    monkeypatch.setattr(LocalStore, "get", get)

    async def scenario() -> None:
        with pytest.raises(ApiError) as refused:
            await ResponseStore(str(tmp_path), clock=Clock()).load(new_id(NOW))
        assert refused.value.status == 503
        assert str(tmp_path) not in refused.value.message

    run(scenario)


def test_memory_holds_the_responses_used_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "KEPT_BYTES", 5000)

    async def scenario() -> None:
        kept = ResponseStore(None, clock=Clock())
        ids = [new_id(NOW) for _ in range(4)]
        for one in ids:
            kept.save(one, record(size=1000))
        assert await kept.load(ids[0]) is not None  # used again
        kept.save(new_id(NOW), record(size=1000))
        assert [await kept.load(one) is not None for one in ids] == [True, False, True, True]

    run(scenario)


def test_what_waits_for_a_storage_that_hangs_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "UNWRITTEN_BYTES", 5000)
    go_on, true_put = threading.Event(), LocalStore.put

    def put(self: LocalStore, key: str, data: bytes, **options: Any) -> Any:
        assert go_on.wait(10)
        return true_put(self, key, data, **options)

    monkeypatch.setattr(LocalStore, "put", put)

    async def scenario() -> None:
        kept = ResponseStore(str(tmp_path), clock=Clock())
        ids = [new_id(NOW) for _ in range(100)]
        for one in ids:
            kept.save(one, record(size=1000))
        go_on.set()
        await kept.settle()
        assert 4 <= len(files(tmp_path)) < 10
        assert all([await kept.load(one) is not None for one in ids])

    run(scenario)


# --- bytes ---


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"response": 1}'])
def test_a_damaged_file_is_no_response(tmp_path: Path, content: bytes) -> None:
    async def scenario() -> None:
        one = new_id(NOW)
        (tmp_path / "responses").mkdir()
        (tmp_path / "responses" / f"{one}.json").write_bytes(content)
        assert await ResponseStore(str(tmp_path), clock=Clock()).load(one) is None

    run(scenario)


def test_only_ids_of_our_own_shape_are_looked_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        (tmp_path / "secret.json").write_bytes(msgspec.json.encode(record()))
        kept = ResponseStore(str(tmp_path), clock=Clock())
        for hostile in ("../secret", "secret", "resp_", new_id(NOW) + "/..", new_id(NOW).upper(), new_id(NOW) + "\n"):
            assert await kept.load(hostile) is None

    run(scenario)


# --- events ---

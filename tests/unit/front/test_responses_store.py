"""Where responses are kept: in memory and in a folder, for a while and within a bound, on the server that made them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from banyan_runtime.errors import ConfigError
from banyan_runtime.front.openai.responses.store import Record, ResponseStore
from tests.unit.front.kept import Clock, files, record, status


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 20))


async def written(store: ResponseStore) -> None:
    """Wait until the folder has what was saved; then memory has it no more."""
    while store._memory:
        await store.load(next(iter(store._memory)))
        await asyncio.sleep(0)


@pytest.fixture(params=["memory", "folder"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return None if request.param == "memory" else tmp_path / "kept"


def test_the_newest_state_is_found_until_it_is_removed(where: Path | None) -> None:
    async def scenario() -> None:
        store = ResponseStore(where)
        one = store.new_id()
        assert await store.load(one) is None
        for state in ("queued", "completed"):
            store.save(one, record(state))
            assert status(await store.load(one)) == state
        if where is not None:
            await written(store)
            assert (status(await store.load(one)), files(where)) == ("completed", [one])
        store.remove(one)
        assert await store.load(one) is None
        await store.close()
        assert where is None or not files(where)

    run(scenario())


def test_responses_are_kept_for_their_time(where: Path | None) -> None:
    async def scenario() -> None:
        clock = Clock()
        store = ResponseStore(where, 100.0, clock=clock)
        old = store.new_id()
        store.save(old, record())
        clock.now += 60
        young = store.new_id()
        store.save(young, record())
        clock.now += 60
        assert (await store.load(old), status(await store.load(young))) == (None, "completed")
        await store.close()
        assert where is None or files(where) == [young]

    run(scenario())


def test_the_oldest_are_removed_where_all_take_more_than_they_may(where: Path | None, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        store = ResponseStore(where, max_bytes=10_000)
        ids = [store.new_id() for _ in range(5)]
        for one in ids:
            store.save(one, record(size=3000))
        store.save(ids[-1], record(size=3001))  # a newer state takes the place of the one before
        assert [status(await store.load(one)) for one in ids] == [None, None, "completed", "completed", "completed"]
        with caplog.at_level(logging.WARNING, "banyan"):
            store.save(ids[-1], record(size=10_001))
        assert (await store.load(ids[-1]), "--response-store-bytes" in caplog.text) == (None, True)
        await store.close()
        assert where is None or files(where) == sorted(ids[2:4])

    run(scenario())


def test_none_are_kept_where_they_are_kept_for_no_time() -> None:
    async def scenario() -> None:
        store = ResponseStore(None, 0.0)
        one = store.new_id()
        store.save(one, record())
        assert (store.keeps, await store.load(one)) == (False, None)

    run(scenario())


def test_an_id_tells_which_server_made_it() -> None:
    here, there = ResponseStore(), ResponseStore()
    assert here.is_elsewhere(there.new_id())
    for own in (here.new_id(), "resp_1", "../../etc/passwd", "x" * 5000):
        assert not here.is_elsewhere(own)


def test_a_server_that_comes_back_has_its_responses_within_the_bound(tmp_path: Path) -> None:
    async def scenario() -> None:
        before = ResponseStore(tmp_path)
        ids = sorted(before.new_id() for _ in range(4))
        for one in ids:
            before.save(one, record(size=3000))
        await before.close()
        (tmp_path / f"{ids[0]}.tmp").write_bytes(b"cut off")
        (tmp_path / "resp_of_somebody.json").write_bytes(b"{}")
        after = ResponseStore(tmp_path, max_bytes=10_000)
        assert after.server_id == before.server_id
        assert [status(await after.load(one)) for one in ids] == [None, "completed", "completed", "completed"]
        await after.close()
        assert files(tmp_path) == [*ids[1:], "resp_of_somebody"]

    run(scenario())


def test_a_folder_is_refused_that_another_server_has_or_that_cannot_be_made(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = ResponseStore(tmp_path / "kept")
        (tmp_path / "file").touch()
        for folder in (tmp_path / "kept", tmp_path / "file"):
            with pytest.raises(ConfigError, match="--response-store-path"):
                ResponseStore(folder)
        await store.close()
        await ResponseStore(tmp_path / "kept").close()

    run(scenario())


def test_a_folder_that_fails_leaves_responses_in_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        folder = tmp_path / "kept"
        store = ResponseStore(folder)
        read, unwritten = store.new_id(), store.new_id()
        store.save(read, record())
        await written(store)
        (folder / f"{read}.json").write_bytes(b"no JSON")
        folder.rename(tmp_path / "away")
        store.save(unwritten, record())
        assert (await store.load(read), status(await store.load(unwritten))) == (None, "completed")
        await store.close()
        assert status(await store.load(unwritten)) == "completed"
        assert "--response-store-path" in caplog.text

    run(scenario())


def test_memory_holds_a_bounded_part_of_what_a_folder_does_not_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("banyan_runtime.front.openai.responses.store.MEMORY_BYTES", 10_000)

    async def scenario() -> None:
        folder = tmp_path / "kept"
        store = ResponseStore(folder)
        ids = [store.new_id() for _ in range(5)]
        for one in ids:
            (folder / f"{one}.json").mkdir()  # which no file can replace
            store.save(one, record(size=3000))
        assert [status(await store.load(one)) for one in ids] == [None, None, "completed", "completed", "completed"]
        await store.close()
        assert not list(folder.glob("*.tmp"))

    run(scenario())


def test_what_is_removed_before_it_is_written_leaves_nothing_in_the_folder(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = Clock()
        store = ResponseStore(tmp_path, 100.0, clock=clock)
        slow, other = store.new_id(), store.new_id()
        store.save(slow, record("in_progress", background=True))
        await written(store)
        clock.now += 200
        store.save(slow, record())  # it ran for longer than responses are kept
        store.save(other, record())
        store.remove(other)
        assert (await store.load(slow), await store.load(other)) == (None, None)
        await store.close()
        assert not files(tmp_path)

    run(scenario())


def test_a_record_says_how_many_bytes_it_has() -> None:
    assert Record(msgspec.Raw(b"12"), msgspec.Raw(b"345"), msgspec.Raw(b"6789"), False).size == 9

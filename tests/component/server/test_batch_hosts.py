"""Several batch hosts over one storage, or one after the other over a storage that moved: each batch has one, and goes on where it was."""

from __future__ import annotations

import asyncio
import shutil
import time
import uuid
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from banyan_runtime.batch.host import keeper as keeping
from banyan_runtime.batch.host.examine import Examined, Rules, examine
from banyan_runtime.batch.host.process import Host
from banyan_runtime.batch.host.requests import new_batch
from banyan_runtime.batch.host.runner import Report, Task
from banyan_runtime.storage.local import LocalStore
from banyan_runtime.storage.store import ObjectStore, StoreError
from tests.component.server.batch_bucket import Bucket, document, play, to_its_end
from tests.component.server.test_batch_faults import CHAT, HELD, LINES, Model, host_over, new, one_life


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RETRY_S", "LAST_RETRY_S", "SCAN_S"):
        monkeypatch.setattr(keeping, name, 0.02)


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Bucket(tmp_path)


async def together(*hosts: Host, until: Callable[[], Coroutine[Any, Any, bool]]) -> None:
    """Let several hosts look after one storage."""
    running = [asyncio.create_task(host.keeper.run()) for host in hosts]
    try:
        for _ in range(3000):
            if await until():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("it did not come")
    finally:
        for each in running:
            each.cancel()
        await asyncio.wait(running)


@pytest.fixture
def short_lease(monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(keeping, "BEAT_S", 0.05)
    monkeypatch.setattr(keeping, "LEASE_S", 1.0)
    return 1.0


@pytest.mark.long  # seconds of a lease are counted
def test_who_waits_for_room_keeps_the_batch(bucket: Bucket, short_lease: float, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = 3 * short_lease  # a machine with other things to do does not come round to a beat for a second, now and then
    monkeypatch.setattr(keeping, "LEASE_S", lease)

    async def act(serving: Model) -> None:
        hosts = [host_over(bucket, serving.url) for _ in range(2)]
        batch = await new(hosts[0])
        for host in hosts:
            monkeypatch.setattr(type(host.keeper._storage.reserve), "free", property(lambda _: 0 if full else None))
        full, owners, began = True, set[str | None](), time.monotonic()

        async def over() -> bool:
            nonlocal full
            running = any(look.running for host in hosts for look in host.keeper._looks.values())  # who examined it has let it go by then
            seen = await document(hosts[0], batch)
            if running and seen.status == "in_progress":
                owners.add(seen.owner)
            full = full and time.monotonic() - began < 2 * lease
            return seen.ended

        await together(*hosts, until=over)
        assert (await document(hosts[0], batch)).status == "completed"
        assert len(owners - {None}) == 1

    play(act)


def test_two_hosts_give_a_batch_that_meets_a_bug_no_more_tries_than_one(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pauses are shorter than a lease, and with each try the batch changes: for no other host does the lease run out."""
    monkeypatch.setattr(keeping, "RETRY_S", 0.2)
    monkeypatch.setattr(keeping, "LAST_RETRY_S", 0.5)
    monkeypatch.setattr(keeping, "LEASE_S", 30.0)
    nonces: list[str] = []  # of the batch, at each try

    async def act(serving: Model) -> None:
        hosts = [host_over(bucket, serving.url) for _ in range(2)]
        batch = await new(hosts[0])

        async def broken(task: Task, report: Report) -> None:
            nonces.append((await document(hosts[0], batch)).nonce)
            raise KeyError("a bug")

        for host in hosts:
            monkeypatch.setattr(host.keeper._runner, "work", broken)

        async def over() -> bool:
            return (await document(hosts[0], batch)).ended

        await together(*hosts, until=over)
        assert (await document(hosts[0], batch)).status == "failed"
        assert len(nonces) == len(set(nonces)) == keeping.BUGS

    play(act)


@pytest.mark.long  # seconds of a lease are counted
def test_who_examines_for_long_keeps_the_batch(bucket: Bucket, monkeypatch: pytest.MonkeyPatch, short_lease: float) -> None:
    examined: list[str] = []

    def slowly(store: ObjectStore, key: str, rules: Rules) -> Examined:
        examined.append(key)
        time.sleep(3 * short_lease)
        return examine(store, key, rules)

    monkeypatch.setattr(keeping, "examine", slowly)

    async def act(serving: Model) -> None:
        hosts = [host_over(bucket, serving.url) for _ in range(2)]
        batch = await new(hosts[0])

        async def over() -> bool:
            return (await document(hosts[0], batch)).ended

        await together(*hosts, until=over)
        assert (await document(hosts[0], batch)).status == "completed"
        assert len(examined) == 1

    play(act)


def test_a_batch_keeps_its_name_among_the_open_ones_though_its_id_is_old(bucket: Bucket) -> None:
    """A host died between an Idempotency-Key and its batch, hours ago."""

    async def act(serving: Model) -> None:
        host, other = host_over(bucket, serving.url), host_over(bucket, serving.url)
        first = await new(host)
        await to_its_end(host, first)
        wanted = new_batch({"input_file_id": first.input_file_id, "endpoint": CHAT, "completion_window": "24h"}, (CHAT,))
        names = [f"batch_{uuid.UUID(int=(int(time.time() - 7200) * 1000 << 80) + number)}" for number in range(2)]
        for key, name in zip("ab", names, strict=True):
            bucket.put(host.batches._key(key), name.encode())

        def given_up(key: str) -> StoreError | None:
            if key == f"documents/{names[0]}.json":
                bucket.delete(f"open/{names[0]}")  # by another host that looks at this moment
            return None

        bucket.fails = given_up
        await host.batches.create(wanted, first.input, key="a")
        bucket.put(f"open/{names[1]}", b"")
        bucket.deleting = lambda key: bucket.put(f"documents/{names[1]}.json", msgspec.json.encode(replace(first, id=names[1])))
        await other.batches.open()
        bucket.deleting = lambda key: None
        assert [info.key for info in bucket.list("open/")] == [f"open/{name}" for name in names]

    play(act)


def test_a_storage_that_was_copied_goes_on_where_it_was(tmp_path: Path) -> None:
    async def act(serving: Model) -> None:
        batches = []
        for name in ("first", "second"):
            host = host_over(LocalStore(tmp_path / name), serving.url)
            batches.append(batch := await new(host))
            serving.asked.clear()
            await one_life(host, batch.id, lambda: sum(serving.asked.values()) == LINES)
        serving.let_go.set()
        done = {}
        for name, batch, cancel in zip(("first", "second"), batches, (False, True), strict=True):
            shutil.copytree(tmp_path / name, tmp_path / "copies" / name)
            shutil.rmtree(tmp_path / name)
            host = host_over(LocalStore(tmp_path / "copies" / name), serving.url)
            before = dict(serving.asked)
            if cancel:
                await host.batches.cancel(batch.id)
            done[name] = ended = await to_its_end(host, batch)
            again = sum(serving.asked.values()) - sum(before.values())
            assert again == (0 if cancel else len(HELD)), "only what was not done"
            assert (ended.counts.total, ended.counts.completed) == (LINES, LINES - len(HELD) if cancel else LINES)
        assert {name: ended.status for name, ended in done.items()} == {"first": "completed", "second": "cancelled"}

    play(act, holding=True)

"""The batch host over a storage with troubles of its own: nothing of what it meets there stops the other batches, or lasts for ever."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from banyan_runtime.batch.documents import Keys, State
from banyan_runtime.batch.host import keeper as keeping
from banyan_runtime.batch.host import shelf as shelves
from banyan_runtime.batch.host.batches import KEY_S, SETTLED_S
from banyan_runtime.batch.host.documents import BatchDocument, Tokens
from banyan_runtime.batch.host.process import Host, open_storage, serve
from banyan_runtime.batch.host.refusals import Unreadable
from banyan_runtime.batch.host.requests import Page, new_batch
from banyan_runtime.batch.host.runner import Report, Task
from banyan_runtime.batch.host.tally import Tally
from banyan_runtime.storage.patience import Patience
from banyan_runtime.storage.store import Denied, Full, StoreError, Unreachable
from tests.component.server.batch_bucket import Bucket, change, document, play, to_its_end
from tests.component.server.test_batch_faults import CHAT, HELD, LINES, Model, boot_over, host_over, new, one_life


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RETRY_S", "LAST_RETRY_S", "SCAN_S"):
        monkeypatch.setattr(keeping, name, 0.02)


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Bucket(tmp_path)


def test_a_bucket_that_was_full_once_stops_batches_no_longer_than_that(bucket: Bucket) -> None:
    async def act(serving: Model) -> None:
        host = host_over(bucket, serving.url)
        batch = await new(host)
        refused: list[str] = []

        def full_once(key: str) -> StoreError | None:
            if key.endswith("plan.json") and not refused:
                refused.append(key)
                return Full(key, "507")
            return None

        bucket.fails = full_once
        ended = await to_its_end(host, batch)
        assert (ended.status, len(refused)) == ("completed", 1)

    play(act)


@pytest.mark.parametrize("written", [b'{"id": "x", "status": "paused"}', b'{"id": ', b"\xff\x00"], ids=["later", "cut", "damaged"])
def test_a_document_that_cannot_be_read_stops_no_other_batch(bucket: Bucket, written: bytes) -> None:
    async def act(serving: Model) -> None:
        host = host_over(bucket, serving.url)
        bad, good = await new(host), await new(host)
        bucket.put(f"documents/{bad.id}.json", written)
        assert (await one_of(host, good)).status == "completed"
        with pytest.raises(Unreadable) as refused:
            await host.batches.get(bad.id)
        assert refused.value.status == 500
        for each in (host, host_over(bucket, serving.url)):
            listed, _ = await each.batches.listed(Page(10, None))
            assert [batch.id for batch in listed] == [good.id]
        await host.files.delete(bad.input_file_id)  # whoever can read the batch still reads these bytes
        assert bucket.head(bad.input).size

    async def one_of(host: Host, batch: BatchDocument) -> BatchDocument:
        running = asyncio.create_task(host.keeper.run())
        try:
            while not (seen := await document(host, batch)).ended:
                assert not running.done()
                await asyncio.sleep(0.01)
            return seen
        finally:
            running.cancel()
            await asyncio.wait({running})

    play(act)


@pytest.mark.long
def test_finished_lines_in_a_bucket_are_recorded_within_seconds(bucket: Bucket) -> None:
    async def act(serving: Model) -> None:
        host = host_over(bucket, serving.url)
        batch = await new(host)
        key = f"batches/{batch.id}/{Keys(batch.id).state(0)}"
        began = 0.0

        def recorded() -> bool:
            nonlocal began
            if sum(serving.asked.values()) < LINES:
                return False
            began = began or time.monotonic()
            assert time.monotonic() - began < 10, "it takes about 2 s"
            return State.decode(bucket.get(key)).completed == LINES - len(HELD)

        await one_life(host, batch.id, recorded)

    play(act, holding=True)


@pytest.mark.long
def test_lines_that_begin_alike_are_neighbours_over_the_whole_of_a_big_file(bucket: Bucket) -> None:
    asked: list[str] = []

    async def chat(request: web.Request) -> web.Response:
        asked.append((await request.json())["user"])
        return web.json_response({"id": "x", "choices": []})

    async def ready(_: web.Request) -> web.Response:
        return web.Response()

    async def act() -> None:
        app = web.Application(client_max_size=8 << 20)
        app.router.add_post(CHAT, chat)
        app.router.add_get("/readyz", ready)
        runner = web.AppRunner(app, shutdown_timeout=0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        host = host_over(bucket, f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}")  # type: ignore[attr-defined]
        incoming = await host.files.receive()
        for number in range(24):
            text = ("a" if number == 23 else "b") * (3 << 20)
            body = {"messages": [{"role": "user", "content": text}], "user": f"{number}"}
            line = {"custom_id": f"{number}", "method": "POST", "url": CHAT, "body": body}
            await incoming.write(json.dumps(line).encode() + b"\n", 1 << 30)
        file = await host.files.keep(incoming, "a.jsonl", "batch", None)
        wanted = new_batch({"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}, (CHAT,))
        batch = await host.batches.create(wanted, file.content, key=None)
        assert (await to_its_end(host, batch)).counts.completed == 24
        await runner.cleanup()

    asyncio.run(act())
    assert "23" in asked[:16], "of 16 that are sent at a time the first by its beginning is one"


def test_one_document_more_than_are_remembered_is_all_that_is_read_again(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelves, "CACHED", 10)

    async def act(serving: Model) -> None:
        host = host_over(bucket, serving.url)
        for _ in range(11):
            incoming = await host.files.receive()
            await host.files.keep(incoming, "a", "user_data", None)
        for _ in range(3):
            bucket.read.clear()
            await host.files.sweep()
            assert len(bucket.read) == 1
            await host.files.listed(Page(5, None), None)
            assert len(bucket.read) == 1

    play(act)


def test_reasoning_tokens_are_told() -> None:
    assert Tokens(1, 0, 5, 6, 3).public()["output_tokens_details"] == {"reasoning_tokens": 3}


def test_what_an_ended_batch_left_beside_its_results_and_old_keys_are_swept(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(serving: Model) -> None:
        host = host_over(bucket, serving.url)
        first = await new(host)
        wanted = new_batch({"input_file_id": first.input_file_id, "endpoint": CHAT, "completion_window": "24h"}, (CHAT,))
        await host.batches.create(wanted, first.input, key="key")
        for each in await host.batches.open():
            ended = await to_its_end(host, each.document)
        before = {info.key for info in bucket.list()}
        await host.batches.sweep()
        assert {info.key for info in bucket.list()} == before
        later = time.time() + SETTLED_S + 10
        monkeypatch.setattr(host.batches, "_clock", lambda: later)
        await host.batches.sweep()
        left = [info.key for info in bucket.list("batches/")]
        assert sorted(left) == sorted(f"batches/{batch}/output.jsonl" for batch in (first.id, ended.id))
        assert len(list(bucket.list("idempotency/"))) == 1
        later += KEY_S
        await host.batches.sweep()
        assert not list(bucket.list("idempotency/"))
        assert ended.output_file_id is not None
        _, reader = await host.files.open(ended.output_file_id)
        assert reader.size

    play(act)


def test_a_batch_whose_results_cannot_be_written_ends_a_day_after_its_window(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(serving: Model) -> None:
        host = host_over(bucket, serving.url)
        batch = await new(host)
        meets: list[str] = []

        def fails(key: str) -> StoreError | None:
            if key.startswith("files/"):
                meets.append(key)
                return Unreachable(key, "it does not answer")
            return None

        bucket.fails = fails
        await one_life(host, batch.id, lambda: len(meets) > 3)
        assert (await document(host, batch)).status == "finalizing"
        await change(host, batch, expires_at=int(time.time() - keeping.GIVE_UP_S - 2))
        met = len(meets)
        await one_life(host, batch.id, lambda: len(meets) > met + 3)
        assert (await document(host, batch)).status == "finalizing", "the error may pass: the host was perhaps off for days"
        monkeypatch.setattr(keeping, "LASTING_S", 0.1)
        ended = await to_its_end(host, batch)
        assert (ended.status, [problem.code for problem in ended.errors]) == ("failed", ["unavailable"])
        assert [info.key for info in bucket.list(f"batches/{batch.id}/output")]
        later = time.time() + SETTLED_S + 10
        monkeypatch.setattr(host.batches, "_clock", lambda: later)
        await host.batches.sweep()
        assert not list(bucket.list("batches/")), "there is no file by which anybody could ask for them"

    play(act)


def test_a_file_that_is_listed_keeps_its_bytes_though_its_batch_could_not_publish(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "LASTING_S", 0.1)

    async def act(serving: Model) -> None:
        host = host_over(bucket, serving.url)
        batch = await new(host)
        named: list[str] = []

        def fails(key: str) -> StoreError | None:
            if key != f"documents/{batch.id}.json" or b'"finalizing"' not in bucket._store.get(key):
                return None
            named.append(key)
            return None if expired else Unreachable(key, "it does not answer")

        expired = False
        bucket.fails = fails
        await one_life(host, batch.id, lambda: len(named) > 4)
        files = [info.key for info in bucket.list("files/") if info.key.endswith(".json")]
        assert len(files) == 2, "of the input, and of the output"
        expired = True
        monkeypatch.setattr(host.keeper._runner, "publish", _unavailable)
        await change(host, batch, expires_at=int(time.time() - keeping.GIVE_UP_S - 2))
        assert (await to_its_end(host, batch)).status == "failed"
        later = time.time() + SETTLED_S + 10
        monkeypatch.setattr(host.batches, "_clock", lambda: later)
        await host.batches.sweep()
        assert [info.key for info in bucket.list("batches/")] == [f"batches/{batch.id}/output.jsonl"]
        for file in (await host.files.listed(Page(5, None), None))[0]:
            (await host.files.open(file.id))[1].close()

    play(act)


async def _unavailable(task: Task, ending: object) -> None:
    raise Unreachable(task.output, "it does not answer")


def test_a_storage_that_denies_for_a_moment_ends_no_batch(bucket: Bucket) -> None:
    async def act(serving: Model) -> None:
        host = host_over(bucket, serving.url)
        batch = await new(host)
        denied: list[str] = []

        def denies(key: str) -> StoreError | None:
            if key.endswith("plan.json") and len(denied) < 2:
                denied.append(key)
                return Denied(key, "the token has expired")
            return None

        bucket.fails = denies
        assert ((await to_its_end(host, batch)).status, len(denied)) == ("completed", 2)

    play(act)


def test_lines_in_flight_outlive_a_document_that_cannot_be_written(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "BEAT_S", 0.02)

    async def act(serving: Model) -> None:
        host = host_over(bucket, serving.url)
        batch = await new(host)
        failed: list[str] = []

        def fails(key: str) -> StoreError | None:
            if key.startswith("documents/") and sum(serving.asked.values()) == LINES and len(failed) < 5:
                failed.append(key)
                return Unreachable(key, "it does not answer")
            if len(failed) == 5:
                serving.let_go.set()
            return None

        bucket.fails = fails
        assert (await to_its_end(host, batch)).status == "completed"
        assert (len(failed), set(serving.asked.values())) == (5, {1})

    play(act, holding=True)


def test_a_request_that_is_sent_again_with_its_key_leaves_the_batch_at_work(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(serving: Model) -> None:
        host = host_over(bucket, serving.url)
        first = await new(host)
        await host.batches.cancel(first.id)
        body = {"input_file_id": first.input_file_id, "endpoint": CHAT, "completion_window": "24h"}
        async with TestClient(TestServer(host.app)) as client:
            made = await (await client.post("/v1/batches", json=body, headers={"Idempotency-Key": "key"})).json()
            sent = 1

            async def again(_: Host, batch: BatchDocument) -> None:
                nonlocal sent
                if batch.status != "in_progress" or sum(serving.asked.values()) < LINES:
                    return
                sent += 1
                repeated = await client.post("/v1/batches", json=body, headers={"Idempotency-Key": "key"})
                assert (await repeated.json())["id"] == made["id"]
                if sent == 5:
                    serving.let_go.set()

            await one_life(host, made["id"], lambda: False, again)
        assert (await host.batches.get(made["id"])).document.status == "completed"
        assert (sent >= 5, set(serving.asked.values())) == (True, {1})

    play(act, holding=True)


def test_the_window_of_a_batch_ends_while_others_have_all_places(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "RUNNING", 0)

    async def act(serving: Model) -> None:
        host = host_over(bucket, serving.url)
        batch = await new(host)

        async def late(host: Host, seen: BatchDocument) -> None:
            if seen.status == "in_progress" and seen.expires_at > time.time():
                await change(host, batch, expires_at=int(time.time()) - 1)

        await one_life(host, batch.id, lambda: False, late)
        ended = await document(host, batch)
        assert (ended.status, ended.counts.total, ended.counts.completed) == ("expired", LINES, 0)
        assert not serving.asked

    play(act)


@pytest.mark.parametrize("where", ["work", "publish"])
def test_a_batch_that_meets_a_bug_again_and_again_ends(bucket: Bucket, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    async def act(serving: Model) -> None:
        host = host_over(bucket, serving.url)
        batch = await new(host)
        tries = 0

        async def broken(task: Task, report: Report) -> None:
            nonlocal tries
            tries += 1
            raise KeyError("a bug")

        monkeypatch.setattr(host.keeper._runner, where, broken)
        ended = await to_its_end(host, batch)
        assert (ended.status, [problem.code for problem in ended.errors]) == ("failed", ["internal_error"])
        assert tries == keeping.BUGS

    play(act)


def test_only_our_own_unfinished_uploads_are_swept(bucket: Bucket) -> None:
    async def act(serving: Model) -> None:
        host = host_over(bucket, serving.url)
        await one_life(host, (await new(host)).id, lambda: len(bucket.swept) > 1)
        assert all(prefix.startswith(("files/file-", "batches/batch_")) for prefix in bucket.swept)

    play(act)


def test_a_host_that_ends_leaves_no_thread_that_could_meet_the_closed_loop(tmp_path: Path) -> None:
    boot = boot_over("http://127.0.0.1:1", storage=str(tmp_path / "kept"), socket=str(tmp_path / "absent" / "socket"))
    before = set(threading.enumerate())
    with pytest.raises(FileNotFoundError):
        asyncio.run(serve(boot))
    assert [thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("batch")] == []


def test_what_goes_to_and_comes_from_a_bucket_is_counted_and_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "any")
    tally = Tally()
    storage = open_storage("s3://bucket/prefix", Patience(0.0), tally)
    with pytest.raises(StoreError):
        storage.store.get("prefix/x")
    tally.storage_bytes["write"] += 5
    news = tally.news()
    assert news is not None
    assert (news.storage_errors, news.storage_bytes) == ({"get": 1}, {"write": 5})
    assert tally.news() is None
    tally.storage_bytes["write"] += 2
    later = tally.news()
    assert later is not None
    assert later.storage_bytes == {"write": 2}

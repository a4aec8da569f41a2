"""Whatever is killed, and whenever: a batch comes to its end, with every line once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from aiohttp import web
from openai.types import Batch

from banyan_runtime.batch import identity
from banyan_runtime.batch.host import keeper as keeping
from banyan_runtime.batch.host.boot import Boot
from banyan_runtime.batch.host.documents import BatchDocument
from banyan_runtime.batch.host.process import Host
from banyan_runtime.batch.host.requests import new_batch
from banyan_runtime.batch.host.reserve import Reserve
from banyan_runtime.batch.host.running import BatchRunner
from banyan_runtime.batch.host.shelf import Storage
from banyan_runtime.storage.local import LocalStore
from banyan_runtime.storage.store import ObjectInfo, ObjectStore, Stopped, Upload
from tests.component.server.test_batches_api import begin, end, ids, lines, result, until
from tests.support.s3 import servers
from tests.support.server.process import MODEL, ServerProcess, StartServer

CHAT = "/v1/chat/completions"
LINES = 6
HELD = (4, 5)  # lines that the model does not answer while `holding`


# --- a host is killed before and after each of its writes ---


class Mortal(LocalStore):
    """A folder that its process can write to `writes` times, or once to an object of such a name; then it is dead. `late`: the last write
    is carried out all the same."""

    def __init__(self, root: Path, writes: int | str, *, late: bool) -> None:
        super().__init__(root)
        self._left, self._name = (writes, None) if isinstance(writes, int) else (0, writes)
        self._late = late
        self.dead = False
        self.told: list[str] = []

    def _write(self, key: str, write: Callable[[], Any]) -> Any:
        self._live(key)
        self.told.append(key)
        self._left -= 1
        if self._left == 0 or key.rpartition("/")[2] == self._name:
            self.dead = True
            if self._late:
                write()
            raise Stopped(key, "killed")
        return write()

    def _live(self, key: str) -> None:
        if self.dead:
            raise Stopped(key, "killed")

    def head(self, key: str) -> ObjectInfo:
        self._live(key)
        return super().head(key)

    def get(self, key: str, *, start: int = 0, end: int | None = None, if_match: str | None = None) -> bytes:
        self._live(key)
        return super().get(key, start=start, end=end, if_match=if_match)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        self._live(prefix)
        return super().list(prefix)

    def put(
        self,
        key: str,
        data: bytes,
        *,
        if_match: str | None = None,
        if_none_match: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> ObjectInfo:
        store = LocalStore(self.root)
        write = lambda: store.put(key, data, if_match=if_match, if_none_match=if_none_match, metadata=metadata)
        info = self._write(key, write)
        assert isinstance(info, ObjectInfo)
        return info

    def upload(self, key: str, *, metadata: Mapping[str, str] | None = None) -> Any:
        self._live(key)
        return _MortalUpload(self, key, LocalStore(self.root).upload(key, metadata=metadata))

    def delete(self, key: str, *, if_match: str | None = None) -> None:
        self._write(key, lambda: LocalStore(self.root).delete(key, if_match=if_match))


class _MortalUpload:
    def __init__(self, store: Mortal, key: str, upload: Upload) -> None:
        self._store, self._key, self._upload = store, key, upload

    def write(self, data: bytes) -> None:
        self._upload.write(data)

    def complete(self, *, if_match: str | None = None, if_none_match: bool = False) -> Any:
        return self._store._write(self._key, lambda: self._upload.complete(if_match=if_match, if_none_match=if_none_match))

    def abort(self) -> None:
        self._upload.abort()


@dataclass
class Model:
    """A server that answers at once, or holds some lines back."""

    url: str = ""
    holding: bool = False
    asked: Counter[str] = field(default_factory=Counter)
    let_go: asyncio.Event = field(default_factory=asyncio.Event)

    async def chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert body["priority"] < 0, "lines of a batch are background"
        assert request.headers["Authorization"] == "Bearer key"
        self.asked[body["user"]] += 1
        if self.holding and int(body["user"].partition("-")[2]) in HELD:
            await self.let_go.wait()
        usage = {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
        return web.json_response({"id": "x", "choices": [], "usage": usage})


@contextlib.asynccontextmanager
async def model(*, holding: bool) -> AsyncIterator[Model]:
    serving = Model(holding=holding)
    app = web.Application()
    app.router.add_post(CHAT, serving.chat)
    app.router.add_get("/readyz", _ready)
    runner = web.AppRunner(app, shutdown_timeout=0, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    serving.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
    yield serving
    serving.let_go.set()
    await runner.cleanup()


async def _ready(_: web.Request) -> web.Response:
    return web.Response()


def boot_over(url: str, *, storage: str = "", socket: str = "") -> Boot:
    return Boot(
        storage=storage,
        socket=socket,
        server=url,
        key="key",
        models=(MODEL,),
        endpoints=(CHAT,),
        max_running=8,
        log_level="info",
        log_format="text",
    )


def host_over(store: ObjectStore, url: str) -> Host:
    boot = boot_over(url)
    return Host(boot, Storage(store, "", Reserve(None)), BatchRunner(boot, lambda _: store))


async def new(host: Host) -> BatchDocument:
    """A batch of LINES lines, made while all is well."""
    incoming = await host.files.receive()
    for number in range(LINES):
        body = {"model": MODEL, "messages": [], "user": f"line-{number}"}
        text = json.dumps({"custom_id": f"line-{number}", "method": "POST", "url": "/chat/completions", "body": body})
        await incoming.write(text.encode() + b"\n", 1 << 20)
    file = await host.files.keep(incoming, "a.jsonl", "batch", None)
    asked = new_batch({"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}, (CHAT,))
    return await host.batches.create(asked, file.content, key=None)


async def one_life(host: Host, batch: str, over: Callable[[], bool], act: Callable[[Host, BatchDocument], Any] | None = None) -> None:
    """Let the host look after the batch until that has ended, or it is `over` with the host."""
    running = asyncio.create_task(host.keeper.run())
    host.keeper.kick(batch)
    try:
        async with asyncio.timeout(60):
            while not over():
                with contextlib.suppress(Stopped):
                    held = await host.batches.get(batch)
                    if held.document.ended and not await host.batches.open():
                        return
                    if act is not None:
                        await act(host, host.keeper.live(held.document))
                await asyncio.sleep(0.01)
    finally:
        running.cancel()
        await asyncio.wait({running})


async def cancel_when_some_are_done(host: Host, batch: BatchDocument) -> None:
    if batch.status == "in_progress" and batch.counts.completed >= LINES - len(HELD):
        await host.batches.cancel(batch.id)
        host.keeper.kick(batch.id)


async def killed_at(folder: Path, writes: int | str, *, late: bool, cancel: bool) -> str | None:
    """Kill a host at one of its writes, let another go on, and check the outcome. Returns what was written last; None: it was not
    killed, for it does not write so often."""
    async with model(holding=cancel) as serving:
        whole = LocalStore(folder)
        batch = await new(host_over(whole, serving.url))
        mortal = Mortal(folder, writes, late=late)
        act = cancel_when_some_are_done if cancel else None
        await one_life(host_over(mortal, serving.url), batch.id, lambda: mortal.dead, act)
        last = mortal.told[-1] if mortal.dead else None
        host = host_over(whole, serving.url)
        await one_life(host, batch.id, lambda: False, act)
        ended = (await host.batches.get(batch.id)).document
        assert ended.status == ("cancelled" if cancel else "completed"), last
        rows: dict[str, list[str]] = {}
        for side, file in (("done", ended.output_file_id), ("not done", ended.error_file_id)):
            data = b""
            if file is not None:
                document, reader = await host.files.open(file)
                data = reader.read(0, reader.size)
                reader.close()
                assert document.size == len(data)
            assert data.endswith(b"\n") == bool(data)
            rows[side] = [json.loads(row)["custom_id"] for row in data.splitlines()]
        assert sorted(rows["done"] + rows["not done"]) == [f"line-{number}" for number in range(LINES)], last
        assert (ended.counts.total, ended.counts.completed, ended.counts.failed) == (LINES, len(rows["done"]), 0), last
        assert len(rows["done"]) == (LINES - len(HELD) if cancel else LINES), last
        assert ended.tokens.total == 3 * len(rows["done"]), last
        assert max(serving.asked.values()) <= 2, last
        return last


@pytest.mark.matrix(gate=1)
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("cancel", [False, True], ids=["completed", "cancelled"])
def test_a_host_that_is_killed_at_any_of_its_writes_is_replaced_without_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool, cancel: bool
) -> None:
    monkeypatch.setattr(identity, "is_gone", lambda name: True)  # of two hosts in this one process the first is dead
    monkeypatch.setattr(keeping, "RETRY_S", 0.05)

    async def all_points() -> list[str]:
        points: list[str] = []
        for first in range(1, 100, 8):
            for n in range(first, first + 8):
                (tmp_path / f"{n}").mkdir()
            several = (killed_at(tmp_path / f"{n}", n, late=late, cancel=cancel) for n in range(first, first + 8))
            found = await asyncio.gather(*several)
            points += [last for last in found if last is not None]
            if not any(found):  # how many writes there are depends on who comes when, and so does which of them is which
                break
        else:
            raise AssertionError("it writes without end")
        for name in {"plan.json", "000000.json", "output.jsonl", "manifest.json"} - {point.rpartition("/")[2] for point in points}:
            (tmp_path / name).mkdir()
            points += filter(None, [await killed_at(tmp_path / name, name, late=late, cancel=cancel)])
        return points

    points = [re.sub(r"[0-9a-f]{8,}(-[0-9a-f]+)*", "ID", point) for point in asyncio.run(all_points())]
    kinds = {point.rpartition("/")[2] for point in points}
    assert {"plan.json", "000000.json", "output.jsonl", "manifest.json", "batch_ID.json", "file-ID.json"} <= kinds, kinds
    assert len(points) >= 15


# --- real processes ---


def restarted(start_server: StartServer, *flags: str) -> tuple[ServerProcess, openai.OpenAI]:
    server = start_server(*flags).ready()
    return server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=10)


def kill(server: ServerProcess) -> None:
    """The server at once, and all that it started, as when a node loses its power."""
    os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait()


def done(batch: Batch) -> int:
    assert batch.request_counts is not None
    return batch.request_counts.completed


def some_done(batch: Batch) -> bool:
    return done(batch) >= 10


def check(client: openai.OpenAI, batch: Batch, total: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    good, failed = result(client, batch.output_file_id), result(client, batch.error_file_id)
    assert sorted(ids(good) + ids(failed)) == sorted(f"request-{number}" for number in range(1, total + 1))
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed) == (total, len(good))
    return good, failed


@pytest.mark.long
def test_the_host_is_killed_again_and_again_and_the_batch_completes(server: ServerProcess) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=10)
    batch = begin(client, lines(150, max_tokens=32))
    for _ in range(2):
        host = server.eventually(lambda: server._child("banyan_runtime.batch.host.process"), "a host")
        before = done(client.batches.retrieve(batch.id))
        batch = until(client, batch, lambda seen, before=before: seen.status == "completed" or done(seen) > before)  # type: ignore[misc]
        host.kill()
        host.wait()
    batch = end(client, batch)
    assert batch.status == "completed"
    check(client, batch, 150)


@pytest.mark.long
def test_a_server_that_is_killed_goes_on_where_it_was(start_server: StartServer, tmp_path: Path) -> None:
    flags = ("--file-storage-path", str(tmp_path), "--max-running-requests", "8")
    server, client = restarted(start_server, *flags)
    batch = until(client, begin(client, lines(100, max_tokens=16)), some_done)
    kill(server)
    before = done(batch)
    server, client = restarted(start_server, *flags)
    batch = end(client, batch)
    assert batch.status == "completed"
    check(client, batch, 100)
    again = server.metric('banyan_requests_total{endpoint="chat",finish_reason="length"}')
    again += server.metric('banyan_requests_total{endpoint="chat",finish_reason="stop"}')
    assert again <= 100 - before, "what was done is not done again"


@pytest.mark.long
def test_a_batch_is_cancelled_although_the_server_is_killed_meanwhile(start_server: StartServer, tmp_path: Path) -> None:
    flags = ("--file-storage-path", str(tmp_path))
    server, client = restarted(start_server, *flags)
    batch = until(client, begin(client, lines(500, max_tokens=64)), some_done)
    assert client.batches.cancel(batch.id).status == "cancelling"
    kill(server)
    server, client = restarted(start_server, *flags)
    batch = end(client, batch)
    assert batch.status == "cancelled"
    good, _ = check(client, batch, 500)
    assert len(good) >= 10
    assert client.files.delete(batch.input_file_id).deleted


@pytest.mark.long
def test_a_server_that_is_told_to_stop_leaves_its_batch_to_the_next_one(start_server: StartServer, tmp_path: Path) -> None:
    flags = ("--file-storage-path", str(tmp_path), "--drain-linger-seconds", "0")
    server, client = restarted(start_server, *flags)
    batch = until(client, begin(client, lines(150, max_tokens=32)), some_done)
    client.close()
    server.process.send_signal(signal.SIGTERM)
    assert server.wait(30) == 0
    server, client = restarted(start_server, *flags)
    batch = end(client, batch)
    assert batch.status == "completed"
    check(client, batch, 150)


def expire(storage: Path, batch: Batch) -> None:
    """Let the batch's window be over."""
    store, key = LocalStore(storage), f"documents/{batch.id}.json"
    while True:
        info = store.head(key)
        with contextlib.suppress(Exception):
            document = BatchDocument.decode(store.get(key, if_match=info.tag))
            over = msgspec.structs.replace(document, expires_at=int(time.time()) - 1)
            store.put(key, over.encode(), if_match=info.tag)
            return


@pytest.mark.long
@pytest.mark.parametrize("down", [False, True], ids=["running", "down"])
def test_a_batch_whose_window_is_over_expires_with_what_was_done(start_server: StartServer, tmp_path: Path, down: bool) -> None:
    flags = ("--file-storage-path", str(tmp_path))
    server, client = restarted(start_server, *flags)
    batch = until(client, begin(client, lines(5000, max_tokens=64)), some_done)
    if down:
        kill(server)
    expire(tmp_path, batch)
    if down:
        server, client = restarted(start_server, *flags)
    batch = end(client, batch)
    assert batch.status == "expired"
    assert batch.expired_at is not None
    assert batch.finalizing_at is not None
    good, missing = check(client, batch, 5000)
    assert len(good) >= 10
    assert {row["error"]["code"] for row in missing} == {"batch_expired"}


@pytest.mark.long
def test_replicas_over_one_bucket_share_files_and_batches_and_take_over(start_server: StartServer, tmp_path: Path) -> None:
    with servers.weed(tmp_path) as bucket:
        bucket.settings().client().create_bucket(Bucket="shared")
        environment = bucket.environment()
        first, second = (start_server("--file-storage-path", "s3://shared/batches", environment=environment) for _ in range(2))
        clients = [openai.OpenAI(base_url=f"{server.ready().url}/v1", api_key="none") for server in (first, second)]
        batch = until(clients[0], begin(clients[0], lines(150, max_tokens=32)), lambda seen: seen.status == "in_progress")
        assert clients[1].files.retrieve(batch.input_file_id).bytes
        assert [each.id for each in clients[1].batches.list()] == [batch.id]
        assert clients[1].batches.retrieve(batch.id).status == "in_progress"
        kill(first)
        batch = end(clients[1], batch)
        assert batch.status == "completed"
        check(clients[1], batch, 150)
        assert clients[1].batches.cancel(begin(clients[1], lines(500, max_tokens=64)).id).status == "cancelling"


MOUNTED = """
import os, sys
shell = 'mount -t tmpfs -o size=48m tmpfs "$DISK" && exec "$@"'
os.execvp("unshare", ["unshare", "-rm", "sh", "-c", shell, "sh", sys.executable, "-m", "banyan_runtime", *sys.argv[1:]])
"""


@pytest.mark.long
def test_on_a_full_disk_batches_wait_and_online_requests_go_on(start_server: StartServer, tmp_path: Path) -> None:
    probe = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)]
    if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("no disk can be mounted here")
    server = start_server("--file-storage-path", str(tmp_path), environment={"DISK": str(tmp_path)}, program=("-c", MOUNTED)).ready()
    disk = Path(f"/proc/{server.process.pid}/root{tmp_path}")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    server.eventually(lambda: (disk / ".banyan-reserve").exists(), "the reserve")
    batch = until(client, begin(client, lines(6000, max_tokens=64)), some_done)
    with (disk / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while True:
            filler.write(bytes(4096))
    server.eventually(lambda: "storage_full" in server.log, "storage_full in the log", 60)
    answer = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=4)
    assert answer.choices
    assert client.batches.retrieve(batch.id).status == "in_progress"
    with pytest.raises(openai.APIStatusError) as refused:
        client.files.create(file=bytes(1 << 20), purpose="user_data")
    assert (refused.value.status_code, refused.value.code) == (413, "storage_full")
    server.eventually(lambda: server.metric("banyan_requests_running") == 0, "a batch that waits")
    waiting = done(client.batches.retrieve(batch.id))
    (disk / "filler").unlink()
    batch = until(client, batch, lambda seen: done(seen) > waiting)
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = end(client, batch)
    assert batch.status == "cancelled"
    check(client, batch, 6000)

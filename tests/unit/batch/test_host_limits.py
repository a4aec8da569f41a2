"""What is too large for the files and batches of a server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from aiohttp.test_utils import TestClient, TestServer

from banyan_runtime.batch.host.boot import Boot
from banyan_runtime.batch.host.examine import Rules, examine
from banyan_runtime.batch.host.process import Host
from banyan_runtime.batch.host.reserve import Reserve
from banyan_runtime.batch.host.routes import Limits
from banyan_runtime.batch.host.shelf import Storage
from banyan_runtime.storage.local import LocalStore

CHAT = "/v1/chat/completions"
BOOT = Boot(
    storage="", socket="", server="", key="", models=("tiny",), endpoints=(CHAT,), max_running=1, log_level="info", log_format="text"
)


def files_in(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("purpose", "size"), [("batch", 20), ("user_data", 30)])
@pytest.mark.parametrize("purpose_first", [True, False])
def test_a_file_beyond_its_limit_is_refused_and_leaves_nothing_behind(tmp_path: Path, purpose: str, size: int, purpose_first: bool) -> None:
    def form(data: bytes) -> aiohttp.FormData:
        made = aiohttp.FormData()
        parts: list[tuple[str, Any, dict[str, Any]]] = [("purpose", purpose, {}), ("file", data, {"filename": "a"})]
        for name, value, more in parts if purpose_first else parts[::-1]:
            made.add_field(name, value, **more)
        return made

    async def scenario() -> None:
        host = Host(BOOT, Storage(LocalStore(tmp_path), "", Reserve(None)), cast(Any, None), limits=Limits(30, 20))
        async with TestClient(TestServer(host.app)) as client:
            assert (await client.post("/v1/files", data=form(b"x"))).status == 200  # the folders are there
            before = files_in(tmp_path)
            refused = await client.post("/v1/files", data=form(b"x" * (size + 1)))
            assert (refused.status, (await refused.json())["code"]) == (413, "file_too_large")
            assert files_in(tmp_path) == before
            assert (await (await client.post("/v1/files", data=form(b"x" * size))).json())["bytes"] == size

    asyncio.run(scenario())


def test_a_batch_of_too_many_lines_is_refused(tmp_path: Path) -> None:
    line = b'{"custom_id": "%d", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "tiny", "messages": []}}\n'
    (tmp_path / "in.jsonl").write_bytes(b"".join(line % number for number in range(3)))
    store = LocalStore(tmp_path)
    assert examine(store, "in.jsonl", Rules(CHAT, ("tiny",), max_lines=3)).problems == []
    assert [one.code for one in examine(store, "in.jsonl", Rules(CHAT, ("tiny",), max_lines=2)).problems] == ["too_many_tasks"]

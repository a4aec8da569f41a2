"""Thousands of drawn requests over /openapi.json: no failure, no hang, and a server that afterwards is what it was before.

BANYAN_FUZZ_CASES says how many (`make fuzz`: ten thousand), BANYAN_FUZZ_SEED which.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.clients.fuzz.cases import Cases
from tests.e2e.clients.fuzz.sender import Sender
from tests.support.server.process import ServerProcess

CASES = int(os.environ.get("BANYAN_FUZZ_CASES", "1000"))
SEED = int(os.environ.get("BANYAN_FUZZ_SEED", "20"))
CONNECTIONS = 12
SHARES = 10  # between which the server must answer a plain question as ever
QUESTION: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 64,
}
MORE_FILES = 40  # open connections of the cases, and workers that were forked anew
MORE_MEMORY = 400 << 20  # bytes of all processes together; parts of it are caches with a bound

pytestmark = pytest.mark.timeout(60 + CASES // 4)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_chat: Path) -> Iterator[ServerProcess]:
    scratch = tmp_path_factory.mktemp("fuzz")
    flags = ("--reasoning-parser", "qwen3", "--enable-embeddings", "--enable-tokenizer-info-endpoint")
    process = ServerProcess(tiny_chat, scratch / "server.log", *flags, "--file-storage-path", str(scratch / "storage"))
    yield process.ready()
    process.stop()


def answer(server: ServerProcess) -> Any:
    told = server.post("/v1/chat/completions", QUESTION)
    assert told.status_code == 200, told.text
    return told.json()["choices"]


def processes(server: ServerProcess) -> list[psutil.Process]:
    root = psutil.Process(server.process.pid)
    return [root, *root.children(recursive=True)]


def files(server: ServerProcess) -> int:
    """Descriptors of front and engine, which live as long as the server."""
    return sum(process.num_fds() for process in (psutil.Process(server.process.pid), server.engine))


def memory(server: ServerProcess) -> int:
    """Bytes, of all processes."""
    return sum(process.memory_info().rss for process in processes(server))


def idle(server: ServerProcess) -> bool:
    """Whether nothing is left of any request."""
    gauges = ("banyan_requests_running", "banyan_requests_waiting", 'banyan_kv_cache_tokens{state="used"}')
    return all(server.metric(name) == 0 for name in gauges) and server.get("/load").json() == {"server_load": 0}


def unused(server: ServerProcess) -> bool:
    """Whether the cache can be emptied, and then every page is free."""
    pages = server.get("/server_info").json()["max_total_num_tokens"]
    return server.post("/flush_cache", {}).status_code == 200 and server.metric('banyan_kv_cache_tokens{state="free"}') == pages


def test_drawn_requests_are_answered_without_a_failure_and_leave_nothing_behind(server: ServerProcess) -> None:
    usual = answer(server)
    document = server.get("/openapi.json").json()
    known: deque[str] = deque(maxlen=50)
    sender = Sender(int(server.url.rpartition(":")[2]), Cases(document, SEED, known), known)
    asyncio.run(sender.run(CASES // SHARES, CONNECTIONS))
    files_then, memory_then = files(server), memory(server)
    for _ in range(SHARES - 1):
        asyncio.run(sender.run(CASES // SHARES, CONNECTIONS))
        assert answer(server) == usual
    told = sender.outcome
    print(f"{CASES} cases: {dict(sorted(told.statuses.items()))}, {told.left} left, {told.closed} closed")
    print(f"files {files_then} -> {files(server)}, memory {memory_then >> 20} -> {memory(server) >> 20} MiB")
    assert not told.wrong, f"{len(told.wrong)} of {CASES}:\n" + "\n".join(told.wrong[:20])
    assert told.statuses[200] > CASES / 10, "too few of the cases are requests that run"
    server.eventually(lambda: idle(server), "a server without requests")
    server.eventually(lambda: unused(server), "a cache that is wholly free")
    assert answer(server) == usual
    assert files(server) <= files_then + MORE_FILES
    assert memory(server) <= memory_then + MORE_MEMORY
    assert "Traceback" not in server.log

"""Planning while its processes, and what they need, fail: no place is lost, nobody is blamed who is not at fault, and what is
wrong is told."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import resource
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from banyan_runtime.config import ServerConfig
from banyan_runtime.errors import UnavailableError
from banyan_runtime.front.errors import ApiError
from banyan_runtime.front.plan import ChatPlan
from banyan_runtime.front.prepare.fork_server import ForkServer
from banyan_runtime.front.prepare.worker_client import Hello, WorkerClient, framed
from banyan_runtime.front.prepare.worker_pool import WorkerPool
from tests.unit.front.test_worker_pool import CHAT, INFO, eventual_plan, on_the_loop, pool_of, processes, refusal, until, until_busy

# About a second of computing on a message that asks for it.
LONG = (
    "{% if 'long' in messages[0].content %}{% for i in range(2500) %}{% for j in range(2500) %}{% endfor %}{% endfor %}{% endif %}"
    "{{ messages[0].content }}"
)
UNAVAILABLE = (503, "unavailable", {"Retry-After": "5"})


def facts(error: ApiError) -> tuple[int, str | None, dict[str, str]]:
    return error.status, error.code, error.headers


def fork_server_of(folder: Path) -> ForkServer:
    return ForkServer(ServerConfig(model_path=str(folder), served_model_name=("tiny",)), folder)


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    """As when this process has reached its limit of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.long
@on_the_loop
async def test_no_place_is_lost_while_there_are_no_descriptors(tiny_chat: Path) -> None:
    async with pool_of(tiny_chat) as pool:
        workers = processes(pool)
        for worker in workers:
            worker.kill()
        await asyncio.to_thread(psutil.wait_procs, workers, 10)
        with no_descriptor_left():
            errors = await asyncio.gather(*(refusal(pool, CHAT) for _ in range(3)))
        assert [facts(error) for error in errors] == [UNAVAILABLE] * 3
        plans = await asyncio.gather(*(pool.plan("chat", CHAT, "request") for _ in range(6)))
        assert all(isinstance(plan, ChatPlan) for plan in plans)
        await until(lambda: len(processes(pool)) == 3)


@pytest.mark.long
@on_the_loop
async def test_a_bug_while_a_worker_is_replaced_loses_no_place(
    tiny_chat: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with pool_of(tiny_chat, workers=1) as pool:
        fork, tried = pool._forks.fork, asyncio.Event()

        async def broken() -> WorkerClient:
            tried.set()
            raise LookupError("nothing there")

        monkeypatch.setattr(pool._forks, "fork", broken)
        processes(pool)[0].kill()
        await asyncio.wait_for(tried.wait(), 10)  # the pool sees by itself that the worker is gone
        monkeypatch.setattr(pool._forks, "fork", fork)
        assert isinstance(await pool.plan("chat", CHAT, "request"), ChatPlan)
        assert "nothing there" in caplog.text


def test_the_number_of_an_ended_worker_is_not_killed_whoever_has_it_by_then() -> None:
    sleeper = psutil.Popen(["sleep", "60"])
    try:
        for unread in (b"", framed(Hello(sleeper.pid))):
            ours, theirs = socket.socketpair()
            worker = WorkerClient(ours)
            worker.pid = sleeper.pid
            theirs.sendall(unread)
            assert not worker.gone
            theirs.close()  # what the end of a worker does
            assert worker.gone
            worker.kill()
            worker.close()
            worker.close()
        with pytest.raises(psutil.TimeoutExpired):
            sleeper.wait(0.3)
    finally:
        sleeper.kill()
        sleeper.wait()


@pytest.mark.long
@on_the_loop
async def test_while_no_worker_can_be_had_requests_are_refused_soon_and_it_is_told(
    tiny_chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("banyan_runtime.front.prepare.worker_pool.LACK_S", 1.0)
    model = shutil.copytree(tiny_chat, tmp_path / "model")
    async with pool_of(model) as pool:
        told: asyncio.Queue[str] = asyncio.Queue()
        pool.on_lack = told.put_nowait
        (model / "tokenizer.json").rename(tmp_path / "away")
        assert isinstance(pool._forks, ForkServer)
        fork_server = psutil.Process(pool._forks.pid)
        workers = fork_server.children()
        fork_server.kill()
        assert not psutil.wait_procs(workers, 10)[1]  # until then one of them may answer
        crowd = [refusal(pool, CHAT) for _ in range(6)]  # more than there are places
        async with asyncio.timeout(15):
            assert [facts(error) for error in await asyncio.gather(*crowd)] == [UNAVAILABLE] * 6
        async with asyncio.timeout(30):
            while str(model) not in (why := await told.get()):  # as soon as the reason is known
                assert why
            (tmp_path / "away").rename(model / "tokenizer.json")
            while await told.get():  # though nobody asks for anything meanwhile
                pass
        assert isinstance(await eventual_plan(pool), ChatPlan)


@pytest.mark.long
@on_the_loop
async def test_a_process_that_stands_still_while_it_loads_is_replaced(tiny_chat: Path) -> None:
    async with pool_of(tiny_chat) as pool:
        fork_server = pool._forks
        assert isinstance(fork_server, ForkServer)
        first, patience = fork_server.pid, fork_server._load_s
        fork_server._load_s = 1.0
        os.kill(first, signal.SIGKILL)
        await until(lambda: fork_server.pid != first)
        os.kill(fork_server.pid, signal.SIGSTOP)
        await until(lambda: fork_server.trouble != "")
        fork_server._load_s = patience
        assert isinstance(await asyncio.wait_for(eventual_plan(pool), 60), ChatPlan)


@pytest.mark.long
@on_the_loop
async def test_workers_that_end_while_the_server_warms_up_are_replaced(tiny_chat: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fork_server = fork_server_of(tiny_chat)
    await fork_server.start()
    pool = WorkerPool(fork_server)
    try:
        greeted, left = fork_server._greeted, 5

        async def killed(worker: WorkerClient, process: asyncio.subprocess.Process | None) -> WorkerClient:
            nonlocal left
            for child in psutil.Process(fork_server.pid).children() if left else ():
                left -= 1
                child.kill()
            return await greeted(worker, process)

        monkeypatch.setattr(fork_server, "_greeted", killed)
        fork_server.serve(INFO)
        os.kill(fork_server.pid, signal.SIGKILL)  # and the process that forks with them
        await pool.warm_up()
        assert isinstance(await pool.plan("chat", CHAT, "request"), ChatPlan)
    finally:
        pool.close()


@pytest.mark.long
@on_the_loop
async def test_a_warm_up_without_any_worker_says_why(tiny_chat: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("banyan_runtime.front.prepare.worker_pool.WARM_UP_S", 0.5)
    monkeypatch.setattr("banyan_runtime.front.prepare.fork_server.AGAIN_AFTER_S", (60.0,))
    fork_server = fork_server_of(tiny_chat)
    await fork_server.start()
    pool = WorkerPool(fork_server)
    try:
        fork_server.serve(INFO)
        os.kill(fork_server.pid, signal.SIGKILL)
        with pytest.raises(UnavailableError, match="exit code -9"):
            await pool.warm_up()
    finally:
        pool.close()


@pytest.mark.long
@on_the_loop
async def test_a_process_that_ends_while_it_starts_is_started_once_more(tiny_chat: Path) -> None:
    async def kill(fork_server: ForkServer, times: int) -> None:
        ended: list[int] = []
        for _ in range(times):
            await until(lambda: fork_server._process is not None and fork_server.pid not in ended)
            ended.append(fork_server.pid)
            os.kill(ended[-1], signal.SIGKILL)

    fork_server = fork_server_of(tiny_chat)
    await asyncio.gather(fork_server.start(), kill(fork_server, 1))
    fork_server.close()
    fork_server = fork_server_of(tiny_chat)
    killer = asyncio.create_task(kill(fork_server, 2))
    with pytest.raises(UnavailableError, match="exit code -9"):
        await fork_server.start()
    await killer


@on_the_loop
async def test_a_worker_that_stands_still_costs_a_second_try(tiny_chat: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("banyan_runtime.front.prepare.worker_client.CHECK_EVERY_S", 0.1)
    async with pool_of(tiny_chat, workers=1) as pool:
        (worker,) = processes(pool)
        worker.suspend()
        assert isinstance(await pool.plan("chat", CHAT, "request"), ChatPlan)
        assert worker not in processes(pool)


@pytest.mark.long
@on_the_loop
async def test_when_every_worker_stands_still_the_request_is_not_blamed(
    tiny_chat: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("banyan_runtime.front.prepare.worker_client.CHECK_EVERY_S", 0.1)
    async with pool_of(tiny_chat, workers=1) as pool:
        fork = pool._forks.fork

        async def suspended() -> WorkerClient:
            worker = await fork()
            psutil.Process(worker.pid).suspend()
            return worker

        for worker in processes(pool):
            worker.suspend()
        monkeypatch.setattr(pool._forks, "fork", suspended)
        assert facts(await refusal(pool, CHAT)) == UNAVAILABLE
        assert [record for record in caplog.records if record.levelno >= logging.WARNING]
        monkeypatch.setattr(pool._forks, "fork", fork)
        assert isinstance(await pool.plan("chat", CHAT, "request"), ChatPlan)


@pytest.mark.long
@on_the_loop
async def test_on_a_busy_machine_a_template_is_judged_by_what_it_computes(tiny_chat: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("banyan_runtime.front.prepare.worker_client.CHECK_EVERY_S", 0.02)
    monkeypatch.setattr("banyan_runtime.front.prepare.worker_client.STALLED_CHECKS", 1_000_000)
    monkeypatch.setattr("banyan_runtime.front.prepare.worker_client.RENDER_CPU_S", 2.0)
    body = json.dumps({"messages": [{"role": "user", "content": "long"}]}).encode()
    async with pool_of(tiny_chat, workers=1, chat_template=LONG) as pool:
        (worker,) = processes(pool)
        work = asyncio.create_task(pool.plan("chat", body, "request"))
        await asyncio.to_thread(until_busy, worker)
        worker.suspend()
        await asyncio.wait({work}, timeout=3.0)  # more on the wall than the template may compute
        assert not work.done()
        worker.resume()
        assert isinstance(await work, ChatPlan)

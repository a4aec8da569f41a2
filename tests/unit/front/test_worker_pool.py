"""Planning in processes of its own: what it costs the event loop, and what happens when processes end or never do."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from banyan_runtime.config import ServerConfig
from banyan_runtime.errors import ConfigError, ModelError
from banyan_runtime.front.errors import ApiError
from banyan_runtime.front.plan import AnswerPlan, ChatPlan, CompletionPlan, NativePlan, Plan
from banyan_runtime.front.prepare.fork_server import ForkServer
from banyan_runtime.front.prepare.planner import Planner
from banyan_runtime.front.prepare.worker_pool import LARGE_BYTES, WorkerPool, workers_for
from banyan_runtime.front.text.text import Text
from tests.unit.front.support import engine_info

USER = [{"role": "user", "content": "What is the capital of France?"}]
CHAT = json.dumps({"messages": USER}).encode()
INFO = engine_info(vocab_size=1 << 20, context_len=1 << 20, max_model_len=1 << 20, max_req_input_len=(1 << 20) - 6)
# Ends at once on the message of the trial at start, and would run for hours on one with a word that sets it off.
ENDLESS = (
    "{% if 'endless' in messages[0].content %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    "{% else %}{{ messages[0].content }}{% endif %}"
)


def on_the_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on the event loop that servers use."""

    @functools.wraps(test)
    def run(*arguments: Any, **fixtures: Any) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(test(*arguments, **fixtures))

    return run


@contextlib.asynccontextmanager
async def pool_of(folder: Path, *, timeout_s: float = 30.0, workers: int = 3, **flags: Any) -> AsyncIterator[WorkerPool]:
    config = ServerConfig(model_path=str(folder), served_model_name=("tiny",), **flags)
    fork_server = ForkServer(config, folder)
    await fork_server.start()
    pool = WorkerPool(fork_server, timeout_s=timeout_s, workers=workers)
    try:
        fork_server.serve(INFO)
        await pool.warm_up()
        yield pool
    finally:
        pool.close()


def processes(pool: WorkerPool) -> list[psutil.Process]:
    """The workers that are alive."""
    return psutil.Process(pool._forks.pid).children()


@pytest.mark.parametrize(("cores", "workers"), [(1, 3), (4, 3), (6, 3), (8, 4), (16, 8), (96, 8)])
def test_more_cores_prepare_more_requests_at_once(cores: int, workers: int) -> None:
    assert workers_for(cores) == workers


def until_busy(worker: psutil.Process) -> None:
    """Wait until it has computed for a while."""
    before = worker.cpu_times().user
    while worker.cpu_times().user < before + 0.05:
        time.sleep(0.005)


async def until(seen: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while True:
            if seen():
                return
            await asyncio.sleep(0.001)


async def eventual_plan(pool: WorkerPool) -> Plan:
    """Of a client who tries again as long as the server asks for it."""
    while True:
        try:
            return await pool.plan("chat", CHAT, "request")
        except ApiError as error:
            if error.code != "unavailable":
                raise
            await asyncio.sleep(0.1)


async def refusal(pool: WorkerPool, body: bytes, endpoint: Any = "chat") -> ApiError:
    with pytest.raises(ApiError) as raised:
        await pool.plan(endpoint, body, "request")
    return raised.value


@on_the_loop
async def test_a_plan_or_a_refusal_made_beside_the_loop_is_the_one_made_here(tiny_chat: Path) -> None:
    config = ServerConfig(model_path=str(tiny_chat), served_model_name=("tiny",))
    inline = Planner(config, Text.load(config, tiny_chat), INFO)
    bodies: list[tuple[Any, dict[str, Any]]] = [
        ("chat", {"messages": USER, "n": 3, "stop": ["a", "b"], "logprobs": True, "nonsense": 1}),
        ("completions", {"prompt": ["Hello", "Grüße"], "echo": True, "n": 2, "logprobs": 1}),
        ("completions", {"prompt": [[5] * 50_000, [6] * 50_000], "n": 2}),
        ("generate", {"text": ["a", "b"], "sampling_params": [{"temperature": 0.5}, {"top_k": 3}], "rid": "x"}),
        ("tokenize", {"prompt": "Hello there " * 20_000}),
        ("detokenize", {"tokens": [5, 6, 7]}),
    ]
    async with pool_of(tiny_chat) as pool:
        for endpoint, body in bodies:
            raw = json.dumps(body).encode()
            plan = await pool.plan(endpoint, raw, "request")
            assert isinstance(plan, ChatPlan | CompletionPlan | NativePlan | AnswerPlan)
            assert plan == inline.plan(endpoint, raw, "request")
        error = await refusal(pool, json.dumps({"messages": USER, "temperature": 3.0}).encode())
        assert (error.status, error.code, error.param) == (400, "decimal_above_max_value", "temperature")
        assert (await refusal(pool, b"{")).status == 400


@on_the_loop
async def test_workers_that_are_killed_are_replaced_and_cost_nothing_but_themselves(tiny_chat: Path) -> None:
    async with pool_of(tiny_chat) as pool:
        for _ in range(5):
            for worker in processes(pool):
                worker.kill()
            plans = await asyncio.gather(*(pool.plan("chat", CHAT, "request") for _ in range(20)))
            assert len({plan.requests[0].token_ids for plan in plans if isinstance(plan, ChatPlan)}) == 1


@pytest.mark.long
@on_the_loop
async def test_a_worker_killed_at_work_costs_a_second_try(tiny_chat: Path) -> None:
    body = json.dumps({"prompt": "word " * 400_000}).encode()
    async with pool_of(tiny_chat, workers=1) as pool:
        (worker,) = processes(pool)
        work = asyncio.create_task(pool.plan("completions", body, "request"))
        await asyncio.to_thread(until_busy, worker)
        worker.kill()
        plan = await work
        assert isinstance(plan, CompletionPlan)
        assert plan.requests[0].prompt_tokens >= 400_000


@on_the_loop
async def test_the_process_that_forks_is_started_again(tiny_chat: Path) -> None:
    async with pool_of(tiny_chat) as pool:
        first = pool._forks.pid
        workers = processes(pool)
        os.kill(first, signal.SIGKILL)
        _, alive = await asyncio.to_thread(psutil.wait_procs, workers, 10)
        assert not alive, "workers outlive the process that they came from"
        assert isinstance(await eventual_plan(pool), ChatPlan)
        assert pool._forks.pid != first


@pytest.mark.long
@on_the_loop
async def test_a_process_that_forks_no_more_is_replaced(tiny_chat: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("banyan_runtime.front.prepare.fork_server.HELLO_S", 1.0)
    async with pool_of(tiny_chat) as pool:
        first = pool._forks.pid
        os.kill(first, signal.SIGSTOP)
        for worker in processes(pool):
            worker.kill()
        assert isinstance(await eventual_plan(pool), ChatPlan)
        assert pool._forks.pid != first


@pytest.mark.long
@on_the_loop
async def test_nothing_is_left_when_the_pool_is_closed(tiny_chat: Path) -> None:
    async with pool_of(tiny_chat) as pool:
        processes_ = [psutil.Process(pool._forks.pid), *processes(pool)]
        assert len(processes_) == 4
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes_, 10)
    assert not alive


@on_the_loop
async def test_an_endless_template_is_ended_and_named(tiny_chat: Path) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "endless"}]}).encode()
    async with pool_of(tiny_chat, chat_template=ENDLESS) as pool:
        errors = [asyncio.create_task(refusal(pool, body)) for _ in range(2)]
        await asyncio.sleep(0)
        assert isinstance(await pool.plan("chat", CHAT, "request"), ChatPlan)
        assert not any(error.done() for error in errors), "a place is left, and the loop is free"
        for error in await asyncio.gather(*errors):
            assert (error.status, error.param) == (400, "messages")
        assert isinstance(await pool.plan("chat", CHAT, "request"), ChatPlan)


@pytest.mark.long
@on_the_loop
async def test_a_template_that_no_signal_reaches_is_killed_and_named(tiny_chat: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("banyan_runtime.front.prepare.worker_client.CHECK_EVERY_S", 0.1)
    monkeypatch.setattr("banyan_runtime.front.prepare.worker_client.RENDER_CPU_S", 0.3)  # before its own limit
    body = json.dumps({"messages": [{"role": "user", "content": "endless"}]}).encode()
    async with pool_of(tiny_chat, workers=1, chat_template=ENDLESS) as pool:
        (worker,) = processes(pool)
        error = await refusal(pool, body)
        assert (error.status, error.param) == (400, "messages")
        assert isinstance(await pool.plan("chat", CHAT, "request"), ChatPlan)
        assert worker not in processes(pool)


@pytest.mark.long
@on_the_loop
async def test_what_takes_too_long_is_our_fault_and_ends_in_time(tiny_chat: Path) -> None:
    body = json.dumps({"prompt": "word " * 3_000_000}).encode()
    async with pool_of(tiny_chat, timeout_s=1.0) as pool:
        error = await refusal(pool, body, "completions")
        assert (error.status, error.code) == (503, "timeout")


@pytest.mark.long
@on_the_loop
async def test_whoever_goes_away_frees_the_place(tiny_chat: Path) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "endless"}]}).encode()
    async with pool_of(tiny_chat, workers=1, chat_template=ENDLESS) as pool:
        tasks = [asyncio.create_task(pool.plan("chat", body, "request")) for _ in range(3)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert isinstance(await pool.plan("chat", CHAT, "request"), ChatPlan)


@pytest.mark.long
@on_the_loop
async def test_large_requests_leave_a_worker_to_small_ones(tiny_chat: Path) -> None:
    large = json.dumps({"prompt": "word " * 150_000}).encode()
    assert len(large) > LARGE_BYTES
    async with pool_of(tiny_chat) as pool:
        crowd = [asyncio.create_task(pool.plan("completions", large, "request")) for _ in range(4)]
        await asyncio.sleep(0)
        for _ in range(5):
            assert isinstance(await pool.plan("chat", CHAT, "request"), ChatPlan)
        assert not any(task.done() for task in crowd)
        await asyncio.gather(*crowd)


@pytest.mark.long
@pytest.mark.matrix(gate=1)
@pytest.mark.parametrize("name", ["json_schema", "json_sch\\u0065ma"])
@on_the_loop
async def test_grammars_leave_a_worker_to_requests_without_one(tiny_chat: Path, name: str) -> None:
    def endless(number: int) -> bytes:
        schema = json.dumps({"allOf": [{"type": "string", "pattern": f".*{number + part}.*"} for part in range(1000)]})
        return f'{{"prompt":"a","{name}":{schema}}}'.encode()

    async with pool_of(tiny_chat) as pool:
        crowd = [asyncio.create_task(pool.plan("completions", endless(number), "request")) for number in range(4)]
        await asyncio.sleep(0)
        for _ in range(5):
            assert isinstance(await pool.plan("chat", CHAT, "request"), ChatPlan)
        assert not any(task.done() for task in crowd)
        for task in crowd:
            task.cancel()
        await asyncio.wait(crowd)


@pytest.mark.long
@on_the_loop
async def test_too_many_that_wait_are_told_to_come_again(tiny_chat: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("banyan_runtime.front.prepare.worker_pool.MAX_WAITING", 4)
    async with pool_of(tiny_chat, workers=1) as pool:
        answers = await asyncio.gather(*(pool.plan("chat", CHAT, "request") for _ in range(10)), return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, ApiError)]
        assert {(error.status, error.code) for error in refused} == {(429, "queue_full")}
        assert 0 < len(refused) < 10
        assert isinstance(await pool.plan("chat", CHAT, "request"), ChatPlan)


@pytest.mark.long
@on_the_loop
async def test_a_body_that_takes_too_much_memory_is_refused_and_harms_nobody(tiny_chat: Path) -> None:
    nested = b'{"messages":[' + b"{}," * 9_000_000 + b"{}]}"
    async with pool_of(tiny_chat) as pool:
        assert (await refusal(pool, nested)).status in (400, 413)
        assert isinstance(await pool.plan("chat", CHAT, "request"), ChatPlan)


@pytest.mark.long
@on_the_loop
async def test_what_is_wrong_with_the_files_is_said_before_anything_is_served(tiny_chat: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=str(tmp_path)):
        await ForkServer(ServerConfig(model_path=str(tmp_path)), tmp_path).start()
    config = ServerConfig(model_path=str(tiny_chat), chat_template="{% for %}")
    with pytest.raises(ConfigError, match="--chat-template"):
        await ForkServer(config, tiny_chat).start()


@pytest.mark.long
@on_the_loop
async def test_a_template_that_does_not_end_is_named_at_the_start(tiny_chat: Path) -> None:
    endless = ENDLESS.replace("endless", "Hello")  # the message that is tried at start
    with pytest.raises(ConfigError, match="--chat-template"):
        await ForkServer(ServerConfig(model_path=str(tiny_chat), chat_template=endless), tiny_chat).start()

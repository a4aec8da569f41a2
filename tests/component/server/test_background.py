"""Background requests (a priority below 0) beside online ones, as clients see them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2 as httpx
import openai
import pytest

from tests.support.server.process import MODEL, ServerProcess, StartServer

BATCH = -10
RUNNING = 'banyan_requests_background{state="running"}'
WAITING = 'banyan_requests_background{state="waiting"}'


@pytest.fixture
def narrow(start_server: StartServer) -> Iterator[ServerProcess]:
    """A server that runs two requests at a time and lets two wait."""
    server = start_server("--max-running-requests", "2", "--max-queued-requests", "2").ready()
    yield server
    server.stop()


def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="None", max_retries=0, timeout=60)


def line(server: ServerProcess, tokens: int = 1500) -> str | None:
    """How a background request ends."""
    wish = {"ignore_eos": True, "priority": BATCH}
    return client(server).completions.create(model=MODEL, prompt="a", max_tokens=tokens, extra_body=wish).choices[0].finish_reason


def test_a_queue_full_of_background_refuses_background_alone_and_online_requests_are_answered_first(narrow: ServerProcess) -> None:
    with narrow.slowed(), ThreadPoolExecutor(4) as pool:
        lines = [pool.submit(line, narrow) for _ in range(2)]
        narrow.eventually(lambda: narrow.metric(RUNNING) == 2, "running background", 10)
        lines += [pool.submit(line, narrow) for _ in range(2)]
        narrow.eventually(lambda: narrow.metric(WAITING) == 2, "waiting background", 10)
        assert (narrow.metric("banyan_requests_running"), narrow.metric("banyan_requests_waiting")) == (2, 2)
        with pytest.raises(openai.RateLimitError) as refusal:
            line(narrow)
        assert (refusal.value.code, refusal.value.response.headers["retry-after"]) == ("queue_full", "1")
        for _ in range(3):
            answer = client(narrow).completions.create(model=MODEL, prompt="b", max_tokens=5, extra_body={"ignore_eos": True})
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 5
        assert not any(one.done() for one in lines), "online requests did not wait for them"
        narrow.post("/abort_request", {"abort_all": True})
        assert {one.result() for one in lines} <= {"abort", "length", "stop"}


def test_background_gets_on_while_online_requests_come_one_after_another(start_server: StartServer) -> None:
    server = start_server().ready()
    with ThreadPoolExecutor(1) as pool:
        batch = pool.submit(line, server, 60)
        for _ in range(200):
            client(server).completions.create(model=MODEL, prompt="b", max_tokens=20, extra_body={"ignore_eos": True})
            if batch.done():
                break
        assert batch.done()
        assert batch.result() == "length"
    server.stop()


def test_thousands_of_cancelled_lines_leave_nothing_behind_and_online_requests_go_on(start_server: StartServer) -> None:
    server = start_server("--max-running-requests", "64").ready()
    wish = {"model": MODEL, "max_tokens": 1000, "ignore_eos": True, "priority": BATCH}
    lines = [{**wish, "prompt": [f"line {part * 100 + number}" for number in range(100)]} for part in range(20)]
    with httpx.Client(timeout=60, verify=False) as asking, ThreadPoolExecutor(20) as pool:
        posts = [pool.submit(asking.post, f"{server.url}/v1/completions", json=body) for body in lines]
        server.eventually(lambda: server.metric(RUNNING) + server.metric(WAITING) == 2000, "all lines", 60)
        assert server.post("/abort_request", {"abort_all": True}).status_code == 200
        answer = client(server).completions.create(model=MODEL, prompt="b", max_tokens=5, extra_body={"ignore_eos": True})
        assert answer.choices[0].finish_reason == "length"
        assert [post.result().status_code for post in posts] == [200] * 20
    server.eventually(lambda: server.metric("banyan_requests_running") + server.metric("banyan_requests_waiting") == 0, "an empty engine")
    server.eventually(lambda: server.metric('banyan_kv_cache_tokens{state="used"}') == 0, "no token held by anybody")
    server.stop()

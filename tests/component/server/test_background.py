"""Background requests (a priority below 0) beside online ones, as clients see them; how they wait is in test_deadlines.py."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx2 as httpx
import openai
import pytest

from tests.support.server.process import MODEL, ServerProcess, StartServer

BATCH = -10
RUNNING = 'banyan_requests_background{state="running"}'
WAITING = 'banyan_requests_background{state="waiting"}'


def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="None", max_retries=0, timeout=60)


def line(server: ServerProcess, tokens: int = 1500) -> str | None:
    """How a background request ends."""
    wish = {"ignore_eos": True, "priority": BATCH}
    return client(server).completions.create(model=MODEL, prompt="a", max_tokens=tokens, extra_body=wish).choices[0].finish_reason


@pytest.mark.long
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


@pytest.mark.long
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

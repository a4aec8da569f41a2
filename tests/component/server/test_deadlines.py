"""What bounds the time of a request and the queue, on a server that runs one request at a time and knows one web page."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2 as httpx
import openai
import pytest

from tests.support.server.process import DEADLINE_S, MODEL, ServerProcess, StartServer

SHORT: dict[str, Any] = {"model": MODEL, "prompt": "a", "max_tokens": 4}
LONG: dict[str, Any] = {"model": MODEL, "prompt": "a", "max_tokens": 1900, "extra_body": {"ignore_eos": True}}


QUEUED = 2
BATCH = -10
RUNNING = 'banyan_requests_background{state="running"}'
WAITING = 'banyan_requests_background{state="waiting"}'


@pytest.fixture(scope="module")
def narrow(start_server: StartServer) -> Iterator[ServerProcess]:
    """A server of its own, for its bounds would refuse what others ask. It is slow all the time."""
    options = ("--max-running-requests", "1", "--max-queued-requests", str(QUEUED))
    server = start_server(*options, "--request-timeout", "30", "--cors-allow-origins", "https://chat.example").ready()
    with server.slowed():
        yield server


def client(server: ServerProcess, timeout: float | None = None) -> openai.OpenAI:
    headers = {} if timeout is None else {"X-Request-Timeout": str(timeout)}
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="None", default_headers=headers)


def at_rest(server: ServerProcess) -> bool:
    series = ("banyan_requests_running", "banyan_requests_waiting", 'banyan_kv_cache_tokens{state="used"}')
    return [server.metric(name) for name in series] == [0, 0, 0]


def test_a_request_that_runs_too_long_is_ended_with_504_which_clients_do_not_try_again(narrow: ServerProcess) -> None:
    answered = narrow.settled("banyan_request_generation_tokens_count")
    with pytest.raises(openai.InternalServerError) as refusal:
        client(narrow, DEADLINE_S).completions.create(**LONG)
    assert (refusal.value.status_code, refusal.value.code, refusal.value.type) == (504, "timeout", "server_error")
    assert refusal.value.response.headers["x-should-retry"] == "false"
    narrow.eventually(lambda: at_rest(narrow), "its place and its pages to be free")
    assert narrow.metric("banyan_request_generation_tokens_count") == answered + 1


@pytest.mark.long
def test_a_stream_that_runs_too_long_ends_with_an_error(narrow: ServerProcess) -> None:
    chunks = client(narrow, DEADLINE_S).completions.create(**LONG, stream=True)
    assert next(iter(chunks)).choices[0].text
    with pytest.raises(openai.APIError) as refusal:
        list(chunks)
    assert (refusal.value.code, refusal.value.type, refusal.value.param) == ("timeout", "server_error", None)
    narrow.eventually(lambda: at_rest(narrow), "its place and its pages to be free")


def test_a_request_that_waits_too_long_gets_503_and_may_come_again(narrow: ServerProcess) -> None:
    with client(narrow).completions.create(**LONG, stream=True) as stream:
        next(iter(stream))
        once = client(narrow, 0.2).with_options(max_retries=0)
        with pytest.raises(openai.InternalServerError) as refusal:
            once.completions.create(model=MODEL, prompt="b", max_tokens=1)
        assert (refusal.value.status_code, refusal.value.code) == (503, "timeout")
        assert refusal.value.response.headers["retry-after"] == "1"
        with pytest.raises(openai.APIError) as streamed:
            list(once.completions.create(model=MODEL, prompt="b", max_tokens=1, stream=True))
        assert streamed.value.code == "timeout"
    narrow.eventually(lambda: at_rest(narrow), "nothing to be left")


@pytest.mark.parametrize("given", ["0", "-1", "soon", "nan", "86401", "inf"])
def test_a_timeout_that_makes_no_sense_is_refused(narrow: ServerProcess, given: str) -> None:
    answer = httpx.post(f"{narrow.url}/v1/completions", json={"prompt": "a"}, headers={"X-Request-Timeout": given})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "X-Request-Timeout")


@pytest.mark.parametrize(("path", "field"), [("/tokenize", "prompt"), ("/v1/embeddings", "input")])
def test_a_deadline_ends_what_is_made_without_the_engine_too(narrow: ServerProcess, path: str, field: str) -> None:
    body = {field: "word " * 400_000}
    answer = httpx.post(narrow.url + path, json=body, headers={"X-Request-Timeout": "0.001"}, timeout=30)
    assert (answer.status_code, answer.json()["error"]["code"], answer.headers["retry-after"]) == (503, "timeout", "1")
    bad = httpx.post(narrow.url + path, json={field: "a"}, headers={"X-Request-Timeout": "0"})
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "X-Request-Timeout")


# --- the queue ---


def test_a_full_queue_is_answered_with_429_and_when_to_come_again(narrow: ServerProcess) -> None:
    client = openai.OpenAI(base_url=f"{narrow.url}/v1", api_key="None", max_retries=0)

    def fill(_: int) -> None:
        client.completions.create(model=MODEL, prompt="a", max_tokens=1500, extra_body={"ignore_eos": True})

    narrow.until_idle()
    with ThreadPoolExecutor(1 + QUEUED) as pool:
        pool.submit(fill, 0)
        narrow.eventually(lambda: narrow.metric("banyan_requests_running") == 1, "a running request")
        for number in range(QUEUED):
            pool.submit(fill, 1 + number)
        narrow.eventually(lambda: narrow.metric("banyan_requests_waiting") == QUEUED, "waiting requests")
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError) as refusal:
                client.completions.create(model=MODEL, prompt="a", max_tokens=5, stream=stream)
            assert (refusal.value.code, refusal.value.type) == ("queue_full", "rate_limit_error")
            assert refusal.value.response.headers["retry-after"] == "1"
        for path in ("/livez", "/readyz", "/health_generate", "/metrics", "/v1/loads"):
            assert narrow.status(path) == 200
        narrow.post("/abort_request", {"abort_all": True})


def test_a_request_that_could_never_be_taken_is_told_so_instead_of_to_come_again(narrow: ServerProcess) -> None:
    client = openai.OpenAI(base_url=f"{narrow.url}/v1", api_key="None", max_retries=0)
    complete, chat = client.completions.create, client.chat.completions.create
    asked: list[tuple[str, Any, dict[str, Any]]] = [
        ("n", complete, {"prompt": "a", "n": 4}),
        ("prompt", complete, {"prompt": ["a", "b", "c", "d"]}),
        ("best_of", complete, {"prompt": "a", "best_of": 4}),
        ("n", chat, {"messages": [{"role": "user", "content": "hi"}], "n": 4}),
    ]
    for param, create, options in asked:
        for stream in (False, True) if param != "best_of" else (False,):
            with pytest.raises(openai.BadRequestError) as refusal:
                create(model=MODEL, stream=stream, **options)
            assert refusal.value.param == param
    native = httpx.post(f"{narrow.url}/generate", json={"text": ["a", "b", "c", "d"], "sampling_params": {"max_new_tokens": 1}})
    assert (native.status_code, native.json()["error"]["param"]) == (400, "text")
    nothing_to_compute = httpx.post(narrow.url + "/v1/completions", json={**SHORT, "prompt": ["a", "b", "c", "d"], "max_tokens": 0})
    assert nothing_to_compute.status_code == 200


# --- background ---


def line(server: ServerProcess, tokens: int = 1500) -> str | None:
    """How a background request ends."""
    wish = {"ignore_eos": True, "priority": BATCH}
    return client(server).completions.create(model=MODEL, prompt="a", max_tokens=tokens, extra_body=wish).choices[0].finish_reason


def test_a_queue_full_of_background_refuses_background_alone_and_online_requests_are_answered_first(narrow: ServerProcess) -> None:
    with ThreadPoolExecutor(4) as pool:
        lines = [pool.submit(line, narrow)]
        narrow.eventually(lambda: narrow.metric(RUNNING) == 1, "running background")
        lines += [pool.submit(line, narrow) for _ in range(2)]
        narrow.eventually(lambda: narrow.metric(WAITING) == 2, "waiting background")
        assert (narrow.metric("banyan_requests_running"), narrow.metric("banyan_requests_waiting")) == (1, 2)
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


# --- a web page ---


def test_a_page_that_is_named_may_ask_and_read(narrow: ServerProcess) -> None:
    page = {"Origin": "https://chat.example"}
    asked = httpx.options(narrow.url + "/v1/completions", headers={**page, "Access-Control-Request-Method": "POST"})
    assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, "https://chat.example")
    private = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Private-Network": "true"}
    assert httpx.options(narrow.url + "/v1/completions", headers={**page, **private}).status_code == 200
    answer = httpx.post(narrow.url + "/v1/completions", json=SHORT, headers=page)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "https://chat.example")
    assert {"x-request-id", "request-id", "retry-after", "x-banyan-ignored"} <= set(
        answer.headers["access-control-expose-headers"].split(", ")
    )
    assert httpx.post(narrow.url + "/v1/completions", json=SHORT, headers={"Origin": "http://chat.example"}).status_code == 403

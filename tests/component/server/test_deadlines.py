"""What bounds the time of a request and the queue, on a server that runs one request at a time."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2 as httpx
import openai
import pytest

from tests.support.server.process import MODEL, ServerProcess, StartServer

LONG: dict[str, Any] = {"model": MODEL, "prompt": "a", "max_tokens": 1900, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def narrow(start_server: StartServer) -> Iterator[ServerProcess]:
    options = ("--max-running-requests", "1", "--max-queued-tokens", "300", "--request-timeout", "30", "--disable-docs")
    server = start_server(*options).ready()
    with server.slowed():
        yield server


def client(server: ServerProcess, timeout: float | None = None) -> openai.OpenAI:
    headers = {} if timeout is None else {"X-Request-Timeout": str(timeout)}
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="None", default_headers=headers)


def at_rest(server: ServerProcess) -> bool:
    series = ("banyan_requests_running", "banyan_requests_waiting", 'banyan_kv_cache_tokens{state="used"}')
    return [server.metric(name) for name in series] == [0, 0, 0]


def test_a_request_that_runs_too_long_is_ended_with_504_which_clients_do_not_try_again(narrow: ServerProcess) -> None:
    answered = narrow.metric("banyan_request_generation_tokens_count")
    with pytest.raises(openai.InternalServerError) as refusal:
        client(narrow, 0.4).completions.create(**LONG)
    assert (refusal.value.status_code, refusal.value.code, refusal.value.type) == (504, "timeout", "server_error")
    assert "Request running timeout reached." in str(refusal.value)
    assert refusal.value.response.headers["x-should-retry"] == "false"
    narrow.eventually(lambda: at_rest(narrow), "its place and its pages to be free", 5)
    assert narrow.metric("banyan_request_generation_tokens_count") == answered + 1


def test_a_stream_that_runs_too_long_ends_with_an_error(narrow: ServerProcess) -> None:
    chunks = client(narrow, 0.4).completions.create(**LONG, stream=True)
    assert next(iter(chunks)).choices[0].text
    with pytest.raises(openai.APIError, match="Request running timeout reached") as refusal:
        list(chunks)
    assert (refusal.value.code, refusal.value.type, refusal.value.param) == ("timeout", "server_error", None)
    narrow.eventually(lambda: at_rest(narrow), "its place and its pages to be free", 5)


def test_a_request_that_waits_too_long_gets_503_and_may_come_again(narrow: ServerProcess) -> None:
    with client(narrow).completions.create(**LONG, stream=True) as stream:
        next(iter(stream))
        once = client(narrow, 0.2).with_options(max_retries=0)
        with pytest.raises(openai.InternalServerError) as refusal:
            once.completions.create(model=MODEL, prompt="b", max_tokens=1)
        assert (refusal.value.status_code, refusal.value.code) == (503, "timeout")
        assert "Request waiting timeout reached." in str(refusal.value)
        assert refusal.value.response.headers["retry-after"] == "1"
        with pytest.raises(openai.APIError, match="Request waiting timeout reached"):
            list(once.completions.create(model=MODEL, prompt="b", max_tokens=1, stream=True))
    narrow.eventually(lambda: at_rest(narrow), "nothing to be left", 5)


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


def test_prompts_that_wait_are_bounded_in_tokens(narrow: ServerProcess) -> None:
    def wait(letter: int) -> None:
        client(narrow).completions.create(model=MODEL, prompt=[letter] * 200, max_tokens=1)

    with ThreadPoolExecutor(1) as pool, client(narrow).completions.create(**LONG, stream=True) as stream:
        next(iter(stream))
        waits = pool.submit(wait, 5)
        narrow.eventually(lambda: narrow.metric("banyan_requests_waiting") == 1, "a request that waits", 5)
        (load,) = narrow.get("/v1/loads?include=core").json()["loads"]
        assert (load["num_waiting_reqs"], load["num_waiting_uncached_tokens"]) == (1, 200)
        for streamed in (False, True):
            with pytest.raises(openai.RateLimitError) as refusal:
                client(narrow).with_options(max_retries=0).completions.create(model=MODEL, prompt=[6] * 101, stream=streamed)
            assert (refusal.value.code, refusal.value.response.headers["retry-after"]) == ("queue_full", "1")
        stream.close()
        waits.result()


def test_docs_can_be_left_out(narrow: ServerProcess) -> None:
    assert [narrow.status(path) for path in ("/docs", "/openapi.json", "/redoc")] == [404, 404, 404]

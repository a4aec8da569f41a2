"""Probes, metrics and load of a real server."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2 as httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from banyan_runtime.front.metrics import REWRITE_EVERY_S
from tests.support.server.process import MODEL, ServerProcess

PROBES = [
    "/livez",
    "/health",
    "/healthz",
    "/ping",
    "/",
    "/readyz",
    "/ready",
    "/health_generate",
    "/metrics",
    "/metrics/load",
    "/v1/loads",
    "/load",
]
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "temperature": 0}


@pytest.mark.parametrize("path", PROBES)
def test_each_probe_of_a_ready_server_answers_200_without_redirect(server: ServerProcess, path: str) -> None:
    assert server.get(path).status_code == 200


def test_the_metrics_page_is_plain_prometheus_text_whatever_the_scraper_accepts(server: ServerProcess) -> None:
    for accept in ("application/openmetrics-text;version=1.0.0;q=0.75,text/plain;version=0.0.4;q=0.5", "*/*", ""):
        answer = server.http.get(server.url + "/metrics", headers={"Accept": accept})
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert len(list(text_string_to_metric_families(answer.text))) > 30


def test_a_request_moves_the_counters_of_front_and_engine_and_gauges_fall_back_to_zero(server: ServerProcess) -> None:
    names = (
        'banyan_requests_total{endpoint="chat",finish_reason="length"}',
        'banyan_time_to_first_token_seconds_count{streaming="false"}',
        "banyan_request_prompt_tokens_count",
        "banyan_generation_tokens_total",
        'banyan_steps_total{phase="prefill",graph="false"}',
    )
    server.eventually(lambda: server.metric("banyan_requests_running") == 0, "an empty batch", 5)
    before = [server.settled(name) for name in names]
    answer = server.post("/v1/chat/completions", {**CHAT, "ignore_eos": True})
    assert answer.json()["usage"]["completion_tokens"] == 8
    server.eventually(lambda: server.metric(names[3]) >= before[3] + 8, "the engine's numbers", 10)
    after = [server.metric(name) for name in names]
    assert [now - then for now, then in zip(after, before, strict=True)] == [1, 1, 1, 8, 1]
    assert server.metric("banyan_requests_running") == 0
    server.eventually(lambda: server.metric('banyan_kv_cache_tokens{state="used"}') == 0, "no used tokens", 10)


def test_of_many_requests_at_once_each_is_counted_and_logged_once(server: ServerProcess) -> None:
    def ask(number: int) -> int:
        body = {"model": MODEL, "prompt": f"Number {number}", "max_tokens": 5 + number % 7, "ignore_eos": True, "stream": number % 2 == 0}
        return server.post("/v1/completions", body).status_code

    ended = 'banyan_requests_total{endpoint="completions",finish_reason="length"}'
    before, lines = server.settled(ended), server.log.count("Finished cmpl-")
    with ThreadPoolExecutor(24) as pool:
        assert list(pool.map(ask, range(48))) == [200] * 48
    server.eventually(lambda: server.metric(ended) == before + 48, "48 counts", 10)
    server.eventually(lambda: server.log.count("Finished cmpl-") == lines + 48, "48 lines", 10)
    server.eventually(lambda: server.metric("banyan_requests_running") == 0, "an empty batch", 10)
    server.eventually(lambda: server.metric('banyan_kv_cache_tokens{state="used"}') == 0, "no used tokens", 10)


def test_tokens_between_the_first_and_the_last_are_counted_as_gaps(server: ServerProcess) -> None:
    before = server.settled("banyan_inter_token_latency_seconds_count")
    server.post("/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 10, "ignore_eos": True})
    server.eventually(lambda: server.metric("banyan_inter_token_latency_seconds_count") == before + 9, "nine gaps", 10)


def test_http_requests_are_counted_by_route_template_and_made_up_paths_together(server: ServerProcess) -> None:
    def counts() -> dict[str, float]:
        families = text_string_to_metric_families(server.get("/metrics").text)
        (family,) = [family for family in families if family.name == "banyan_http_requests"]
        return {
            sample.labels["handler"]: sample.value
            for sample in family.samples
            if (sample.labels["code"], sample.labels["method"]) == ("404", "GET")
        }

    time.sleep(REWRITE_EVERY_S + 0.1)
    before = counts()
    for path in ("/v1/models/one", "/v1/models/two/three", "/made/up", "/made/up/too"):
        assert server.get(path).status_code == 404

    def new() -> dict[str, float]:
        return {handler: value - before.get(handler, 0) for handler, value in counts().items() if value != before.get(handler, 0)}

    server.eventually(lambda: new() == {"/v1/models/{name:path}": 2, "unmatched": 2}, "two counts each", 10)


def test_what_is_refused_before_it_is_a_request_is_counted_too(server: ServerProcess) -> None:
    def refused(code: int) -> float:
        labels = f'handler="unmatched",method="other",code="{code}"'
        found = [line for line in server.get("/metrics").text.splitlines() if all(label in line for label in labels.split(","))]
        return float(found[0].split()[-1]) if found else 0.0

    time.sleep(REWRITE_EVERY_S + 0.1)
    before = refused(400), refused(431)
    assert server.http.get(server.url + "/v1/models", headers={"X-Much": "a" * 20_000}).status_code == 431
    address = httpx.URL(server.url)
    with socket.create_connection((address.host, address.port or 80), timeout=10) as connection:
        connection.sendall(b"what is this\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400 ")
    server.eventually(lambda: (refused(400), refused(431)) == (before[0] + 1, before[1] + 1), "one each", 5)
    server.eventually(lambda: server.metric("banyan_http_requests_in_flight") == 1, "no other open request than this scrape", 5)


@pytest.mark.long  # the clock is watched
def test_probes_answer_quickly_while_requests_run(server: ServerProcess) -> None:
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=30) as response:
        next(response.iter_lines())
        waits = []
        for _ in range(50):
            started = time.perf_counter()
            assert server.status("/livez") == 200
            waits.append(time.perf_counter() - started)
    assert sorted(waits)[45] < 0.1


def test_loads_tells_routers_what_sglang_would(server: ServerProcess) -> None:
    server.eventually(lambda: server.metric("banyan_requests_running") == 0, "an empty batch", 5)
    (load,) = server.get("/v1/loads").json()["loads"]
    assert load["num_running_reqs"] == load["num_waiting_reqs"] == 0
    assert load["max_total_num_tokens"] == server.metric("banyan_kv_cache_capacity_tokens")


def test_loads_tells_the_sections_that_are_asked_for_as_json_or_as_metrics(server: ServerProcess) -> None:
    (core,) = server.get("/v1/loads?include=core").json()["loads"]
    (rest,) = server.get("/v1/loads?include=memory,queues,spec&dp_rank=0").json()["loads"]
    assert (set(core) & {"memory", "queues"}, set(rest)) == (set(), {"dp_rank", "timestamp", "memory", "queues"})
    (everything,) = server.get("/v1/loads?include=all").json()["loads"]
    assert set(everything) == set(core) | set(rest)
    assert {"num_waiting_uncached_tokens", "total_prefill_uncached_tokens", "total_prefill_busy_us"} <= set(core)
    page = server.get("/v1/loads?format=prometheus")
    assert page.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    samples = {sample.name: sample for family in text_string_to_metric_families(page.text) for sample in family.samples}
    assert samples["sglang_num_running_reqs"].labels == {"dp_rank": "0"}
    assert samples["sglang_memory_token_capacity"].value == everything["max_total_num_tokens"]


@pytest.mark.parametrize(("query", "param"), [("include=core,cores", "include"), ("format=xml", "format"), ("dp_rank=1", "dp_rank")])
def test_loads_refuses_what_there_is_not(server: ServerProcess, query: str, param: str) -> None:
    answer = server.get(f"/v1/loads?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_vllms_names_of_load_and_aborts_work(server: ServerProcess) -> None:
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1900, "ignore_eos": True, "request_id": "mine"}
    with server.slowed(), ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.post, "/v1/completions", body)
        server.eventually(lambda: server.get("/load").json() == {"server_load": 1}, "one sequence")
        assert server.post("/abort_requests", {"request_ids": ["other", "mine"]}).status_code == 200
        assert running.result().json()["usage"]["completion_tokens"] < 1900
    assert server.get("/load").json() == {"server_load": 0}
    assert server.post("/abort_requests", {"request_ids": "mine"}).json()["error"]["param"] == "request_ids"
    assert server.post("/reset_prefix_cache", {}).status_code == 200


def test_commands_to_the_server_are_for_this_machine_and_not_for_whom_a_proxy_on_it_serves(server: ServerProcess) -> None:
    commands: dict[str, dict[str, object]] = {"/flush_cache": {}, "/abort_request": {"abort_all": True}}
    for path, body in commands.items():
        assert server.post(path, body).status_code == 200
        for header in ({"X-Forwarded-For": "203.0.113.9"}, {"X-Forwarded-For": "127.0.0.1"}, {"Via": "1.1 proxy"}):
            answer = server.http.post(server.url + path, json=body, headers=header)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "insufficient_permissions")

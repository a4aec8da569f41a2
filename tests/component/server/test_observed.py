"""What a server says of the requests it has answered: counts, finish lines, access log, traces. And what it never says."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from banyan_runtime.front.metrics import ENDPOINTS, FINISH_REASONS
from tests.support.server.collector import Collector, Span
from tests.support.server.process import MODEL, ServerProcess, StartServer

CANARY = "Zyzzyva7391"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
LIMITS: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(scope="module")
def server(start_server: StartServer, collector: Collector) -> ServerProcess:
    """A server of its own, for it says in JSON as much as it can without being asked for texts, and traces; its engine dies in the end."""
    flags = ("--log-level", "debug", "--log-format", "json", "--otlp-traces-endpoint", collector.url)
    return start_server(*flags, environment={"OTEL_BSP_SCHEDULE_DELAY": "50"}).ready()


def records(server: ServerProcess) -> list[dict[str, Any]]:
    """The log, each line of which is an object; the last may be half written."""
    text = server.log
    return [json.loads(line) for line in text[: text.rfind("\n")].split("\n")]


def finish_lines(server: ServerProcess, request_id: str) -> list[str]:
    return [line["msg"] for line in records(server) if line["msg"].startswith("Finished ") and line.get("request_id") == request_id]


def ended(server: ServerProcess) -> int:
    series = [f'banyan_requests_total{{endpoint="{one}",finish_reason="{why}"}}' for one in ENDPOINTS for why in FINISH_REASONS]
    families = text_string_to_metric_families(server.get("/metrics").text)
    (family,) = [family for family in families if family.name == "banyan_requests"]
    assert len(family.samples) == len(series)
    return int(sum(sample.value for sample in family.samples))


def ask(server: ServerProcess, path: str, body: dict[str, Any], request_id: str, **headers: str) -> httpx.Response:
    return server.http.post(server.url + path, json=body, headers={"X-Request-Id": request_id, **headers})


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **LIMITS, **more}


def test_each_accepted_sequence_ends_in_one_line_and_one_count_however_it_ends(server: ServerProcess) -> None:
    before, lines = ended(server), Counter(line["msg"].startswith("Finished ") for line in records(server))[True]
    expected: dict[str, int] = {}

    def accepted(request_id: str, path: str, body: dict[str, Any], sequences: int, status: int = 200) -> None:
        assert ask(server, path, body, request_id).status_code == status
        expected[request_id] = sequences

    accepted("whole", "/v1/chat/completions", chat("hi"), 1)
    accepted("streamed", "/v1/chat/completions", chat("hi", stream=True), 1)
    accepted("several", "/v1/completions", {"model": MODEL, "prompt": ["a", "b"], "n": 3, **LIMITS}, 6)
    accepted("stopped", "/v1/completions", {"model": MODEL, "prompt": "a", "stop": [" "], "max_tokens": 30}, 1)
    accepted("native", "/generate", {"text": "a", "sampling_params": {"max_new_tokens": 4, "n": 2}}, 2)
    accepted("nothing", "/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 0, "echo": True}, 1)
    accepted("too-long", "/v1/completions", {"model": MODEL, "prompt": "a " * 5000, **LIMITS}, 0, 400)
    accepted("invalid", "/v1/completions", {"model": MODEL, "prompt": "a", "temperature": "hot"}, 0, 400)

    long = {"model": MODEL, "prompt": "a", "max_tokens": 1500, "ignore_eos": True, "stream": True, "n": 2}
    with httpx.stream("POST", server.url + "/v1/completions", json=long, headers={"X-Request-Id": "left"}, timeout=30) as response:
        next(response.iter_lines())
    expected["left"] = 2
    native = {"text": "a", "rid": "doomed", "stream": True, "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True}}
    with httpx.stream("POST", server.url + "/generate", json=native, headers={"X-Request-Id": "aborted"}, timeout=30) as response:
        lines_of = response.iter_lines()
        next(lines_of)
        server.post("/abort_request", {"rid": "doomed"})
        for _ in lines_of:
            pass
    expected["aborted"] = 1

    total = sum(expected.values())
    server.eventually(lambda: ended(server) == before + total, f"{total} counts", 10)
    server.eventually(lambda: sum(len(finish_lines(server, name)) for name in expected) == total, f"{total} lines", 10)
    assert {name: len(finish_lines(server, name)) for name in expected} == expected
    assert Counter(line["msg"].startswith("Finished ") for line in records(server))[True] == lines + total


def test_no_text_of_a_request_is_ever_logged(server: ServerProcess) -> None:
    tool = {"type": "function", "function": {"name": CANARY, "parameters": {"type": "object"}}}
    image = {"type": "image_url", "image_url": {"url": f"https://{CANARY}/{CANARY}.png"}}
    asked: list[tuple[str, Any]] = [
        ("/v1/chat/completions", chat(CANARY)),
        ("/v1/chat/completions", chat(CANARY, stream=True, user=CANARY, metadata={"a": CANARY}, stop=[CANARY], tools=[tool])),
        ("/v1/chat/completions", chat("hi", temperature=CANARY)),
        ("/v1/chat/completions", {"model": MODEL, "messages": [{"role": CANARY, "content": CANARY}]}),
        ("/v1/chat/completions", chat(CANARY, model=CANARY)),
        ("/v1/completions", {"model": MODEL, "prompt": [CANARY, CANARY * 9], "echo": True, **LIMITS}),
        ("/v1/completions", {"model": MODEL, "prompt": CANARY * 5000, **LIMITS}),
        ("/generate", {"text": CANARY, "sampling_params": {"max_new_tokens": 4, "stop": CANARY}}),
        ("/tokenize", {"model": MODEL, "prompt": CANARY}),
        ("/v1/chat/completions", chat(CANARY, tools=[tool], tool_choice="required", max_tokens=100)),
        ("/v1/chat/completions", chat("hi", regex=f"[{CANARY}")),
        (
            "/v1/chat/completions",
            chat("hi", response_format={"type": "json_schema", "json_schema": {"name": CANARY, "schema": {"type": CANARY}}}),
        ),
        ("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": [image]}]}),
        ("/v1/responses", {"model": MODEL, "input": CANARY, "max_output_tokens": 4, "instructions": CANARY}),
        ("/v1/messages", {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": CANARY}], "system": CANARY}),
        ("/v1/embeddings", {"model": MODEL, "input": [CANARY]}),
    ]
    for path, body in asked:
        assert server.post(path, body).status_code in (200, 400, 404), (path, body)
    torn = server.http.post(
        server.url + "/v1/chat/completions", content=f'{{"{CANARY}": "{CANARY}', headers={"Content-Type": "application/json"}
    )
    assert torn.status_code == 400
    assert server.get(f"/v1/models?api-key={CANARY}").status_code == 200
    secret = server.http.get(
        server.url + "/v1/models", headers={"Authorization": f"Bearer {CANARY}", "X-Api-Key": CANARY, "Cookie": CANARY}
    )
    assert secret.status_code == 200
    line = {"custom_id": CANARY, "method": "POST", "url": "/v1/chat/completions", "body": chat(CANARY, model=CANARY)}
    batch: dict[str, Any] = {"endpoint": "/v1/chat/completions", "completion_window": "24h", "metadata": {CANARY: CANARY}}
    content = (f"{CANARY}.jsonl", json.dumps(line).encode())
    batch["input_file_id"] = server.http.post(server.url + "/v1/files", files={"file": content}, data={"purpose": "batch"}).json()["id"]
    refused = server.post("/v1/batches", batch).json()["id"]
    server.eventually(lambda: server.get(f"/v1/batches/{refused}").json()["status"] == "failed", "the batch's end", 20)
    server.eventually(lambda: f"batch {refused} failed: model_not_found in line 1" in server.log, "its line", 10)
    ask(server, "/v1/completions", {"model": MODEL, "prompt": "a", **LIMITS}, "the-last")
    server.eventually(lambda: finish_lines(server, "the-last"), "the last line", 10)
    assert CANARY not in server.log


def test_every_line_of_a_json_log_is_an_object_and_says_whose_it_is(server: ServerProcess) -> None:
    ask(server, "/v1/chat/completions", chat("hi"), "mine-1")
    server.eventually(lambda: finish_lines(server, "mine-1"), "the finish line", 10)

    def accesses() -> list[Any]:
        return [line for line in records(server) if line["logger"] == "uvicorn.access" and line.get("request_id") == "mine-1"]

    (access,) = server.eventually(accesses, "the line of the access log", 10)
    found = records(server)
    assert all({"ts", "level", "logger", "msg", "pid", "component"} <= line.keys() for line in found)
    assert {line["component"] for line in found} >= {"api", "engine"}
    assert {line["logger"] for line in found} >= {"banyan", "banyan.requests", "uvicorn.access", "uvicorn.error"}
    assert '"POST /v1/chat/completions HTTP/1.1" 200' in access["msg"]
    (finish,) = [line for line in found if line["logger"] == "banyan.requests" and line.get("request_id") == "mine-1"]
    assert re.match(r"Finished chatcmpl-\w+\. request: mine-1, endpoint: chat, reason: length, ", finish["msg"])
    assert finish["trace_id"] == access["trace_id"]
    assert not any("request_id" in line for line in found if line["component"] == "engine")


def test_metrics_have_the_same_names_whatever_a_scraper_accepts(server: ServerProcess) -> None:
    for accept in (
        "application/openmetrics-text;version=1.0.0;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",  # Prometheus 2
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.5",  # 3
        "",
    ):
        for path in ("/metrics", "/metrics/load"):
            answer = server.http.get(server.url + path, headers={"Accept": accept})
            assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
            assert "\nvllm:kv_cache_usage_perc{" in answer.text
            assert "vllm_kv" not in answer.text


def test_a_served_page_stays_below_700_series_and_counts_errors_from_0(server: ServerProcess) -> None:
    page = list(text_string_to_metric_families(server.get("/metrics").text))
    ours = [sample for family in page for sample in family.samples if sample.name.startswith("banyan_")]
    assert 500 < len(ours) < 700
    assert server.metric('banyan_http_requests_total{handler="/generate",method="POST",code="500"}') == 0
    assert server.metric('banyan_scheduler_seconds_total{stage="wait_device"}') > 0
    assert {sample.labels["torch"] != "" for sample in ours if sample.name == "banyan_build_info"} == {True}


def test_grammars_are_counted_by_their_time_and_their_failures(server: ServerProcess) -> None:
    compiled, failed = "banyan_grammar_compile_seconds_count", 'banyan_grammar_failures_total{reason="invalid"}'
    before = server.settled(compiled), server.metric(failed)
    answer = ask(server, "/v1/chat/completions", {**chat("hi"), "regex": "[ab]{3}", "ignore_eos": False}, "a-grammar")
    assert answer.status_code == 200, answer.text
    unsupported = server.metric('banyan_grammar_failures_total{reason="unsupported"}')
    answer = ask(server, "/v1/chat/completions", {**chat("hi"), "regex": "[ab"}, "no-grammar")
    assert answer.status_code == 400
    answer = ask(server, "/v1/chat/completions", {**chat("hi"), "regex": "(?=a)b"}, "no-such-grammar")
    assert answer.status_code == 400
    server.eventually(lambda: server.metric('banyan_grammar_failures_total{reason="unsupported"}') == unsupported + 1, "one of its own", 5)
    server.eventually(lambda: (server.metric(compiled), server.metric(failed)) == (before[0] + 1, before[1] + 1), "one each", 5)


def test_a_request_that_ends_in_calls_of_tools_is_counted_as_one(server: ServerProcess) -> None:
    counted = 'banyan_requests_total{endpoint="chat",finish_reason="tool_calls"}'
    before = server.settled(counted)
    schema = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "light", "parameters": schema}}]
    choice = {"type": "function", "function": {"name": "light"}}
    body = {**chat("hi"), "tools": tools, "tool_choice": choice, "max_tokens": 100, "ignore_eos": False}
    answer = ask(server, "/v1/chat/completions", body, "a-call")
    assert answer.json()["choices"][0]["finish_reason"] == "tool_calls", answer.text
    server.eventually(lambda: server.metric(counted) == before + 1, "one count", 5)


# --- traces ---


def traced(server: ServerProcess, collector: Collector, request_id: str, spans: int) -> list[Span]:
    """The spans of a request, the server's first, when there are so many."""
    roots = lambda: [span for span in collector.spans if span.attributes.get("banyan.request_id") == request_id]
    (root,) = server.eventually(roots, f"the span of {request_id}", 10)
    server.eventually(lambda: len(collector.of_trace(root.trace_id)) == spans, f"{spans} spans", 10)
    return [root, *(span for span in collector.of_trace(root.trace_id) if span is not root)]


def test_a_request_is_a_span_of_the_server_in_the_clients_trace_with_its_stages_below(server: ServerProcess, collector: Collector) -> None:
    body = chat(CANARY, temperature=0.5, top_p=0.9, seed=7, stop=["never"])
    answer = ask(server, "/v1/chat/completions", body, "traced-1", traceparent=f"00-{TRACE}-{PARENT}-01")
    root, *stages = traced(server, collector, "traced-1", 4)
    assert (root.name, root.trace_id, root.parent_id, root.kind, root.failed) == (f"chat {MODEL}", TRACE, PARENT, 2, False)
    assert answer.headers["traceparent"] == f"00-{TRACE}-{root.span_id}-01"
    usage = answer.json()["usage"]
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "banyan",
        "gen_ai.request.model": MODEL,
        "gen_ai.response.model": MODEL,
        "gen_ai.response.id": answer.json()["id"],
        "gen_ai.request.max_tokens": 6,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.seed": 7,
        "gen_ai.request.stop_sequences": ["never"],
        "gen_ai.request.stream": False,
        "gen_ai.output.type": "text",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": 6,
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
    }
    assert {name: root.attributes.get(name) for name in expected} == expected
    latencies = {name for name in root.attributes if name.startswith("gen_ai.latency.")}
    assert latencies == {
        f"gen_ai.latency.{name}"
        for name in (
            "e2e", "time_in_queue", "time_to_first_token", "time_in_model_prefill", "time_in_model_decode", "time_in_model_inference",
        )
    }  # fmt: skip
    assert [stage.name for stage in stages] == ["queue", "prefill", "decode"]
    assert {stage.parent_id for stage in stages} == {root.span_id}
    assert all(root.start <= stage.start <= stage.end <= root.end for stage in stages)
    assert stages[0].start <= stages[1].start <= stages[2].start
    assert CANARY not in repr(collector.of_trace(TRACE))
    assert collector.services == {"banyan"}


def test_each_sequence_has_stages_and_a_request_without_a_trace_gets_one(server: ServerProcess, collector: Collector) -> None:
    answer = ask(server, "/v1/completions", {"model": MODEL, "prompt": "a", "n": 2, "stream": True, **LIMITS}, "traced-2")
    root, *stages = traced(server, collector, "traced-2", 7)
    assert answer.headers["traceparent"].split("-")[1] == root.trace_id
    assert (root.name, root.parent_id) == (f"text_completion {MODEL}", "")
    assert root.attributes["gen_ai.request.choice.count"] == 2
    assert root.attributes["gen_ai.response.finish_reasons"] == ["length", "length"]
    assert Counter(stage.name for stage in stages) == {"queue": 2, "prefill": 2, "decode": 2}


@pytest.mark.usefixtures("slowed")
def test_a_refused_request_and_one_whose_client_left_are_traced_too(server: ServerProcess, collector: Collector) -> None:
    ask(server, "/v1/completions", {"model": MODEL, "prompt": "a " * 5000, **LIMITS}, "traced-3")
    (refused,) = traced(server, collector, "traced-3", 1)
    assert refused.attributes["http.response.status_code"] == 400
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, headers={"X-Request-Id": "traced-4"}, timeout=30) as response:
        next(response.iter_lines())
    left, *stages = traced(server, collector, "traced-4", 4)
    assert left.attributes["gen_ai.response.finish_reasons"] == ["abort"]
    assert [stage.name for stage in stages] == ["queue", "prefill", "decode"]


def test_probes_and_scrapes_are_not_traced(server: ServerProcess, collector: Collector) -> None:
    for path in ("/livez", "/readyz", "/metrics", "/metrics/load"):
        assert "traceparent" not in server.get(path).headers
    ask(server, "/v1/completions", {"model": MODEL, "prompt": "a", **LIMITS}, "traced-5")
    traced(server, collector, "traced-5", 4)
    assert not any(span.attributes.get("url.path") == "/metrics" for span in collector.spans)


@pytest.mark.long  # the clock is watched
def test_a_collector_that_does_not_answer_holds_nobody_up(server: ServerProcess, collector: Collector) -> None:
    def seconds() -> float:
        began = time.perf_counter()
        assert server.post("/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 2}).status_code == 200
        return time.perf_counter() - began

    usual = sorted(seconds() for _ in range(10))[5]
    waiting = collector.waiting
    collector.open.clear()
    try:
        seconds()
        server.eventually(lambda: collector.waiting > waiting, "an export that hangs", 10)
        assert sorted(seconds() for _ in range(20))[10] < 5 * usual + 0.1
    finally:
        collector.open.set()
    ask(server, "/v1/completions", {"model": MODEL, "prompt": "a", **LIMITS}, "traced-6")
    traced(server, collector, "traced-6", 4)


# --- the end ---


def test_what_runs_when_the_engine_dies_is_told_and_traced_as_failed(server: ServerProcess, collector: Collector) -> None:
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    asked = httpx.stream("POST", server.url + "/v1/completions", json=body, headers={"X-Request-Id": "orphan"}, timeout=30)
    with server.slowed(), asked as response:
        lines = response.iter_lines()
        next(lines)
        server.engine.kill()
        assert any("internal_error" in line for line in lines)
    root, decode = traced(server, collector, "orphan", 2)  # nobody knows how long it waited
    assert decode.name == "decode"
    assert (root.failed, root.attributes["error.type"], root.attributes["gen_ai.response.finish_reasons"]) == (True, "error", ["error"])
    server.wait()
    (line,) = finish_lines(server, "orphan")
    assert "reason: error" in line
    (fatal,) = [line for line in records(server) if line["msg"].startswith("FATAL: ")]
    assert (fatal["level"], fatal["component"]) == ("critical", "api")
    assert all({"ts", "level", "logger", "msg"} <= line.keys() for line in records(server))


# --- texts, when they are asked for ---


@pytest.mark.long
def test_texts_that_are_asked_for_are_complete_and_on_a_logger_of_their_own(start_server: StartServer) -> None:
    flags = ("--skip-server-warmup", "--log-format", "json", "--log-requests", "--log-requests-level", "3")
    server = start_server(*flags).ready()
    text = f"{CANARY} " * 80
    whole = ask(server, "/v1/chat/completions", chat(text, max_tokens=40, temperature=0), "whole").json()
    streamed = ask(server, "/v1/chat/completions", chat(text, max_tokens=40, temperature=0, stream=True), "streamed")
    assert streamed.status_code == 200, streamed.text
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, headers={"X-Request-Id": "left"}, timeout=30) as response:
        next(response.iter_lines())

    def texts(request_id: str, kind: str) -> list[str]:
        own = (line for line in records(server) if line["logger"] == "banyan.request_text" and line.get("request_id") == request_id)
        return [line["msg"] for line in own if line["msg"].startswith(kind)]

    server.eventually(lambda: texts("left", "Answered"), "what the one who left has had", 10)
    for name in ("whole", "streamed"):
        (received,), (started,), (answered,) = texts(name, "Received"), texts(name, "Started"), texts(name, "Answered")
        assert text in received
        assert '"max_new_tokens": 40' in started
        assert json.dumps(whole["choices"][0]["message"]["content"], ensure_ascii=False) in answered
    assert len(texts("left", "Answered")) == 1
    assert not any(CANARY in line["msg"] for line in records(server) if line["logger"] != "banyan.request_text")
    assert any(line["level"] == "warning" and "--log-requests" in line["msg"] for line in records(server))

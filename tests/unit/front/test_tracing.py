"""Traces: what their spans say and when they end, where they go, and what is said when they cannot be had."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as OverGrpc
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as OverHttp
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceServicer, add_TraceServiceServicer_to_server
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from banyan_runtime import wire
from banyan_runtime.config import ServerConfig
from banyan_runtime.errors import ConfigError
from banyan_runtime.front.metrics import RequestRecord
from banyan_runtime.front.plan import GenerateRequest
from banyan_runtime.front.tracing import MAX_SEQUENCES, RequestTrace, Tracing, _exporter

SCOPE = {"type": "http", "method": "GET", "path": "/nowhere", "headers": []}


def config(**options: Any) -> ServerConfig:
    return ServerConfig(model_path="tiny", served_model_name=("tiny",), **options)


def test_without_the_options_nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.setitem(sys.modules, name, None)
    assert Tracing.of(config()) is None


@pytest.mark.parametrize("options", [{"enable_trace": True}, {"otlp_traces_endpoint": "http://localhost:4318"}])
def test_missing_packages_are_named_with_the_way_to_get_them(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'banyan-runtime\[otel\]'"):
        Tracing.of(config(**options))


@pytest.mark.parametrize(
    ("address", "target"),
    [
        ("http://collector:4318", "http://collector:4318/v1/traces"),
        ("https://collector/", "https://collector/v1/traces"),
        ("http://collector:4318/own/path", "http://collector:4318/own/path"),
    ],
)
def test_an_http_address_gets_the_usual_path_unless_it_has_one(address: str, target: str) -> None:
    exporter = _exporter(address)
    assert isinstance(exporter, OverHttp)
    assert exporter._endpoint == target
    exporter.shutdown()


@pytest.mark.parametrize("address", ["localhost:4317", "grpc://localhost:4317"])
def test_the_peers_addresses_mean_grpc_as_they_do_there(address: str) -> None:
    exporter = _exporter(address)
    assert isinstance(exporter, OverGrpc)
    assert exporter._endpoint == "localhost:4317"
    exporter.shutdown()


def test_the_sdks_variable_chooses_http_for_an_address_without_a_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    exporter = _exporter("localhost:4318")
    assert isinstance(exporter, OverHttp)
    assert exporter._endpoint == "http://localhost:4318/v1/traces"
    exporter.shutdown()


def test_another_scheme_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint=ftp://x"):
        Tracing.of(config(otlp_traces_endpoint="ftp://x"))


@pytest.mark.parametrize("address", ["http://user:secret@localhost:4318", "grpc://secret@localhost:4317", "user:secret@localhost:4317"])
def test_an_address_that_others_could_read_a_password_from_is_refused_without_repeating_it(address: str) -> None:
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_HEADERS") as told:
        Tracing.of(config(otlp_traces_endpoint=address))
    assert "secret" not in str(told.value)


class Spans(TraceServiceServicer):
    """A collector over gRPC that keeps the names of spans."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.names += [span.name for resource in request.resource_spans for scope in resource.scope_spans for span in scope.spans]
        return ExportTraceServiceResponse()


def test_spans_reach_a_collector_over_grpc_at_the_end_at_the_latest() -> None:
    spans, server = Spans(), grpc.server(ThreadPoolExecutor(1))
    add_TraceServiceServicer_to_server(spans, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        tracing = Tracing.of(config(otlp_traces_endpoint=f"127.0.0.1:{port}"))
        assert tracing is not None
        trace = tracing.begin(SCOPE)
        trace.answered(SCOPE, 404)
        assert not spans.names
        tracing.close()
        assert spans.names == ["GET unmatched"]
    finally:
        server.stop(None)


def kept() -> tuple[Tracing, InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Tracing(provider, "tiny"), exporter


def record(**changed: Any) -> RequestRecord:
    now = time.monotonic()
    values: dict[str, Any] = {
        "endpoint": "chat", "streaming": True, "finish_reason": "abort", "prompt_tokens": 3, "cached_tokens": 1, "completion_tokens": 2,
        "received": now - 1, "first_token": now - 0.5, "finished": now, "queue_s": 0.1, "prefill_s": 0.2,
    }  # fmt: skip
    return RequestRecord(**(values | changed))


def submitted(tracing: Tracing, number: int) -> RequestTrace:
    trace = tracing.begin(SCOPE)
    requests = [GenerateRequest(token_ids=wire.pack_ids([1]), sampling=wire.Sampling(max_new_tokens=7, seed=(1 << 64) - 1))] * number
    trace.submitted("chat", requests, ["chatcmpl-1"], streaming=True)
    for _ in requests:
        trace.begun()
    return trace


def test_the_servers_span_waits_for_the_engines_last_word_and_ends_when_the_exchange_did() -> None:
    tracing, exporter = kept()
    trace = submitted(tracing, 2)
    trace.ended(record(reasoning_tokens=1))
    trace.answered(SCOPE, 200)
    answered = time.time_ns()
    assert "chat tiny" not in [span.name for span in exporter.get_finished_spans()]
    trace.ended(record(queue_s=None, prefill_s=None, first_token=None, completion_tokens=0))
    *stages, root = exporter.get_finished_spans()
    assert [stage.name for stage in stages] == ["queue", "prefill", "decode", "queue"]
    assert root.end_time is not None
    assert root.end_time <= answered
    assert root.attributes is not None
    assert root.attributes["gen_ai.usage.output_tokens"] == 2
    assert root.attributes["gen_ai.usage.reasoning.output_tokens"] == 1
    assert root.attributes["gen_ai.request.seed"] == -1


def test_refused_sequences_leave_no_span_open_and_failed_ones_say_so() -> None:
    tracing, exporter = kept()
    trace = submitted(tracing, 2)
    trace.ended(None)
    trace.answered(SCOPE, 503)
    trace.ended(record(finish_reason="error"))
    root = exporter.get_finished_spans()[-1]
    assert (root.name, root.status.status_code) == ("chat tiny", StatusCode.ERROR)


@pytest.mark.parametrize(
    ("kind", "output"), [("json_schema", "json"), ("json_object", "json"), ("regex", "text"), ("ebnf", "text"), (None, "text")]
)
def test_an_output_is_called_json_where_its_grammar_is_of_json(kind: str | None, output: str) -> None:
    tracing, exporter = kept()
    trace = tracing.begin(SCOPE)
    constraint = None if kind is None else wire.Constraint(wire.Grammar(kind, "x"))
    request = GenerateRequest(token_ids=wire.pack_ids([1]), sampling=wire.Sampling(max_new_tokens=7), constraint=constraint)
    trace.submitted("chat", [request], ["chatcmpl-1"], streaming=False)
    trace.answered(SCOPE, 200)
    (root,) = exporter.get_finished_spans()
    assert root.attributes is not None
    assert root.attributes["gen_ai.output.type"] == output


def test_of_very_many_sequences_the_first_ones_have_spans() -> None:
    tracing, exporter = kept()
    trace = submitted(tracing, 1000)
    for _ in range(1000):
        trace.ended(record())
    trace.answered(SCOPE, 200)
    spans = exporter.get_finished_spans()
    assert len(spans) == 1 + 3 * MAX_SEQUENCES
    assert spans[-1].attributes is not None
    assert spans[-1].attributes["gen_ai.usage.input_tokens"] == 3000


def test_what_the_client_does_not_want_sampled_is_not_and_still_has_an_id() -> None:
    tracing, exporter = kept()
    scope = {**SCOPE, "headers": [(b"traceparent", b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00")]}
    trace = tracing.begin(scope)
    trace.answered(scope, 200)
    assert trace.id == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert trace.traceparent.endswith("-00")
    assert not exporter.get_finished_spans()

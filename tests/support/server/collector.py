"""An OpenTelemetry collector on a free port: OTLP over HTTP, kept in memory."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse
from opentelemetry.proto.common.v1.common_pb2 import AnyValue


@dataclass(frozen=True)
class Span:
    """One span as it was exported. Times are Unix nanoseconds."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    start: int
    end: int
    failed: bool
    attributes: dict[str, Any]


class Collector:
    """`spans` is everything received so far. While `open` is cleared, nothing is answered."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.services: set[str] = set()
        self.open = threading.Event()
        self.open.set()
        self.waiting = 0  # exports that came while it was not
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces", self.path
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.waiting += not collector.open.is_set()
                collector.open.wait()
                collector.take(ExportTraceServiceRequest.FromString(body))
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def take(self, request: ExportTraceServiceRequest) -> None:
        for resource in request.resource_spans:
            self.services |= {each.value.string_value for each in resource.resource.attributes if each.key == "service.name"}
            for scope in resource.scope_spans:
                self.spans += [
                    Span(
                        name=each.name,
                        trace_id=each.trace_id.hex(),
                        span_id=each.span_id.hex(),
                        parent_id=each.parent_span_id.hex(),
                        kind=each.kind,
                        start=each.start_time_unix_nano,
                        end=each.end_time_unix_nano,
                        failed=each.status.code == 2,
                        attributes={attribute.key: _value(attribute.value) for attribute in each.attributes},
                    )
                    for each in scope.spans
                ]

    def of_trace(self, trace_id: str) -> list[Span]:
        return [span for span in self.spans if span.trace_id == trace_id]

    def close(self) -> None:
        self.open.set()
        self._server.shutdown()
        self._server.server_close()


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind) if kind else None

"""OpenTelemetry traces, when asked for: of each request one span of the server, and below it how long each of its sequences waited,
was prefilled and decoded.

Spans are made when a stage is over, from times that are known anyway; nothing is traced within a step, and the engine knows nothing
of it. They are exported by a thread of the SDK's from a bounded queue that drops what does not fit. The names of the conventions
for generative AI are still in development and stand here alone. No text of a prompt or an answer is ever an attribute.

The packages (extra `otel`) are imported only here, and only when traces are asked for. The SDK's own environment variables hold,
such as OTEL_TRACES_SAMPLER, OTEL_SERVICE_NAME and OTEL_EXPORTER_OTLP_HEADERS.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from banyan_runtime import __version__
from banyan_runtime.config import ServerConfig
from banyan_runtime.errors import ConfigError
from banyan_runtime.front.current import Trace, current

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer

    from banyan_runtime.front.metrics import RequestRecord
    from banyan_runtime.front.plan import GenerateRequest

DEFAULT_ENDPOINT: Final = "localhost:4317"
PROTOCOL_VARIABLE: Final = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
HTTP_PROTOCOL: Final = "http/protobuf"
QUEUED_SPANS: Final = 2048  # some MB; what does not fit is dropped
LAST_SPANS_S: Final = 2.0  # at the end of the process
MAX_SEQUENCES: Final = 16  # of one request that have spans of their own: a list of prompts may have thousands
MAX_STOPS: Final = 4
STOP_CHARACTERS: Final = 64
UNTRACED: Final = frozenset({"/livez", "/health", "/healthz", "/readyz", "/ready", "/metrics", "/metrics/load", "/v1/loads"})
OPERATIONS: Final = {"chat": "chat", "responses": "chat", "messages": "chat", "embeddings": "embeddings", "rerank": "embeddings"}
_JSON: Final = frozenset({"json_schema", "json_object"})  # grammars of answers that are JSON
_NS: Final = 1_000_000_000


class Tracing:
    """Makes spans and has them exported."""

    def __init__(self, provider: TracerProvider, model: str) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("banyan", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._model = model

    @staticmethod
    def of(config: ServerConfig) -> Tracing | None:
        """None: nobody asked for traces. Raises ConfigError where they cannot be had."""
        endpoint = config.otlp_traces_endpoint or (DEFAULT_ENDPOINT if config.enable_trace else None)
        if endpoint is None:
            return None
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

            exporter = _exporter(endpoint)
        except ImportError as error:
            raise ConfigError(
                f"traces need the OpenTelemetry packages ({error}): pip install 'banyan-runtime[otel]', "
                "or remove --enable-trace and --otlp-traces-endpoint"
            ) from error
        resource = Resource.create({"service.version": __version__})
        if "OTEL_SERVICE_NAME" not in os.environ:
            resource = resource.merge(Resource({"service.name": "banyan"}))
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=QUEUED_SPANS))
        return Tracing(provider, config.names[0])

    def begin(self, scope: Scope) -> RequestTrace:
        """A request has come. Its trace is the client's, where it brings one."""
        carrier = {name: value for name, value in Headers(scope=scope).items() if name in ("traceparent", "tracestate")}
        from opentelemetry.trace import SpanKind

        span = self._tracer.start_span(scope["method"], self._propagator.extract(carrier), SpanKind.SERVER)
        return RequestTrace(self._tracer, span, self._model)

    def close(self) -> None:
        """Export what is left. Waits some seconds at most."""
        self._provider.force_flush(int(LAST_SPANS_S * 1000))


def _exporter(endpoint: str) -> SpanExporter:
    """Over HTTP or gRPC, as the address or the SDK's variable says. Raises ImportError, ConfigError."""
    scheme, separator, rest = endpoint.partition("://")
    if "@" in (rest if separator else scheme).partition("/")[0]:
        raise ConfigError(
            "must hold no user and no password, which others could read; set OTEL_EXPORTER_OTLP_HEADERS", field="--otlp-traces-endpoint"
        )
    if not separator:
        scheme, rest = ("http" if os.environ.get(PROTOCOL_VARIABLE) == HTTP_PROTOCOL else "grpc"), endpoint
    if scheme in ("http", "https"):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        path = "" if "/" in rest.rstrip("/") else "/v1/traces"
        return OTLPSpanExporter(endpoint=f"{scheme}://{rest.rstrip('/')}{path}")
    if scheme != "grpc":
        raise ConfigError("must be HOST:PORT, or begin with grpc://, http:// or https://", field="--otlp-traces-endpoint", value=endpoint)
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcSpanExporter

    return GrpcSpanExporter(endpoint=rest, insecure=True)


class RequestTrace(Trace):
    """The spans of one HTTP request. The server's ends when the exchange is over and the engine has said its last word on each
    sequence, which may come later."""

    def __init__(self, tracer: Tracer, span: Span, model: str) -> None:
        self._tracer = tracer
        self._span = span
        self._model = model
        self._recording = span.is_recording()
        self._offset = time.time_ns() - int(time.monotonic() * _NS)  # of the monotonic clock
        self._submitted = 0.0  # monotonic seconds
        self._open = 0
        self._over: int | None = None  # when the exchange was, ns
        self._records: list[RequestRecord] = []
        self.id = format(span.get_span_context().trace_id, "032x")

    @property
    def traceparent(self) -> str:
        """As W3C writes it."""
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def submitted(self, endpoint: str, requests: Sequence[GenerateRequest], ids: Sequence[str], *, streaming: bool) -> None:
        self._submitted = time.monotonic()
        if not self._recording:
            return
        operation = OPERATIONS.get(endpoint, "text_completion")
        self._span.update_name(f"{operation} {self._model}")
        self._span.set_attributes(
            {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "banyan",
                "gen_ai.request.model": self._model,
                "gen_ai.response.model": self._model,
                "gen_ai.response.id": ids[0],
                "gen_ai.request.stream": streaming,
                **_sampling(requests),
            }
        )

    def begun(self) -> None:
        self._open += 1

    def ended(self, record: RequestRecord | None) -> None:
        self._open -= 1
        if record is not None and self._recording:
            self._records.append(record)
            if len(self._records) <= MAX_SEQUENCES:
                self._trace(record, len(self._records) - 1)
        self._end_if_over()

    def answered(self, scope: Scope, status: int) -> None:
        """The exchange is over."""
        route: Any = scope.get("route")
        handler = getattr(route, "path", None) or "unmatched"
        self._span.set_attributes(
            {
                "http.request.method": scope["method"],
                "http.route": handler,
                "url.path": scope["path"],
                "http.response.status_code": status,
                "banyan.request_id": current().id,
            }
        )
        if not self._submitted:
            self._span.update_name(f"{scope['method']} {handler}")
        if status >= 500:
            self._fail(str(status))
        self._over = time.time_ns()
        self._end_if_over()

    def _trace(self, record: RequestRecord, number: int) -> None:
        from opentelemetry import trace

        parent = trace.set_span_in_context(self._span)
        began, first = self._submitted, record.first_token
        stages: list[tuple[str, float, float]] = []
        if record.queue_s is not None:
            stages.append(("queue", began, began + record.queue_s))
        elif first is None:  # it never was admitted, as far as anybody knows
            stages.append(("queue", began, record.finished))
        if record.prefill_s is not None and first is not None:
            stages.append(("prefill", max(began, first - record.prefill_s), first))
        if first is not None:
            stages.append(("decode", first, record.finished))
        for name, start, end in stages:
            span = self._tracer.start_span(name, parent, start_time=self._ns(start), attributes={"banyan.sequence": number})
            span.end(self._ns(max(start, end)))

    def _ns(self, monotonic: float) -> int:
        return int(monotonic * _NS) + self._offset

    def _fail(self, kind: str) -> None:
        from opentelemetry.trace import StatusCode

        self._span.set_attribute("error.type", kind)
        self._span.set_status(StatusCode.ERROR)

    def _end_if_over(self) -> None:
        if self._over is None or self._open:
            return
        if self._records:
            self._span.set_attributes(_usage(self._records))
            if any(record.finish_reason == "error" for record in self._records):
                self._fail("error")
        self._span.end(self._over)


def _sampling(requests: Sequence[GenerateRequest]) -> dict[str, Any]:
    """How the first of the sequences is sampled; those of one request differ at most in their prompts and seeds."""
    request, sampling = requests[0], requests[0].sampling
    found: dict[str, Any] = {
        "gen_ai.request.max_tokens": sampling.max_new_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.seed": sampling.seed - (1 << 64) if sampling.seed >> 63 else sampling.seed,  # an attribute has 63 bits
        "gen_ai.output.type": "json" if _kind(request) in _JSON else "text",
    }
    if sampling.top_k > 0:
        found["gen_ai.request.top_k"] = sampling.top_k
    if request.stops:
        found["gen_ai.request.stop_sequences"] = [stop[:STOP_CHARACTERS] for stop in request.stops[:MAX_STOPS]]
    if len(requests) > 1:
        found["gen_ai.request.choice.count"] = len(requests)
    return found


def _kind(request: GenerateRequest) -> str:
    """Of the grammar that was asked for."""
    constraint = request.constraint
    return "" if constraint is None else constraint.kind or constraint.grammar.kind


def _usage(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """What the sequences came to. Times are those of the slowest."""
    found: dict[str, Any] = {
        "gen_ai.response.finish_reasons": [record.finish_reason for record in records[:MAX_SEQUENCES]],
        "gen_ai.usage.input_tokens": sum(record.prompt_tokens for record in records),
        "gen_ai.usage.output_tokens": sum(record.completion_tokens for record in records),
        "gen_ai.usage.cache_read.input_tokens": sum(record.cached_tokens for record in records),
    }
    thought = [record.reasoning_tokens for record in records if record.reasoning_tokens is not None]
    if thought:
        found["gen_ai.usage.reasoning.output_tokens"] = sum(thought)
    times: dict[str, list[float]] = {}
    for record in records:
        times.setdefault("e2e", []).append(record.finished - record.received)
        if record.queue_s is not None:
            times.setdefault("time_in_queue", []).append(record.queue_s)
        if record.prefill_s is not None:
            times.setdefault("time_in_model_prefill", []).append(record.prefill_s)
        if record.first_token is not None:
            decode = record.finished - record.first_token
            times.setdefault("time_to_first_token", []).append(record.first_token - record.received)
            times.setdefault("time_in_model_decode", []).append(decode)
            times.setdefault("time_in_model_inference", []).append(decode + (record.prefill_s or 0.0))
    return found | {f"gen_ai.latency.{name}": max(values) for name, values in times.items()}


class Traced:
    """ASGI middleware around the application: each request that does work is traced, and its answer says the trace."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in UNTRACED:
            await self._app(scope, receive, send)
            return
        trace = self._tracing.begin(scope)
        current().trace = trace
        status = 500  # what a client gets when the application raises before it answers

        async def told(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["traceparent"] = trace.traceparent
            await send(message)

        try:
            await self._app(scope, receive, told)
        finally:
            trace.answered(scope, status)

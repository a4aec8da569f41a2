"""What answers HTTP in one process of a server: the first one, or a door."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from banyan_runtime import logs
from banyan_runtime.config import ServerConfig
from banyan_runtime.errors import UnavailableError
from banyan_runtime.front.app import create_app
from banyan_runtime.front.auth import Gate
from banyan_runtime.front.context import Context
from banyan_runtime.front.engine_client import EngineClient
from banyan_runtime.front.metrics import Metrics
from banyan_runtime.front.ops.http import HttpCounter
from banyan_runtime.front.prepare.planner import Planner
from banyan_runtime.front.prepare.worker_pool import WorkerPool
from banyan_runtime.front.request_log import request_log
from banyan_runtime.front.state import ServerState
from banyan_runtime.front.tracing import Traced, Tracing
from banyan_runtime.process import resident_bytes
from banyan_runtime.server.http import HttpServer
from banyan_runtime.server.threads import on_thread

LAST_ANSWERS_S: Final = 0.1  # what failed requests are told may still be on its way to them
LAST_SPANS_S: Final = 2.5  # for traces to be exported, or given up


class Front:
    """The parts, put together."""

    def __init__(self, config: ServerConfig, writer: logs.Writer, client: EngineClient, gate: Gate | None = None) -> None:
        """`gate`: as another process of the server has it. Raises ConfigError."""
        self.state = ServerState(config.model_path)
        self.metrics = Metrics(config.names[0], self.state, queue_limit=config.max_queued_requests)
        self.metrics.log_dropped = lambda: writer.dropped
        self.metrics.resident_bytes = resident_bytes
        self.client = client
        client.on_inter_token_latency = self.metrics.inter_token_latency
        self.context = Context(config, client, None, self.metrics, self.state, given_gate=gate)
        self.context.request_log = request_log(config)
        self._tracing = Tracing.of(config)
        app = create_app(self.context)
        self.counter = HttpCounter(app if self._tracing is None else Traced(app, self._tracing), self.metrics, app.routes)
        self.http = HttpServer(self.counter)
        self.http.on_refused = self.metrics.http_refused

    def prepare_with(self, pool: WorkerPool) -> None:
        """Have requests planned by this pool. The model's text and the engine must be there."""
        context, client = self.context, self.client
        assert context.text is not None, "asked for before it was loaded"
        pool.plan_inline(Planner(context.config, context.text, client.info), lambda: client.open_requests)
        context.preparer = context.request_log.preparer(pool)

    async def last_spans(self) -> None:
        """Have the traces exported that are left, as far as that goes."""
        if self._tracing is not None:
            with contextlib.suppress(TimeoutError, UnavailableError):
                await asyncio.wait_for(on_thread(self._tracing.close), LAST_SPANS_S)

"""What answers HTTP in one API process."""

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
from banyan_runtime.front.prepare.fork_server import ForkServer
from banyan_runtime.front.prepare.planner import Planner
from banyan_runtime.front.prepare.worker_pool import WorkerPool
from banyan_runtime.front.request_log import request_log
from banyan_runtime.front.state import ServerState
from banyan_runtime.front.text.text import Text
from banyan_runtime.front.tracing import Traced, Tracing
from banyan_runtime.process import resident_bytes
from banyan_runtime.server.api_processes.proxy import Proxy
from banyan_runtime.server.http import HttpServer
from banyan_runtime.server.threads import on_thread

LAST_ANSWERS_S: Final = 0.1  # what failed requests are told may still be on its way to them
LAST_SPANS_S: Final = 2.5  # for traces to be exported, or given up


class Front:
    """The parts, put together."""

    def __init__(
        self, config: ServerConfig, writer: logs.Writer, client: EngineClient, gate: Gate | None = None, first: str | None = None
    ) -> None:
        """`gate`: as another process of the server has it; `first`: path of the first process's socket, in another process. Raises
        ConfigError."""
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
        self.http = HttpServer(self.counter if first is None else Proxy(self.counter, config, first))
        self.http.on_refused = self.metrics.http_refused

    async def load_text(self, fork_server: ForkServer) -> None:
        """Start the process that forks, and load the model's text files. Raises as `ForkServer.start`."""
        await fork_server.start()
        # What took it seconds, and a library of which nothing else is needed here, is taken over from it.
        tokenizer, fork_server.tokenizer = fork_server.tokenizer, None
        config, model_dir, tokenizer_dir = self.context.config, fork_server.model_dir, fork_server.tokenizer_dir
        self.context.text = await on_thread(Text.load, config, model_dir, tokenizer_dir, None, tokenizer)

    async def prepare_with(self, fork_server: ForkServer, workers: int) -> WorkerPool:
        """Have requests planned by so many workers. The text must be loaded and the engine ready. Raises UnavailableError."""
        context, client = self.context, self.client
        assert context.text is not None, "asked for before it was loaded"
        fork_server.serve(client.info)
        pool = WorkerPool(fork_server, workers=workers)
        pool.on_lack = self._on_lack
        await pool.warm_up()
        pool.plan_inline(Planner(context.config, context.text, client.info), lambda: client.open_requests)
        context.preparer = context.request_log.preparer(pool)
        return pool

    def _on_lack(self, why: str) -> None:
        """No request can be prepared just now, or they can again; what runs goes on."""
        self.state.impaired = why

    async def last_spans(self) -> None:
        """Have the traces exported that are left, as far as that goes."""
        if self._tracing is not None:
            with contextlib.suppress(TimeoutError, UnavailableError):
                await asyncio.wait_for(on_thread(self._tracing.close), LAST_SPANS_S)

"""`banyan-runtime serve`: puts the front process together, brings it up, and takes it down again.

HTTP listens from the first moment, so that probes can tell how far the start is. Then the model is found, its tokenizer read
and the engine process started, a few tokens are generated, and only then is the server ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import time
from pathlib import Path
from typing import Any, Final

import uvloop

from banyan_runtime import hub, logs, wire
from banyan_runtime.addresses import url_of
from banyan_runtime.config import ServerConfig
from banyan_runtime.errors import AccessError, ConfigError, ModelError, UnavailableError, UserError
from banyan_runtime.front import errors, request_log
from banyan_runtime.front.body import BodyBudget
from banyan_runtime.front.current import log_fields
from banyan_runtime.front.engine_client import EngineClient
from banyan_runtime.front.openai.responses.store import ResponseStore
from banyan_runtime.front.prepare.fork_server import ForkServer
from banyan_runtime.front.prepare.worker_pool import workers_for
from banyan_runtime.front.submission import EngineError
from banyan_runtime.hub.gguf.files import find
from banyan_runtime.hub.progress import DOWNLOAD
from banyan_runtime.model import host
from banyan_runtime.models import registry
from banyan_runtime.process import collect_rarely
from banyan_runtime.server import termination
from banyan_runtime.server.api_processes.manager import ApiProcesses
from banyan_runtime.server.api_processes.messages import Open
from banyan_runtime.server.batch_child import BatchChild, check_storage
from banyan_runtime.server.early import Early
from banyan_runtime.server.engine_child import EngineChild, private_folder
from banyan_runtime.server.front import LAST_ANSWERS_S, Front
from banyan_runtime.server.http import BACKLOG, CONNECTIONS_CLOSE_S, HANDLERS_END_S
from banyan_runtime.server.pulse import NAME as PULSE_NAME
from banyan_runtime.server.pulse import Pulse, PulseWatch
from banyan_runtime.server.threads import on_thread

log = logging.getLogger("banyan")

WARMUP_PROMPT: Final = "The capital city of France is"
WARMUP_IDS: Final = (10, 11, 12)  # where no tokenizer is loaded
WARMUP_NEW_TOKENS: Final = 8
FEWEST_WORKERS: Final = 2  # of an API process: one is kept free of requests that may take long
PROGRESS_EVERY_S: Final = 10.0
PING_EVERY_S: Final = 2.0
HANG_AFTER_S: Final = 60.0
HANG_VARIABLE: Final = "BANYAN_TEST_HANG_SECONDS"  # for tests alone: another HANG_AFTER_S
LAST_MESSAGE_S: Final = 0.1  # its Fatal may still be on the way when the engine is gone
DEAD_FOR_S: Final = 3.0  # between the engine's death and our exit: probes and clients see it, supervisors do not wait long
ENGINE_EXIT_S: Final = 2.0
LAST_RESPONSES_S: Final = 5.0  # for responses to reach their folder
HINTS: Final[dict[int, str]] = {
    signal.SIGKILL: "; if memory ran out, lower --max-total-tokens or raise the memory limit",
    signal.SIGALRM: ": it made no progress for --watchdog-timeout; the stacks of its threads are in the log",
}
"""What a signal that ends the engine most likely means."""


class EngineDied(UserError):
    """The engine process has ended by itself, or cannot generate."""

    exit_code = termination.EXIT_INTERNAL


class Server:
    """One server, from its first to its last moment."""

    def __init__(self, config: ServerConfig, writer: logs.Writer, early: Early) -> None:
        self._config = config
        self._early = early
        check_storage(config)
        self._socket = listen(config.host, config.port)
        self._url = url_of(config.host, self._socket.getsockname()[1])
        self._flush_log = writer.flush
        self._processes = 1 + len(early.api_processes)  # that answer HTTP
        self._client = EngineClient(max_open=config.max_queued_requests * 2, clients=self._processes)
        self._client.on_startup_progress = self._on_startup_progress
        self._front = Front(config, writer, self._client)
        self._state, self._metrics, self._context = self._front.state, self._front.metrics, self._front.context
        self._counter, self._http = self._front.counter, self._front.http
        self._metrics.downloaded = lambda: (DOWNLOAD.done, DOWNLOAD.size)
        self._batches = BatchChild(config, own_url(config.host, self._socket.getsockname()[1]), self._context.gate.internal_key)
        self._context.responses = ResponseStore(
            None if config.response_store_path is None else Path(config.response_store_path),
            config.response_store_seconds,
            config.response_store_bytes,
        )
        self._context.batch_host = self._batches
        self._metrics.more_pages.append(self._batches.counts.page)
        self._api_processes = ApiProcesses(self._front, early.api_processes, self._socket)
        self._context.bodies = BodyBudget.shared(self._processes)
        self._hold = logs.Hold(logging.getLogger("uvicorn.error"))
        self._engine: EngineChild | None = None
        self._zygote: ForkServer | None = None
        self._folder: Path | None = None
        self._own_folder = private_folder() if early.api_processes else None
        self._first = f"{self._own_folder}/first"  # path of the Unix socket for proxied requests
        self._stop = asyncio.Event()
        self._interrupted = False
        self._ended: str | None = None  # why we ended the engine
        self._died: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watcher: asyncio.Task[None] | None = None

    async def run(self) -> int:
        """Serve until a signal comes or the engine ends; returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        log.info("server_args=%r", self._config)
        if self._config.port == 0:
            log.info("Listening on %s", self._url)
        if self._config.host not in ("127.0.0.1", "::1", "localhost") and not (self._config.api_key or self._config.api_keys_file):
            log.warning("listening on %s without a key: everybody who reaches this address can use the model", self._config.host)
        request_log.warn(self._config)
        listeners = [self._socket]
        if self._early.api_processes:
            listeners.append(listen_at(self._first))
        http = asyncio.create_task(self._http.serve(listeners))
        live = asyncio.create_task(self._live())
        stop = asyncio.create_task(self._stop.wait())
        tell = asyncio.create_task(self._tell_progress())
        try:
            ends: set[asyncio.Future[Any]] = {http, live, stop, self._died}
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if done == {stop}:
                await self._drain()
            if not done <= {stop} or self._died.done():
                return await self._fail(self._why(http, live), stop)
            return 0
        finally:
            for task in (live, stop, tell, self._watcher):
                if task is not None:
                    task.cancel()
            await self._close(http)

    # --- up ---

    async def _live(self) -> None:
        """Bring the server up, then watch its engine. Ends only by an exception."""
        config = self._config
        loop = asyncio.get_running_loop()

        def report(phase: str, percent: int, detail: str) -> None:
            loop.call_soon_threadsafe(self._progress, phase, percent, detail)

        own_tokenizer = config.tokenizer_path is None and not config.skip_tokenizer_init
        model_dir = await on_thread(hub.resolve, config.model_path, config.download_dir, report, config.revision, own_tokenizer)
        # Before two readers each blame it in their words. What is no family's, the engine judges.
        read = registry.read if config.model_impl == "banyan" else registry.contents
        await on_thread(read, model_dir, config.json_model_override_args)
        self._note_phase("download", since="downloading")
        self._progress("loading", 0, "")
        self._folder = private_folder()
        address = f"{self._folder}/engine"
        self._client.bind(address)
        pulse_file = self._folder / PULSE_NAME
        watch = PulseWatch(Pulse(pulse_file), time.monotonic())
        tokenizer_dir = await on_thread(find_tokenizer, config)
        self._engine = self._early.engine
        self._engine.boot(config, model_dir, tokenizer_dir, address, pulse_file)
        self._watcher = asyncio.create_task(self._watch_engine(self._engine))
        self._watcher.add_done_callback(self._unwatched)
        self._zygote = ForkServer(config, model_dir, tokenizer_dir, self._early.zygote)
        await self._front.load_text(self._zygote)
        info = await self._client.wait_ready()
        cores = 1 if info.device.startswith("cpu") else host.cores()  # which compute there
        workers = max(FEWEST_WORKERS, workers_for(cores) // self._processes)
        await self._front.prepare_with(self._zygote, workers)
        self._state.context_length = info.context_len
        self._client.max_open = max(self._client.max_open, info.most_requests)
        quantization = config.quantization or ("gguf" if find(model_dir) else "none")
        self._metrics.engine_ready(info, kv_cache_dtype=config.kv_cache_dtype, revision=config.revision, quantization=quantization)
        self._hold.release()
        logging.getLogger("uvicorn.error").info("Uvicorn running on %s (Press CTRL+C to quit)", self._url)
        await on_thread(self._flush_log)  # the engine writes the lines of the warm-up behind ours
        self._progress("warming", 0, "")
        if not config.skip_server_warmup:
            await self._warm_up()
        await self._api_processes.open(
            lambda number: Open(
                number=number,
                processes=self._processes,
                config=config.engine_json(),
                gate=self._context.gate.told(),
                model_dir=str(model_dir),
                tokenizer_dir=None if tokenizer_dir is None else str(tokenizer_dir),
                info=info,
                workers=workers,
                parent=os.getpid(),
                first=self._first,
            )
        )
        self._note_phase("warmup", since="warming")
        self._metrics.startup_phase("total", time.monotonic() - self._state.started)
        collect_rarely()
        self._state.enter("ready")
        self._api_processes.tell_state()
        self._batches.max_running = lambda: info.max_running_requests
        self._batches.start_if_wanted()
        log.info("The server is fired up and ready to roll!")
        await self._watch_pulse(self._engine, watch)

    async def _warm_up(self) -> None:
        """Generate a few tokens: what is built at first use is built now, and a model that can't answer never gets ready."""
        text, vocabulary = self._context.text, self._client.info.vocab_size
        ids = list(WARMUP_IDS) if text is None or text.tokenizer is None else text.encode(WARMUP_PROMPT)
        ids = [min(token, vocabulary - 1) for token in ids][: self._client.info.max_req_input_len - 1]
        sampling = wire.Sampling(max_new_tokens=WARMUP_NEW_TOKENS, temperature=0.0)
        try:
            async with self._client.generate(ids, sampling) as stream:
                async for _ in stream:
                    pass
        except EngineError as error:
            doubts = {
                "internal_error": f" The weights of {self._config.model_path} may be damaged, or not fit into --dtype.",
                "out_of_memory": " Leave it more memory (does another process use it?), or set --mem-fraction-static to less.",
            }
            full = error.code == "out_of_memory" and not self._client.info.device.startswith("cpu")
            message = f"the warm-up request failed: {error.message}{doubts.get(error.code, '')}"
            raise EngineDied(message, code="out_of_memory" if full else "") from error

    async def _watch_engine(self, engine: EngineChild) -> None:
        """Note the engine's end, and what it said of it."""
        code = await engine.wait()
        await asyncio.sleep(LAST_MESSAGE_S)
        fatal = self._client.fatal
        if self._ended is not None:
            error: UserError = EngineDied(self._ended)
        elif fatal is None:
            log.error("Child process unexpectedly failed with exitcode=%d. pid=%d", code, engine.pid)
            error = EngineDied(f"the engine process ended with exit code {code}{HINTS.get(-code, '')}")
        else:
            kinds: dict[int, type[UserError]] = {64: ConfigError, 65: ModelError, 77: AccessError}
            error = kinds.get(fatal.exit_code, EngineDied)(fatal.message, code=fatal.code, field=fatal.field, value=fatal.value)
        self._died.set_exception(error)

    def _unwatched(self, watcher: asyncio.Task[None]) -> None:
        """An engine whose end nobody would note must not be served from."""
        if not watcher.cancelled() and (error := watcher.exception()) is not None and not self._died.done():
            self._died.set_exception(error)

    async def _watch_pulse(self, engine: EngineChild, watch: PulseWatch) -> None:
        """Ping the engine; when it neither answers nor gets anything done for too long, say so in /livez, and end it after
        --watchdog-timeout. A step that computes for minutes does not answer, but its pulse goes on."""
        limit = hang_after(self._config.watchdog_timeout)
        late = 0
        while True:
            silent = min(self._client.heartbeat(), watch.silent(time.monotonic()))
            # Twice in a row: when this process itself was stopped for a while, the answer is only not read yet.
            late = late + 1 if silent > limit else 0
            hung = late >= 2
            if hung and not self._state.hung:
                log.error("the engine has not answered or got on for %.0f s; the stacks of its threads follow", silent)
                engine.show_stacks()
            elif self._state.hung and not hung:
                log.warning("the engine answers again")
            if hung != self._state.hung:
                self._state.hung = hung
                self._api_processes.tell_state()
            if silent > max(limit, self._config.watchdog_timeout):
                self._ended = f"the engine made no progress for {silent:.0f} s and was ended (--watchdog-timeout)"
                log.error("the engine has not answered for %.0f s; ending it", silent)
                engine.kill()
                await asyncio.shield(self._died)
            await asyncio.sleep(min(PING_EVERY_S, limit / 4))

    def _progress(self, phase: str, percent: int, detail: str) -> None:
        """Take over what the parts of the start report."""
        if phase in ("downloading", "loading", "warming"):
            self._state.enter(phase, percent, detail)  # type: ignore[arg-type]

    def _on_startup_progress(self, phase: wire.StartupProgress) -> None:
        self._forget_folder()  # the engine has spoken: the socket's name has done its service
        self._progress(phase.name, phase.percent, phase.detail)

    async def _tell_progress(self) -> None:
        """While the server starts, a line at least every 10 s: whoever waits can tell slow from stuck."""
        while True:
            await asyncio.sleep(PROGRESS_EVERY_S)
            state = self._state
            if state.phase not in ("starting", "downloading", "loading", "warming"):
                return
            elapsed = time.monotonic() - state.started
            log.info("%s: %d %% %s(%.0f s since the start)", state.phase, state.percent, state.detail and f"{state.detail} ", elapsed)

    def _forget_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _note_phase(self, name: str, *, since: str) -> None:
        state = self._state
        running = time.monotonic() - state.phase_started if state.phase == since else 0.0
        self._metrics.startup_phase(name, state.phase_seconds.get(since, 0.0) + running)

    # --- down ---

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stop.is_set():
            log.warning("%s again: stopping at once", number.name)
            if self._engine is not None:
                self._engine.kill()
            logs.exit_now(128 + number)
        log.info("%s: draining", number.name)
        self._interrupted = number is signal.SIGINT  # somebody at a terminal, who waits
        self._stop.set()

    async def _drain(self) -> None:
        """Let the running requests finish, up to --drain-seconds.

        At first new ones are served too, each the last of its connection, for clients with open connections and load balancers are
        the last to learn that we go. Then they are refused.
        """
        was_ready = self._state.serving
        self._state.enter("draining")
        self._batches.drain()
        self._http.drain()
        if not was_ready:
            return
        self._api_processes.drain()
        deadline = time.monotonic() + self._config.drain_seconds
        await self._linger()
        if self._under_way:
            log.info("%d requests in flight get up to %.0f s to finish", self._under_way, self._config.drain_seconds)
        while self._under_way and not self._died.done():
            if time.monotonic() > deadline:
                log.warning("%d requests did not finish in time and are cut off", self._under_way)
                self._client.fail_open("unavailable", "The server is shutting down.")
                self._api_processes.fail_open("unavailable", "The server is shutting down.")
                return
            await asyncio.sleep(0.02)
            await self._api_processes.ask()

    @property
    def _under_way(self) -> int:
        """Requests that are not over, responses in the background among them."""
        return self._counter.open + self._api_processes.under_way + len(self._context.responses_live)

    async def _linger(self) -> None:
        # Who is served last of all has half of the time to be answered.
        seconds = 0.0 if self._interrupted else min(self._config.drain_linger_seconds, self._config.drain_seconds / 2)
        until = time.monotonic() + seconds
        self._state.leaving = True
        self._api_processes.tell_state()
        await self._api_processes.ask()
        while (self._http.sought or self._api_processes.sought) and not self._died.done():
            if time.monotonic() > until:
                break
            await asyncio.sleep(0.02)
            await self._api_processes.ask()
        self._state.leaving = False
        self._api_processes.tell_state()
        await self._api_processes.ask()

    def _why(self, http: asyncio.Task[None], live: asyncio.Task[None]) -> BaseException:
        """What made the server end; the engine's own reason counts more than what followed from it."""
        for part in (self._died, live, http):
            if part.done() and (error := part.exception()) is not None:
                return error
        return RuntimeError("the HTTP server stopped by itself")

    async def _fail(self, error: BaseException, stop: asyncio.Task[bool]) -> int:
        """Tell everybody why the server ends, and return its exit code."""
        started = self._state.serving or self._state.hung
        message = str(error)
        told = message if isinstance(error, EngineDied) else "the server failed"
        self._client.died(told)
        self._state.enter("dead", detail=message)
        self._api_processes.died(told)
        self._api_processes.tell_state()
        self._hold.drop()  # the error is the last to be read
        if not isinstance(error, UserError):
            log.error("the server failed", exc_info=error)
        try:
            code = await on_thread(termination.fatal, error)  # which waits for the log; probes and signals are still answered
        except UnavailableError:
            code = termination.fatal(error)  # there is no thread for it
        if started:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(stop), DEAD_FOR_S)
        return code

    async def _close(self, http: asyncio.Task[None]) -> None:
        self._hold.release()
        self._client.shutdown()
        self._api_processes.end()
        if self._counter.open:
            await asyncio.sleep(LAST_ANSWERS_S)
        self._http.give_up(errors.shutting_down())
        self._http.end()
        await self._batches.close()
        if self._engine is None or self._zygote is None:
            self._early.kill()
        if self._engine is not None:
            if self._state.phase != "draining" or self._state.context_length is None:
                self._engine.kill()  # it is broken, or still loading and does not listen
            await self._engine.end(ENGINE_EXIT_S)
        self._forget_folder()
        await asyncio.wait({http}, timeout=CONNECTIONS_CLOSE_S + HANDLERS_END_S + 1)
        await self._api_processes.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._context.responses.close(), LAST_RESPONSES_S)
        if self._zygote is not None:
            self._zygote.close()
        self._client.close()
        if self._own_folder is not None:
            shutil.rmtree(self._own_folder, ignore_errors=True)
        await self._front.last_spans()


def hang_after(watchdog_timeout: float) -> float:
    """Seconds of silence after which probes call the engine hung: well before the watchdog ends it, for then there is nothing left to
    tell, and whoever balances requests needs some time to send them elsewhere."""
    return float(os.environ.get(HANG_VARIABLE, min(HANG_AFTER_S, watchdog_timeout / 2)))


def own_url(host: str, port: int) -> str:
    """Where a process of this machine reaches a server that listens on `host`, which may stand for all addresses."""
    return url_of("127.0.0.1" if host in ("0.0.0.0", "", "::") else host, port)


def find_tokenizer(config: ServerConfig) -> Path | None:
    """The folder of --tokenizer-path where that is an address or a file; None: the path itself, or the model's folder."""
    path = config.tokenizer_path
    return hub.resolve(path, config.download_dir) if path and ("://" in path or Path(path).expanduser().is_file()) else None


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; on "::" for both families. Raises ConfigError when the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if host == "::":
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # else what the kernel is set to
        listener.bind(address)
        listener.listen(BACKLOG)  # from now on a client waits; before the first line in the log it would have been refused
    except OSError as error:
        raise ConfigError(
            f"cannot listen there on {host}: {error.strerror or error}; choose another, or 0", field="--port", value=port
        ) from error
    return listener


def listen_at(path: str) -> socket.socket:
    """A Unix socket that listens at this path."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(BACKLOG)
    return listener


def run(config: ServerConfig, early: Early) -> int:
    """Run a server, some of whose processes are there already; returns the exit code."""
    writer = logs.configure("api", level=config.log_level, http_level=config.log_level_http, form=config.log_format)
    writer.fields = log_fields

    async def serve() -> int:
        try:
            server = Server(config, writer, early)
        except BaseException:
            early.kill()
            raise
        return await server.run()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code = runner.run(serve())
    logs.exit_now(code)  # Python's own end would wait for a log that nobody reads

"""The process that loads a model's text files once and forks workers: a fork takes milliseconds and shares what was loaded, so a
worker can be ended at any time.

`ForkServer` is the API process's side: it starts the process, and starts it again when it ends. `main` is the process. Its standard
input is a socket, over which come settings, and sockets for workers. Messages: a kind, a length, msgpack.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import logging
import os
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Final

import msgspec

from banyan_runtime import logs, wire
from banyan_runtime.child import Child
from banyan_runtime.config import ServerConfig
from banyan_runtime.errors import ConfigError, ModelError, UnavailableError, UserError
from banyan_runtime.front.errors import unavailable
from banyan_runtime.front.prepare.worker_client import WorkerClient, WorkerGone
from banyan_runtime.front.text.isolation import isolate
from banyan_runtime.process import die_with, without_collection

log = logging.getLogger("banyan")

HEAD: Final = struct.Struct("<cI")
BOOT: Final = b"b"  # to it: a `Boot`
INFO: Final = b"i"  # to it: an EngineInfo; comes before the first FORK
FORK: Final = b"f"  # to it: nothing, and the socket of a new worker with it
LOADED: Final = b"l"  # from it: the tokenizer, or None (`Tokenizer.whole`)
TOKENIZES: Final = "tokenizes"  # its only word: the library that loads tokenizers is imported before the `Boot` comes
FAILED: Final = b"x"  # from it: a `Failure`, and it ends

AGAIN_AFTER_S: Final = (0.0, 0.5, 2.0, 5.0, 15.0)  # between one end and the next start
STEADY_S: Final = 60.0  # after which an end is the first one again
HELLO_S: Final = 10.0  # a fork takes milliseconds
FIRST_LOAD_S: Final = 300.0  # for the text files, which may come from a slow disk
LOAD_S: Final = 60.0  # for libraries and the same files again; never less than LOAD_AGAIN times what it took first
LOAD_AGAIN: Final = 5
FIRST_TRIES: Final = 2


class Boot(msgspec.Struct, frozen=True):
    config: str  # ServerConfig.engine_json
    model_dir: str
    tokenizer_dir: str | None
    parent: int


class Failure(msgspec.Struct, frozen=True):
    """Why the text files cannot be used, as a UserError says it."""

    exit_code: int
    message: str
    code: str
    field: str
    value: str


def message(kind: bytes, content: object) -> bytes:
    raw = msgspec.msgpack.encode(content)
    return HEAD.pack(kind, len(raw)) + raw


class _Ended(Exception):
    """The process went away, or had to be ended, before it had loaded. The text says why."""


class Early:
    """The process before it knows its model: it gets on with what takes long, and waits."""

    def __init__(self, *, tokenizes: bool) -> None:
        """On the main thread. `tokenizes`: it will need the library that loads tokenizers. Raises OSError, UnavailableError."""
        self.control, theirs = socket.socketpair()
        self.control.setblocking(False)
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # threads do not survive a fork
        with theirs:
            words = (TOKENIZES,) if tokenizes else ()
            self.process = Child("banyan_runtime.front.prepare.fork_server", *words, stdin=theirs.fileno(), environment=environment)


class ForkServer:
    """`start` it, and let it `serve` when the engine is ready; then it forks."""

    def __init__(self, config: ServerConfig, model_dir: Path, tokenizer_dir: Path | None = None, early: Early | None = None) -> None:
        """`early`: the process is there already."""
        self.model_dir, self.tokenizer_dir = model_dir, tokenizer_dir
        folder = None if tokenizer_dir is None else str(tokenizer_dir)
        self._boot = Boot(config.engine_json(), str(model_dir), folder, os.getpid())
        self._control: socket.socket | None = None
        self._process: Child | None = None
        self._early = early
        self._info: wire.EngineInfo | None = None
        self._usable = asyncio.Event()
        self._closed = False
        self._watcher: asyncio.Task[None] | None = None
        self._load_s = FIRST_LOAD_S
        self.tokenizer: bytes | None = None  # as the process has loaded it first (`Tokenizer.whole`), for who takes it
        self.trouble = ""  # why there is no process that could fork, as far as is known

    async def start(self) -> None:
        """Start the process and wait until it has read the model's text files.

        Must run on the main thread: the kernel's parent-death signal follows the thread that starts the process. Raises
        ModelError or ConfigError for files that cannot be used, UnavailableError when the process is ended every time.
        """
        started = time.monotonic()
        for left in reversed(range(FIRST_TRIES)):
            try:
                await self._load()
                break
            except _Ended as error:
                self._drop()
                if not left:
                    raise UnavailableError(f"the process that tokenizes cannot be started: {error}") from None
                log.error("the process that tokenizes cannot be started: %s; trying again", error)
            except BaseException:
                self._drop()
                raise
        self._load_s = max(LOAD_S, LOAD_AGAIN * (time.monotonic() - started))
        self._watcher = asyncio.create_task(self._watch())

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def serve(self, info: wire.EngineInfo) -> None:
        """The engine is there: from here on workers can be had."""
        self._info = info
        self._tell()

    async def fork(self) -> WorkerClient:
        """A fresh worker. Waits while there is no process to fork it. Raises WorkerGone when that one goes away now or
        something else is lacking, ApiError after `close`."""
        while True:
            await self._usable.wait()
            if self._closed:
                raise unavailable("The server is shutting down.")
            worker, theirs = WorkerClient.pair()
            with theirs:
                try:
                    asked = self._ask_for(theirs)
                except OSError as error:
                    worker.close()
                    raise WorkerGone(str(error)) from error
            if asked:
                return await self._greeted(worker, self._process)
            worker.close()

    def _ask_for(self, theirs: socket.socket) -> bool:
        """Ask for a worker that has this end of its socket. False: the process hangs, or has ended and the watcher does not know yet; now
        it is dropped. Raises OSError where something else is lacking."""
        assert self._control is not None
        try:
            socket.send_fds(self._control, [message(FORK, None)], [theirs.fileno()])
        except (BlockingIOError, ConnectionError):
            self._drop()
            return False
        return True

    async def _greeted(self, worker: WorkerClient, process: Child | None) -> WorkerClient:
        """Wait until the worker says that it is there. Raises WorkerGone."""
        try:
            async with asyncio.timeout(HELLO_S):
                await worker.connect()
        except TimeoutError:
            if process is self._process:
                self._drop()  # it hangs; the watcher starts another
            raise WorkerGone("the process that forks does not answer") from None
        return worker

    def close(self) -> None:
        """End the process; its workers end with it."""
        if self._watcher is not None:
            self._watcher.cancel()
        self._drop()
        self._closed = True
        self._usable.set()

    async def _load(self) -> None:
        """Raises _Ended, and UserError for files that cannot be used."""
        try:
            early, self._early = self._early or Early(tokenizes=False), None
        except (OSError, UnavailableError) as error:
            raise _Ended(str(error)) from error
        ours = self._control = early.control
        self._process = early.process
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._load_s):
                await loop.sock_sendall(ours, message(BOOT, self._boot))
                kind, size = HEAD.unpack(await _read(ours, HEAD.size))
                content = await _read(ours, size)
        except TimeoutError:
            raise _Ended(f"it had not read the tokenizer after {self._load_s:.0f} s") from None
        except (OSError, EOFError):
            raise _Ended(_end_of(await self._process.wait())) from None
        if kind == FAILED:
            failure = msgspec.msgpack.decode(content, type=Failure)
            kinds: dict[int, type[UserError]] = {64: ConfigError, 65: ModelError}
            raise kinds.get(failure.exit_code, UserError)(failure.message, code=failure.code, field=failure.field, value=failure.value)
        if self._watcher is None:
            self.tokenizer = msgspec.msgpack.decode(content, type=bytes | None)
        self._tell()

    def _tell(self) -> None:
        if self._info is None or self._control is None:
            return
        with contextlib.suppress(OSError):  # it is gone: the watcher knows
            self._control.send(message(INFO, self._info))
            self._usable.set()
            self.trouble = ""

    async def _watch(self) -> None:
        """Start the process again whenever it ends."""
        failures = 0
        while True:
            assert self._process is not None
            started = time.monotonic()
            code = await self._process.wait()
            self._drop()
            if time.monotonic() - started > STEADY_S:
                failures = 0
            self.trouble = _end_of(code)
            log.error("the process that tokenizes is gone (%s); starting another", self.trouble)
            while True:
                await asyncio.sleep(AGAIN_AFTER_S[min(failures, len(AGAIN_AFTER_S) - 1)])
                failures += 1
                try:
                    await self._load()
                    break
                except Exception as error:
                    self.trouble = str(error)
                    log.error("the process that tokenizes cannot be started: %s", error)
                    self._drop()

    def _drop(self) -> None:
        self._usable.clear()
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()


def _end_of(code: int) -> str:
    """How a process ended, for people; a negative code is the signal that ended it."""
    hint = "; if memory ran out, raise the memory limit" if code == -signal.SIGKILL else ""
    return f"it ended with exit code {code}{hint}"


async def _read(connection: socket.socket, size: int) -> bytearray:
    loop = asyncio.get_running_loop()
    raw, come = bytearray(size), 0
    with memoryview(raw) as view:
        while come < size:
            more = await loop.sock_recv_into(connection, view[come:])
            if not more:
                raise EOFError
            come += more
    return raw


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):  # a Ctrl-C reaches the whole group; the front ends us when it is done
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended workers leave nothing to be waited for
    control = socket.socket(fileno=os.dup(0))
    isolate()
    from banyan_runtime.front.prepare.clock import trial
    from banyan_runtime.front.prepare.constraints import Constraints
    from banyan_runtime.front.prepare.planner import Planner
    from banyan_runtime.front.prepare.worker import serve
    from banyan_runtime.front.text.text import Text

    if TOKENIZES in sys.argv[1:]:
        with without_collection():
            importlib.import_module("transformers")
    kind, raw, _ = _receive(control)
    assert kind == BOOT, kind
    boot = msgspec.msgpack.decode(raw, type=Boot)
    die_with(boot.parent)
    config = ServerConfig.from_engine_json(boot.config)
    logs.configure_unthreaded("api", level=config.log_level, form=config.log_format)
    try:
        tokenizer_dir = None if boot.tokenizer_dir is None else Path(boot.tokenizer_dir)
        text = Text.load(config, Path(boot.model_dir), tokenizer_dir, trial)
        constraints = None
        if config.grammar_backend != "none" and text.tokenizer is not None:
            constraints = Constraints.load(tokenizer_dir or Path(boot.model_dir), text.defaults.eos_ids)
    except UserError as error:
        control.sendall(message(FAILED, Failure(error.exit_code, error.message, error.code, error.field, error.value)))
        return 0
    control.sendall(message(LOADED, None if text.tokenizer is None else text.tokenizer.whole))
    gc.collect()
    gc.freeze()
    planner: Planner | None = None
    ours = os.getpid()
    while True:
        kind, raw, connection = _receive(control)
        if kind == INFO:
            planner = Planner(config, text, msgspec.msgpack.decode(raw, type=wire.EngineInfo), constraints)
        elif kind == FORK:
            assert planner is not None, "a worker was asked for before the engine was ready"
            assert connection is not None
            try:
                child = os.fork()
            except OSError as error:  # no memory or no process left: the front is told by the end of its socket
                log.error("a worker could not be started: %s", error)
                child = -1
            if child == 0:
                control.close()
                nothing = os.open(os.devnull, os.O_RDWR)
                for descriptor in (0, 1, 2):  # what libraries write when they run out of memory is no line of our log
                    os.dup2(nothing, descriptor)
                die_with(ours)
                serve(connection, planner, text.template)
            connection.close()


def _receive(control: socket.socket) -> tuple[bytes, bytes, socket.socket | None]:
    """The next message; ends this process when the front has gone."""
    raw, descriptors, _, _ = socket.recv_fds(control, HEAD.size, 1)
    while raw and len(raw) < HEAD.size:
        raw += control.recv(HEAD.size - len(raw))
    if not raw:
        sys.exit(0)
    kind, size = HEAD.unpack(raw)
    content = b""
    while len(content) < size:
        piece = control.recv(size - len(content))
        if not piece:
            sys.exit(0)
        content += piece
    return kind, content, socket.socket(fileno=descriptors[0]) if descriptors else None


if __name__ == "__main__":
    sys.exit(main())

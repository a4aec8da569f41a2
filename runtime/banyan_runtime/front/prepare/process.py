"""The process that loads a model's text files once and forks workers from itself: a fork is there within milliseconds and
shares what was loaded, so a worker can be ended at any time.

Its standard input is a socket to the front, which sends facts and sockets for workers. Messages: a kind, a length, msgpack.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import signal
import socket
import struct
import sys
from pathlib import Path
from typing import Final

import msgspec

from banyan_runtime import logs, wire
from banyan_runtime.config import ServerConfig
from banyan_runtime.errors import UserError
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


class Boot(msgspec.Struct, frozen=True):
    config: str  # ServerConfig.engine_json
    model_dir: str
    tokenizer_dir: str | None
    parent: int


class Failure(msgspec.Struct, frozen=True):
    """Why the text files cannot be used. `exit_code` is that of a UserError; 70: a bug, whose trace is in the log."""

    exit_code: int
    message: str


def message(kind: bytes, content: object) -> bytes:
    raw = msgspec.msgpack.encode(content)
    return HEAD.pack(kind, len(raw)) + raw


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
        control.sendall(message(FAILED, Failure(error.exit_code, str(error))))
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

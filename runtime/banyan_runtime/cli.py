"""`banyan-runtime serve | batch | models | version`. Each command is imported only when it is the one asked for."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from banyan_runtime import __version__
from banyan_runtime.errors import UserError
from banyan_runtime.process import leave, open_streams
from banyan_runtime.server import termination

USAGE = """usage: banyan-runtime COMMAND [OPTION...]

commands:
  serve    serve a model over the OpenAI HTTP API
  batch    run a JSONL file of requests against a server, or a model
  models   fetch and inspect models
  version  print the version

'banyan-runtime COMMAND --help' explains a command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    open_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    command = words.pop(0) if words else "help"
    # As process 1 of a container we would not hear a SIGTERM at all until a command listens to it, which takes seconds of imports.
    # An exception must not be raised in the middle of one: C libraries that are being loaded do not expect it, and crash.
    signal.signal(signal.SIGTERM, _end_at_once)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, as in the background of a shell
        signal.signal(signal.SIGINT, _end_at_once)
    try:
        if command == "serve":
            from banyan_runtime.server.early import prepare

            serve = prepare(words)
            _loaded()
            return serve()
        if command == "batch":
            from banyan_runtime.batch.cli import main as batch

            _loaded()
            return leave(batch(words))
        if command == "models":
            from banyan_runtime.hub.cli import main as models

            if words[:1] == ["convert"]:
                _loaded()  # at a signal it removes the folder that it has begun
            return models(words)  # a signal ends others at once: the threads of a download would hold up the interpreter's own end
        _loaded()
        if command in ("version", "--version"):
            print(__version__)
            return 0
        if command in ("help", "--help", "-h"):
            print(USAGE)
            return 0
        print(f"banyan-runtime: unknown command '{command}'\n\n{USAGE}", file=sys.stderr)
        return 64
    except UserError as error:
        return termination.fatal(error)
    except KeyboardInterrupt:  # a command that does not listen to Ctrl-C itself, or not yet
        return 128 + signal.SIGINT


def _end_at_once(number: int, _: object) -> None:
    os._exit(128 + number)


def _loaded() -> None:
    """From here on a signal may be an exception."""
    signal.signal(signal.SIGTERM, _end)
    if signal.getsignal(signal.SIGINT) is _end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(*_: int | FrameType | None) -> NoReturn:
    sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())

"""Log lines of both processes: `[YYYY-MM-DD HH:MM:SS] message` or JSON, written by a thread of its own.

Whoever logs only puts a record into a bounded queue, so a slow terminal or a full pipe stalls no step; what does not fit is
dropped and counted. uvicorn's loggers write through the same queue. No line ever holds a query string or a key.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import logging
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import Final, Literal, NoReturn

from banyan_runtime import stacks
from banyan_runtime.process import start_thread

Component = Literal["api", "engine", "batch"]
QUEUE_LINES: Final = 10_000  # about 2 MB, and minutes of a busy server's lines
QUIET_PATHS: Final = ("/metrics", "/health", "/livez", "/readyz", "/ready")
FLUSH_TIMEOUT_S: Final = 2.0

_STANDARD_FIELDS: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message", "taskName"}


class TextFormatter(logging.Formatter):
    """`[time] message`; uvicorn's own lines keep their level in front, as scripts that read them expect."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        stamp = self.formatTime(record, "%Y-%m-%d %H:%M:%S")
        if record.name.startswith("uvicorn"):
            message = f"{record.levelname + ':':<9} {message}"
        elif record.levelno >= logging.WARNING:
            message = f"{record.levelname}: {message}"
        text = f"[{stamp}] {message}"
        return f"{text}\n{record.exc_text}" if record.exc_text else text


class JsonFormatter(logging.Formatter):
    """One object a line: ts, level, logger, msg, pid, component, exc, and whatever `extra` the caller gave."""

    def __init__(self, component: Component) -> None:
        super().__init__()
        self._component = component

    def format(self, record: logging.LogRecord) -> str:
        stamp = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line: dict[str, object] = {
            "ts": stamp,
            "level": record.levelname.lower(),
            "logger": record.name,
            "msg": record.getMessage(),
            "pid": record.process,
            "component": self._component,
        }
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD_FIELDS}
        if record.exc_text:
            line["exc"] = record.exc_text
        return json.dumps(line, ensure_ascii=False, default=str)


class Writer(logging.Handler):
    """Takes records on any thread without waiting, writes them to standard error on its own."""

    def __init__(self, formatter: logging.Formatter) -> None:
        """Raises UnavailableError where the system has no thread for it."""
        super().__init__()
        self.setFormatter(formatter)
        self.dropped = 0
        self.fields: Callable[[], Mapping[str, str]] = dict  # what else a line says, asked for where it is logged
        self._records: queue.Queue[logging.LogRecord | threading.Event] = queue.Queue(QUEUE_LINES)
        start_thread(self._write, "log")

    def emit(self, record: logging.LogRecord) -> None:
        _settle(record)
        for name, value in self.fields().items():
            vars(record).setdefault(name, value)
        try:
            self._records.put_nowait(record)
        except queue.Full:
            self.dropped += 1

    def flush(self) -> None:
        """Wait until everything logged so far is written, at most FLUSH_TIMEOUT_S."""
        written = threading.Event()
        try:
            self._records.put(written, timeout=FLUSH_TIMEOUT_S)
        except queue.Full:
            return
        written.wait(FLUSH_TIMEOUT_S)

    def _write(self) -> None:
        while True:
            item = self._records.get()
            if isinstance(item, threading.Event):
                item.set()
                continue
            try:
                sys.stderr.write(self.format(item) + "\n")
                sys.stderr.flush()
            except (OSError, ValueError):
                self.dropped += 1  # nobody reads standard error any more; the server goes on


class _Direct(logging.Handler):
    """Writes records at once, for a process that forks and so may have no thread."""

    def emit(self, record: logging.LogRecord) -> None:
        _settle(record)
        with contextlib.suppress(OSError, ValueError):  # nobody reads standard error any more
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()


def _settle(record: logging.LogRecord) -> None:
    """Make the text here, as arguments may change once the caller goes on."""
    record.msg, record.args = record.getMessage(), None
    if record.exc_info:
        record.exc_text = "".join(traceback.format_exception(*record.exc_info)).rstrip()
        record.exc_info = None


class AccessFilter(logging.Filter):
    """Drops the access lines of probes and scrapes, and cuts query strings off, because they may hold keys."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not isinstance(record.args, tuple) or len(record.args) != 5:
            return True
        client, method, path, version, status = record.args
        path = str(path).partition("?")[0]
        if path.startswith(QUIET_PATHS):
            return False
        record.msg, record.args = '%s - "%s %s HTTP/%s" %s', (client, method, path, version, _with_phrase(status))
        return True


def _with_phrase(status: object) -> str:
    from http import HTTPStatus

    try:
        return f"{status} {HTTPStatus(int(str(status))).phrase}"
    except ValueError:
        return str(status)


class Hold(logging.Filter):
    """Keeps a logger's lines back until `release`, so that the log reads in the order in which the server came up.

    HTTP listens from the first moment, but its lines belong behind those of the engine. Warnings pass at once.
    """

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__()
        self._logger = logger
        self._held: list[logging.LogRecord] = []
        logger.addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            return True
        self._held.append(record)
        return False

    def drop(self) -> None:
        """What is held has become pointless, and so are the logger's further lines below a warning."""
        self._held.clear()
        self._logger.setLevel(max(self._logger.level, logging.WARNING))

    def release(self) -> None:
        self._logger.removeFilter(self)
        held, self._held = self._held, []
        for record in held:
            record.created = time.time()  # stamps must not run backwards
            self._logger.handle(record)


def configure(component: Component, *, level: str = "info", http_level: str | None = None, form: str = "text") -> Writer:
    """Send every logger of this process through one `Writer`. Called once, at the start of a process. Raises UnavailableError."""
    writer = Writer(_formatter(component, form))
    _install(writer)
    logging.getLogger("banyan").setLevel(level.upper())
    logging.getLogger("uvicorn.error").setLevel(level.upper())
    access = logging.getLogger("uvicorn.access")
    access.setLevel((http_level or level).upper())
    access.addFilter(AccessFilter())
    _hook()
    atexit.register(writer.flush)
    faulthandler.enable()
    stacks.show_on_signal()
    return writer


def configure_unthreaded(component: Component, *, level: str = "warning", form: str = "text") -> None:
    """As `configure`, for a process that forks and says little: each line is written before whoever logs it goes on."""
    direct = _Direct()
    direct.setFormatter(_formatter(component, form))
    _install(direct)
    logging.getLogger("banyan").setLevel(level.upper())
    _hook()


def _formatter(component: Component, form: str) -> logging.Formatter:
    return JsonFormatter(component) if form == "json" else TextFormatter()


def _install(handler: logging.Handler) -> None:
    logging.raiseExceptions = False
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)


def _hook() -> None:
    """What Python itself would write to standard error goes through the log."""
    logging.captureWarnings(True)
    sys.excepthook = _log_exception
    threading.excepthook = lambda failed: _log_exception(failed.exc_type, failed.exc_value, failed.exc_traceback)
    sys.unraisablehook = lambda failed: _log_exception(failed.exc_type, failed.exc_value, failed.exc_traceback)


def _log_exception(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    if error is not None and not issubclass(kind, SystemExit):
        logging.getLogger("banyan").error("unexpected %s", kind.__name__, exc_info=(kind, error, trace))


def as_line(text: str, level: int = logging.INFO) -> str:
    """`text` in the form of this process's log, for words that go past it to standard error: as they are, or as a JSON object."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, JsonFormatter):
            return handler.formatter.format(
                logging.makeLogRecord({"name": "banyan", "levelno": level, "levelname": logging.getLevelName(level), "msg": text})
            )
    return text


def exit_now(code: int) -> NoReturn:
    """End the process without running anything else, but not without its last lines."""
    for handler in logging.getLogger().handlers:
        handler.flush()
    os._exit(code)

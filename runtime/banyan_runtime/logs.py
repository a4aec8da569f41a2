"""Log lines of both processes: `[YYYY-MM-DD HH:MM:SS] message` or JSON, written by a thread of its own.

Whoever logs only puts a record into a bounded queue, so a slow terminal or a full pipe stalls no step; what does not fit is
dropped and counted. uvicorn's loggers write through the same queue. No line ever holds a query string or a key.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import logging
import os
import queue
import sys
import threading
import time
import traceback
from datetime import UTC, datetime
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
        self._records: queue.Queue[logging.LogRecord | threading.Event] = queue.Queue(QUEUE_LINES)
        start_thread(self._write, "log")

    def emit(self, record: logging.LogRecord) -> None:
        # Arguments may change once the caller goes on, so the text is made here.
        record.msg, record.args = record.getMessage(), None
        if record.exc_info:
            record.exc_text = "".join(traceback.format_exception(*record.exc_info)).rstrip()
            record.exc_info = None
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

    def release(self) -> None:
        self._logger.removeFilter(self)
        held, self._held = self._held, []
        for record in held:
            record.created = time.time()  # stamps must not run backwards
            self._logger.handle(record)


def configure(component: Component, *, level: str = "info", http_level: str | None = None, form: str = "text") -> Writer:
    """Send every logger of this process through one `Writer`. Called once, at the start of a process. Raises UnavailableError."""
    writer = Writer(JsonFormatter(component) if form == "json" else TextFormatter())
    logging.raiseExceptions = False
    root = logging.getLogger()
    root.handlers[:] = [writer]
    root.setLevel(logging.WARNING)
    logging.getLogger("banyan").setLevel(level.upper())
    logging.getLogger("uvicorn.error").setLevel(level.upper())
    access = logging.getLogger("uvicorn.access")
    access.setLevel((http_level or level).upper())
    access.addFilter(AccessFilter())
    atexit.register(writer.flush)
    faulthandler.enable()
    stacks.show_on_signal()
    return writer


def exit_now(code: int) -> NoReturn:
    """End the process without running anything else, but not without its last lines."""
    for handler in logging.getLogger().handlers:
        handler.flush()
    os._exit(code)

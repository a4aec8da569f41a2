"""A client that speaks in bytes, for what no HTTP library would send; and a small application behind the real HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import uvloop
from starlette.types import ASGIApp

from banyan_runtime.server.connection import Limits
from banyan_runtime.server.http import HttpServer

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class RawClient:
    """One connection to a server."""

    def __init__(self, url: str, limit_s: float = 10.0) -> None:
        self.socket = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=limit_s)

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # the server may refuse before it has read everything
            self.socket.sendall(data)

    def end(self) -> None:
        """Nothing more will be sent; answers are still read."""
        self.socket.shutdown(socket.SHUT_WR)

    def until(self, mark: bytes) -> bytes:
        """What is received up to and with `mark`."""
        received = b""
        while mark not in received:
            data = self.socket.recv(1 << 16)
            assert data, f"the connection ended before {mark!r}: {received[-500:]!r}"
            received += data
        return received

    def rest(self) -> bytes:
        """What is received until the server closes the connection; a reset counts as a close."""
        received = b""
        with contextlib.suppress(ConnectionError):
            while data := self.socket.recv(1 << 16):
                received += data
        return received


def head(method: str, path: str, *headers: str) -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", *headers, "", ""]).encode("latin-1")


def post(path: str, body: Any, *headers: str) -> bytes:
    """A whole request."""
    content = json.dumps(body).encode()
    return head("POST", path, "Content-Type: application/json", f"Content-Length: {len(content)}", *headers) + content


def refused(answer: bytes) -> tuple[int, dict[str, Any]]:
    """Status and error object of an answer that is an error and the connection's last word."""
    top, _, body = answer.partition(b"\r\n\r\n")
    lines = top.decode().lower().split("\r\n")
    assert "content-type: application/json" in lines, answer
    assert "connection: close" in lines, answer
    assert any(line.startswith("x-request-id: ") for line in lines), answer
    error = json.loads(body)
    assert set(error) == {"error"}
    assert set(error["error"]) == {"message", "type", "param", "code"}
    return int(lines[0].split()[1]), error["error"]


def eventually(seen: Callable[[], bool], limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not seen():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.01)


@contextlib.contextmanager
def serving(app: ASGIApp, limits: Limits | None = None) -> Iterator[str]:
    """Run `app` behind the server's own HTTP on a free port, on a thread; yields the URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    http = HttpServer(app, limits)
    http.config.lifespan = "off"

    loop = uvloop.new_event_loop()

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(http.serve([listener]))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(http.end)
        thread.join(20)
        assert not thread.is_alive()

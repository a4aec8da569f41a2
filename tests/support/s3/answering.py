"""An HTTP server that keeps what it was asked and answers as a test says."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Request:
    method: str
    target: str  # as in the request line: a path, or for a proxy the whole URL
    headers: Mapping[str, str]  # by lower-case name
    body: bytes


@dataclass(frozen=True)
class Answer:
    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=lambda: {"ETag": '"tag"'})


class Answering(http.server.ThreadingHTTPServer):
    def __init__(self, answer: Callable[[Request], Answer]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = answer
        self.requests: list[Request] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Answering

    def _handle(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Request(self.command, self.path, headers, self.rfile.read(int(headers.get("content-length", "0"))))
        self.server.requests.append(request)
        answer = self.server.answer(request)
        self.send_response_only(answer.status)
        body = b"" if self.command == "HEAD" else answer.body
        for name, value in ({"Date": self.date_time_string(), "Content-Length": str(len(body))} | dict(answer.headers)).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = do_CONNECT = _handle

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def answering(answer: Callable[[Request], Answer] = lambda _: Answer()) -> Iterator[Answering]:
    server = Answering(answer)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()

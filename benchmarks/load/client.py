"""One connection that streams completions: HTTP/1.1 and server-sent events with as little work as there is, so that it can share
a machine with what it measures. httptools reads the framing; times are taken when bytes arrive, before they are read.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any, Final, cast
from urllib.parse import urlsplit

import httptools
import msgspec

PATH: Final = "/v1/completions"
_DATA: Final = b"data: "
_KEPT_S: Final = 3.0  # servers close what rests: after 5 s, where they are in a hurry


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Choice(msgspec.Struct):
    text: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode: Final = msgspec.json.Decoder(_Chunk).decode


class Failed(Exception):
    """The request was not answered; the text says how."""


class Closed(Failed):
    """The connection ended before the first byte of an answer."""


class Answer:
    """What came: `text`, when its pieces came and when it ended (time.perf_counter), and the server's own counts."""

    __slots__ = ("_held", "cached_tokens", "ended", "output_tokens", "pieces", "prompt_tokens", "text")

    def __init__(self) -> None:
        self.text: list[str] = []
        self.pieces: list[float] = []
        self.ended = 0.0
        self.prompt_tokens = self.output_tokens = 0
        self.cached_tokens: int | None = None
        self._held = b""

    def feed(self, data: bytes, now: float) -> None:
        """Read what has arrived of the stream of events. Raises Failed for an error told in it."""
        *lines, self._held = (self._held + data).split(b"\n")
        for line in lines:
            if line.startswith(_DATA) and not line.startswith(b"data: [DONE]"):
                self._event(line[len(_DATA) :], now)

    def _event(self, event: bytes, now: float) -> None:
        try:
            chunk = _decode(event)
        except msgspec.DecodeError as error:
            raise Failed(f"an event that is no completion chunk: {error}") from error
        if chunk.error is not None:
            raise Failed(f"an error in the stream: {str(chunk.error)[:200]}")
        if chunk.choices and chunk.choices[0].text:
            self.pieces.append(now)
            self.text.append(chunk.choices[0].text)
        if chunk.usage is not None:
            self.prompt_tokens, self.output_tokens = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
            if chunk.usage.prompt_tokens_details is not None:
                self.cached_tokens = chunk.usage.prompt_tokens_details.cached_tokens


class Connection(asyncio.Protocol):
    """Carries one request at a time; is kept until it breaks."""

    def __init__(self) -> None:
        self.usable = False
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._answer = Answer()
        self._status = 0
        self._refusal = b""
        self._now = 0.0

    async def ask(self, request: bytes) -> Answer:
        """Send a whole request and read its answer. Raises Failed."""
        assert self._transport is not None
        self._answer, self._status, self._refusal = Answer(), 0, b""
        self._parser = httptools.HttpResponseParser(self)
        self._waiter = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._waiter
        finally:
            self._waiter = None
        return self._answer

    def close(self) -> None:
        self.usable = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.usable = True

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        if self._waiter is None or self._waiter.done() or self._parser is None:
            return self.close()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self._fail(error.__context__ if isinstance(error.__context__, Failed) else Failed(f"an answer that could not be read: {error}"))
        except httptools.HttpParserError as error:
            self._fail(Failed(f"an answer that is not HTTP/1.1: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        self.usable = False
        kind = Failed if self._status else Closed
        self._fail(kind(f"the connection was lost ({error or 'closed'})"))

    def _fail(self, error: Failed) -> None:
        self.close()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)

    # --- the parser's calls ---

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self._status = self._parser.get_status_code()

    def on_body(self, piece: bytes) -> None:
        if self._status == 200:
            self._answer.feed(piece, self._now)
        else:
            self._refusal += piece

    def on_message_complete(self) -> None:
        assert self._parser is not None
        if not self._parser.should_keep_alive():
            self.usable = False
        if self._status != 200:
            self._fail(Failed(f"HTTP {self._status}: {self._refusal[:200].decode(errors='replace')}"))
        elif self._waiter is not None and not self._waiter.done():
            self._answer.ended = self._now
            self._waiter.set_result(None)


class Server:
    """A server at `url` (http://HOST:PORT), and the connections that are kept with it.

    `extra` goes into every request's body, beside what a case says.
    """

    def __init__(self, url: str, model: str, *, api_key: str = "", extra: dict[str, Any] | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise ValueError(f"{url}: only http://HOST:PORT can be measured")
        self._host, self._port, self._root = parts.hostname, parts.port or 80, parts.path.rstrip("/")
        self._authorization = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._model = model
        self._extra = {"ignore_eos": True} if extra is None else extra
        self._idle: list[tuple[Connection, float]] = []  # with the time since when

    def request(self, prompt: str | tuple[int, ...], max_tokens: int, temperature: float = 0.0) -> bytes:
        """The bytes of a request, head and body."""
        fields = {
            "model": self._model, "prompt": prompt, "max_tokens": max_tokens, "temperature": temperature, "stream": True,
            "stream_options": {"include_usage": True}, **self._extra,
        }  # fmt: skip
        body = msgspec.json.encode(fields)
        head = (
            f"POST {self._root}{PATH} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n{self._authorization}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async def connect(self, count: int) -> None:
        """Have `count` connections ready."""
        while len(self._idle) < count:
            self._idle.append((await self._connection(), time.perf_counter()))

    async def ask(self, request: bytes) -> Answer:
        """Raises Failed. Some servers close a connection after each answer, which may be seen only when it is used again."""
        while (kept := self._kept()) is not None:
            with contextlib.suppress(Closed):
                return await self._ask(kept, request)
        return await self._ask(await self._connection(), request)

    async def _ask(self, connection: Connection, request: bytes) -> Answer:
        try:
            return await connection.ask(request)
        finally:
            if connection.usable:
                self._idle.append((connection, time.perf_counter()))

    def close(self) -> None:
        while self._idle:
            self._idle.pop()[0].close()

    def _kept(self) -> Connection | None:
        while self._idle:
            connection, since = self._idle.pop()
            if connection.usable and time.perf_counter() - since < _KEPT_S:
                return connection
            connection.close()
        return None

    async def _connection(self) -> Connection:
        try:
            _, connection = await asyncio.get_running_loop().create_connection(Connection, self._host, self._port)
        except OSError as error:
            raise Failed(f"no connection to {self._host}:{self._port}: {error.strerror}") from error
        return connection

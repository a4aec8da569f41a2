"""What one connection may cost, and how long it may take: the server's HTTP with small limits over a small application."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from starlette.types import Receive, Scope, Send

from banyan_runtime.server.connection import HttpConnection, Limits
from tests.support.server.raw import RawClient, eventually, head, post, refused, serving

LIMITS = Limits(head_s=1.0, body_s=2.0, body_bytes=1000, idle_s=3.0, write_s=2.0, linger_s=1.0, connections=4, crowded_idle_s=1.0)
BLOCK = b"x" * 65536


class App:
    """Reads the body, then does what the path says."""

    def __init__(self) -> None:
        self.produced = 0  # bytes that /flood has handed over
        self.flooding = 0
        self.waiting = 0  # requests in /wait
        self.release = threading.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in ("/early", "/last"):
            while (message := await receive())["type"] == "http.request" and message["more_body"]:
                pass
            if message["type"] == "http.disconnect":
                return
        if scope["path"] == "/wait":
            await self.wait(receive)
        ends = [(b"connection", b"close")] if scope["path"] == "/last" else []
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-request-id", b"1"), *ends]})
        if scope["path"] == "/flood":
            await self.flood(receive, send)
        await send({"type": "http.response.body", "body": b"done:" + scope["path"].encode()})

    async def wait(self, receive: Receive) -> None:
        gone = asyncio.ensure_future(receive())
        self.waiting += 1
        try:
            while not self.release.is_set() and not gone.done():
                await asyncio.wait({gone}, timeout=0.02)
        finally:
            self.waiting -= 1
            gone.cancel()

    async def flood(self, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(receive())
        self.flooding += 1
        while not gone.done():
            await send({"type": "http.response.body", "body": BLOCK, "more_body": True})
            self.produced += len(BLOCK)
            await asyncio.sleep(0)
        self.flooding -= 1


@pytest.fixture
def app() -> App:
    return App()


@pytest.fixture
def url(app: App) -> Iterator[str]:
    with serving(app, LIMITS) as url:
        yield url
        app.release.set()


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many pieces of bodies were taken in at each turn of the event loop."""
    counts: list[int] = []
    advance, on_body = HttpConnection._advance, HttpConnection.on_body

    def count_turn(self: HttpConnection) -> None:
        counts.append(0)
        advance(self)

    def count_piece(self: HttpConnection, body: bytes) -> None:
        counts[-1] += 1
        on_body(self, body)

    monkeypatch.setattr(HttpConnection, "_advance", count_turn)
    monkeypatch.setattr(HttpConnection, "on_body", count_piece)
    return counts


def test_a_head_that_comes_in_pieces_is_told_from_its_body_and_from_the_next_head(url: str) -> None:
    with RawClient(url) as client:
        begun, rest = head("POST", "/one", "Content-Length: 40000", "X-A: 1", "X-B: 1").split(b"X-B")
        client.send(begun)
        time.sleep(0.2)
        client.send(b"X-B" + rest + b"x" * 40_000 + head("GET", "/two"))
        assert client.until(b"done:/two").count(b"done:") == 2


def test_headers_that_do_not_end_are_answered_with_408(url: str) -> None:
    with RawClient(url) as slow:
        slow.send(b"GET / HTTP/1.1\r\nX-A: 1\r\n")
        for _ in range(4):  # a byte now and then gains no time
            time.sleep(0.2)
            slow.send(b"X")
        status, error = refused(slow.rest())
        assert (status, error["code"]) == (408, "request_timeout")


@pytest.mark.matrix(gate=1)
@pytest.mark.parametrize("trickle", [False, True], ids=["no byte comes", "bytes trickle"])
def test_a_body_that_makes_no_progress_is_answered_with_408(url: str, trickle: bool) -> None:
    with RawClient(url) as slow:
        slow.send(head("POST", "/", "Content-Length: 100000") + b"{")
        for _ in range(8 if trickle else 0):
            time.sleep(0.2)
            slow.send(b"x" * 10)
        status, error = refused(slow.rest())
        assert (status, error["code"]) == (408, "request_timeout")


@pytest.mark.long  # seconds are counted
def test_a_slow_body_that_makes_progress_is_read_to_its_end(url: str) -> None:
    with RawClient(url) as steady:
        steady.send(head("POST", "/", "Content-Length: 7000"))
        for _ in range(14):  # 4.2 s in all, more than two windows
            time.sleep(0.3)
            steady.send(b"x" * 500)
        assert steady.until(b"done:/").startswith(b"HTTP/1.1 200")


@pytest.mark.long  # seconds are counted
def test_the_rest_of_a_body_that_is_already_answered_must_come_too(url: str) -> None:
    with RawClient(url) as slow:
        slow.send(head("POST", "/early", "Content-Length: 100000") + b"{")
        answer = slow.rest()
        assert (answer.count(b"HTTP/1.1 "), b"done:/early" in answer) == (1, True)


def test_an_answer_that_is_the_last_reaches_a_client_that_still_sends_its_body(app: App) -> None:
    with serving(app, replace(LIMITS, linger_s=30.0)) as url, RawClient(url) as client:
        client.send(head("POST", "/last", f"Content-Length: {64 << 20}") + BLOCK)
        time.sleep(0.3)
        for _ in range(100):
            client.socket.sendall(BLOCK)  # which would fail on a connection that was reset
        answer = client.rest()
    assert b"done:/last" in answer
    assert b"connection: close" in answer


@pytest.mark.long  # seconds are counted
@pytest.mark.matrix(gate=1)
@pytest.mark.parametrize("before", [b"", head("GET", "/")], ids=["never used", "after a request"])
def test_an_idle_connection_is_closed(url: str, before: bytes) -> None:
    with RawClient(url) as idle:
        idle.send(before)
        answer = idle.rest()
        assert answer.count(b"HTTP/1.1 ") == (1 if before else 0)


@pytest.mark.long  # seconds are counted
def test_a_line_without_anything_behind_a_body_begins_no_request(url: str) -> None:
    """Some clients send one (RFC 9112, 2.2)."""
    with RawClient(url) as client:
        client.send(head("POST", "/", "Content-Length: 2") + b"{}")
        client.until(b"done:/")
        client.send(b"\r\n")
        time.sleep(0.1)
        client.send(b"\r\n" + head("GET", "/"))
        client.until(b"done:/")
        client.send(b"\r\n")
        assert b"408" not in client.rest()


@pytest.mark.long  # seconds are counted
def test_a_reader_that_does_not_read_holds_the_producer_back_and_is_cut_in_the_end(url: str, app: App) -> None:
    with RawClient(url) as lazy:
        lazy.send(head("GET", "/flood"))
        lazy.until(b"xxx")
        eventually(lambda: app.flooding == 1)
        produced = -1
        while produced != app.produced:  # until the producer stands still
            produced = app.produced
            time.sleep(0.5)
        assert produced < 32 << 20  # what lies in the kernel's buffers; the server's own hold one block or two
        eventually(lambda: app.flooding == 0)


@pytest.mark.long  # seconds are counted
def test_a_reader_that_reads_slowly_is_not_cut(url: str, app: App) -> None:
    with RawClient(url) as slow:
        slow.send(head("GET", "/flood"))
        for _ in range(24):
            time.sleep(0.15)
            for _ in range(8):
                assert len(slow.socket.recv(1 << 16)) > 0
        assert app.flooding == 1
    eventually(lambda: app.flooding == 0)


def test_pipelined_requests_are_answered_one_after_the_other(url: str, app: App) -> None:
    with RawClient(url) as eager:
        eager.send(head("GET", "/wait"))
        eventually(lambda: app.waiting == 1)
        eager.send(head("GET", "/next") * 5000 + head("GET", "/end", "Connection: close"))
        app.release.set()
        answer = eager.rest()
    assert [answer.count(b"done:" + path) for path in (b"/wait", b"/next", b"/end")] == [1, 5000, 1]


def test_a_client_that_goes_away_takes_all_its_pipelined_requests_along(url: str, app: App) -> None:
    with RawClient(url) as gone:
        gone.send(head("GET", "/wait") * 3)
        eventually(lambda: app.waiting == 1)
    eventually(lambda: app.waiting == 0)
    time.sleep(0.3)
    assert app.waiting == 0, "the second one was not started"


@pytest.mark.parametrize(
    "bad",
    [b"\x00garbage\r\n\r\n", head("POST", "/second", "Transfer-Encoding: chunked") + b"zz\r\n"],
    ids=["no request", "a body that breaks off"],
)
def test_what_follows_a_good_request_is_refused_behind_its_answer(url: str, app: App, bad: bytes) -> None:
    with RawClient(url) as client:
        client.send(head("GET", "/wait") + bad)
        eventually(lambda: app.waiting == 1)
        app.release.set()
        first, mark, second = client.rest().partition(b"HTTP/1.1 400")
    assert first.startswith(b"HTTP/1.1 200")
    assert b"done:/wait" in first
    status, error = refused(mark + second)
    assert (status, error["code"]) == (400, "malformed_request")


def test_a_body_in_tiny_chunks_is_read_in_turns_with_others(url: str, turns: list[int]) -> None:
    request = head("POST", "/", "Transfer-Encoding: chunked", "Connection: close") + b"1\r\nx\r\n" * 200_000 + b"0\r\n\r\n"
    with RawClient(url) as client:
        client.send(request)
        assert client.rest().startswith(b"HTTP/1.1 200")
    assert sum(turns) == 200_000
    assert max(turns) < 6000  # a part of 16 kB holds 2,731 chunks


def test_behind_tiny_chunks_the_next_request_is_read(url: str) -> None:
    request = head("POST", "/first", "Transfer-Encoding: chunked") + b"1\r\nx\r\n" * 50_000 + b"0\r\n\r\n"
    with RawClient(url) as client:
        client.send(request + head("GET", "/second", "Connection: close"))
        answer = client.rest()
    assert answer.index(b"done:/first") < answer.index(b"done:/second")


def test_tiny_chunks_that_nobody_waits_for_end_with_their_connection(url: str, turns: list[int]) -> None:
    with RawClient(url) as gone:
        gone.send(head("POST", "/", "Transfer-Encoding: chunked") + b"1\r\nx\r\n" * 100_000)
        eventually(lambda: sum(turns) > 0)
    with RawClient(url) as other:
        other.send(head("GET", "/other"))
        assert other.until(b"done:/other").startswith(b"HTTP/1.1 200")


def test_beyond_so_many_connections_probes_alone_are_answered_and_idle_ones_closed(app: App) -> None:
    with serving(app, replace(LIMITS, idle_s=60.0)) as url, contextlib.ExitStack() as clients:
        busy = [clients.enter_context(RawClient(url)) for _ in range(LIMITS.connections)]
        for each in busy:
            each.send(head("GET", "/wait", "Connection: close"))
        eventually(lambda: app.waiting == LIMITS.connections)
        with RawClient(url) as probe:
            probe.send(head("GET", "/livez"))
            assert probe.until(b"done:/livez").startswith(b"HTTP/1.1 200")
        with RawClient(url) as other:
            other.send(post("/v1/completions", {}))
            answer = other.rest()
            assert answer.startswith(b"HTTP/1.1 503")
            assert b"retry-after: 5\r\n" in answer
            assert b'"code":"too_many_connections"' in answer
        with RawClient(url, 30) as idle:
            assert idle.rest() == b""
        app.release.set()
        for each in busy:
            assert b"done:/wait" in each.rest()
        with RawClient(url) as later:
            later.send(head("GET", "/later"))
            assert later.until(b"done:/later").startswith(b"HTTP/1.1 200")

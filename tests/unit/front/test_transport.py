"""Event streams over a real socket: they open at once, stay open, and whatever way they end, what they hold ends too."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import socket
import struct
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Any

import httpx2 as httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from banyan_runtime.front import event_stream
from banyan_runtime.front.errors import ApiError, ClientGone, unavailable
from banyan_runtime.front.event_stream import EventStream
from banyan_runtime.front.transport import EXCHANGE, Exchange, while_connected
from tests.support.server.raw import RawClient, eventually, head, serving

Events = Callable[[], AsyncGenerator[bytes, None]]


async def slow() -> AsyncGenerator[bytes, None]:
    yield b"data: 1\n\n"
    await asyncio.sleep(0.5)
    yield b"data: 2\n\n"


async def late() -> AsyncGenerator[bytes, None]:
    await asyncio.sleep(0.5)
    yield b"data: 1\n\n"


async def endless() -> AsyncGenerator[bytes, None]:
    yield b"data: 1\n\n"
    await asyncio.sleep(60)


async def silent() -> AsyncGenerator[bytes, None]:
    await asyncio.sleep(60)
    yield b""


async def refused() -> AsyncGenerator[bytes, None]:
    await asyncio.sleep(0.005)
    raise unavailable("not here")
    yield b""


async def refused_late() -> AsyncGenerator[bytes, None]:
    await asyncio.sleep(0.3)
    raise unavailable("not any longer")
    yield b""


async def empty() -> AsyncGenerator[bytes, None]:
    return
    yield b""


CUTTING = "data: \u2028 and \u2029 and \u0085 and — \u00e5\n\n"  # what clients take for line ends, and what resembles it


async def cutting() -> AsyncGenerator[bytes, None]:
    yield CUTTING.encode()  # before there is a connection to write to
    await asyncio.sleep(0.2)
    yield CUTTING.encode()  # at once
    yield CUTTING.encode()


STREAMS: dict[str, Events] = {
    events.__name__: events for events in (slow, late, endless, silent, refused, refused_late, empty, cutting)
}  # fmt: skip


class Site:
    """A small application on a free port."""

    def __init__(self) -> None:
        self.closes = 0
        self.generators = 0  # that have begun and not ended
        self.working = threading.Event()
        self.worked = threading.Event()
        routes = [Route("/stream/{name}", self.stream), Route("/dropped/{name}", self.dropped), Route("/work", self.work)]
        self.app = Starlette(routes=routes, middleware=[Middleware(Exchange)])

    async def events(self, name: str, stream: EventStream) -> None:
        """Push what the script of this name gives, as an engine's callbacks would."""
        self.generators += 1
        try:
            async with contextlib.aclosing(STREAMS[name]()) as events:
                async for event in events:
                    stream.push(event)
            stream.end(b"")
        except ApiError as error:
            stream.fail(error, f"data: {error.message}\n\ndata: [DONE]\n\n".encode())
        finally:
            self.generators -= 1

    def make(self, name: str) -> EventStream:
        stream = EventStream()
        source = asyncio.ensure_future(self.events(name, stream))

        def close() -> None:
            self.closes += 1
            source.cancel()

        stream.on_close = close
        return stream

    async def stream(self, request: Request) -> Response:
        try:
            return await self.make(request.path_params["name"]).begin(request)
        except ApiError as error:
            return error.response()

    async def dropped(self, request: Request) -> Response:
        """Something between the handler and the response goes wrong."""
        await self.stream(request)
        return PlainTextResponse("something else")

    async def work(self, request: Request) -> Response:
        async def forever() -> None:
            self.working.set()
            try:
                await asyncio.sleep(60)
            finally:
                self.worked.set()

        try:
            await while_connected(request, forever())
        except ClientGone:
            return Response(status_code=499)
        return PlainTextResponse("done")


@pytest.fixture
def site() -> Site:
    return Site()


@pytest.fixture
def url(site: Site, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(event_stream, "KEEP_ALIVE_S", 0.1)
    with serving(site.app) as url:
        yield url


def test_a_refusal_right_behind_the_first_event_is_a_status_too() -> None:
    """One choice of a request has begun, and the next one finds the queue full, before anything was sent."""

    async def begin() -> None:
        async with contextlib.AsyncExitStack() as stack:
            stream = EventStream()
            stream.push(b"data: 1\n\n")
            stream.fail(unavailable("full"), b"data: full\n\n")
            request = Request({"type": "http", EXCHANGE: stack}, receive=asyncio.Event().wait)  # type: ignore[arg-type]
            await stream.begin(request, patient=True)

    with pytest.raises(ApiError, match="full"):
        asyncio.run(begin())


@pytest.mark.parametrize("patient", [True, False])
def test_where_a_refusal_may_come_late_the_status_waits_for_it(patient: bool) -> None:
    async def begin() -> EventStream:
        async with contextlib.AsyncExitStack() as stack:
            stream = EventStream()
            asyncio.get_running_loop().call_later(3 * event_stream.FIRST_EVENT_S, stream.fail, unavailable("full"), b"")
            request = Request({"type": "http", EXCHANGE: stack}, receive=asyncio.Event().wait)  # type: ignore[arg-type]
            return await stream.begin(request, patient=patient)

    if patient:
        with pytest.raises(ApiError, match="full"):
            asyncio.run(begin())
    else:
        assert asyncio.run(begin()).begun


def test_an_idle_stream_is_kept_open_by_comments_between_its_events(url: str) -> None:
    text = httpx.get(f"{url}/stream/slow").text
    first, *comments, second, end = text.split("\n\n")
    assert (first, second, end) == ("data: 1", "data: 2", "")
    assert 2 <= len(comments) <= 6
    assert set(comments) == {": keep-alive"}


def test_a_stream_opens_before_its_first_event_and_is_kept_open_until_then(url: str) -> None:
    with httpx.stream("GET", f"{url}/stream/late") as response:
        lines = [line for line in response.iter_lines() if line]
    assert (response.status_code, response.headers["content-type"].split(";")[0]) == (200, "text/event-stream")
    assert lines[0] == ": keep-alive"
    assert lines[-1] == "data: 1"


def test_no_event_has_a_character_but_line_ends_at_which_clients_cut_lines(url: str) -> None:
    with httpx.stream("GET", f"{url}/stream/cutting") as response:
        lines = [line for line in response.iter_lines() if line and not line.startswith(":")]
    assert lines == ["data: \\u2028 and \\u2029 and \\u0085 and — \u00e5"] * 3


def test_nor_have_parts_that_are_made_while_the_client_takes_them(url: str) -> None:
    written: list[bytes] = []

    async def send(message: Message) -> None:
        written.append(message.get("body", b""))

    async def scenario() -> None:
        stream = EventStream(iter([b'data: "', "\u2028".encode(), b'"\n\n']))
        stream.end(CUTTING.encode())
        await stream({"type": "http"}, asyncio.Event().wait, send)  # type: ignore[arg-type]

    asyncio.run(scenario())
    assert b"".join(written).decode().splitlines() == ['data: "\\u2028"', "", "data: \\u2028 and \\u2029 and \\u0085 and — \u00e5", ""]


def test_a_refusal_that_comes_within_moments_has_a_status_of_its_own(url: str, site: Site) -> None:
    response = httpx.get(f"{url}/stream/refused")
    assert (response.status_code, response.headers["retry-after"]) == (503, "5")
    assert response.json()["error"]["message"] == "not here"
    eventually(lambda: (site.closes, site.generators) == (1, 0))


def test_an_error_after_the_status_is_the_last_event(url: str, site: Site) -> None:
    response = httpx.get(f"{url}/stream/refused_late")
    assert response.status_code == 200
    *_, error, done, end = response.text.split("\n\n")
    assert (error, done, end) == ("data: not any longer", "data: [DONE]", "")
    eventually(lambda: (site.closes, site.generators) == (1, 0))


@pytest.mark.parametrize("name", ["slow", "late", "empty"])
def test_a_stream_that_is_read_to_its_end_is_closed_once(url: str, site: Site, name: str) -> None:
    assert httpx.get(f"{url}/stream/{name}").status_code == 200
    eventually(lambda: (site.closes, site.generators) == (1, 0))


@pytest.mark.parametrize("name", ["endless", "silent"])
def test_a_client_that_goes_away_ends_the_stream(url: str, site: Site, name: str) -> None:
    with RawClient(url) as client:
        client.send(head("GET", f"/stream/{name}"))
        client.until(b"\r\n\r\n")
    eventually(lambda: (site.closes, site.generators) == (1, 0), 20)


def test_a_client_that_goes_away_before_the_stream_opens_ends_it(url: str, site: Site) -> None:
    for _ in range(20):
        with RawClient(url) as client:
            client.send(head("GET", "/stream/endless"))
    eventually(lambda: site.closes == 20 and site.generators == 0, 20)


@pytest.mark.parametrize("name", ["slow", "silent"])
def test_a_stream_whose_response_is_never_called_is_closed_with_its_request(url: str, site: Site, name: str) -> None:
    assert httpx.get(f"{url}/dropped/{name}").text == "something else"
    eventually(lambda: (site.closes, site.generators) == (1, 0))


@pytest.mark.parametrize("size", [0, 1_000, 100_000])
def test_a_client_that_leaves_behind_a_body_that_nobody_reads_ends_the_work(url: str, site: Site, size: int) -> None:
    with RawClient(url) as client:
        client.send(head("GET", "/work", f"Content-Length: {size}") + bytes(size))
        assert site.working.wait(20)
    assert site.worked.wait(20)


@pytest.mark.parametrize("reset", [False, True])
def test_a_client_that_leaves_behind_a_large_request_that_waits_for_its_turn_ends_the_work(url: str, site: Site, reset: bool) -> None:
    client = RawClient(url)
    client.send(head("GET", "/work"))
    assert site.working.wait(20)
    client.send(head("POST", "/work", "Content-Length: 5000000") + bytes(100_000))  # more than is read, and less than the system takes
    time.sleep(0.2)
    if reset:
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.socket.close()
    assert site.worked.wait(20)


def test_a_silent_stream_is_looked_at_about_as_often_as_it_is_told_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "KEEP_ALIVE_S", 0.1)
    looks: list[float] = []
    look = EventStream._keep_alive

    def counted(stream: EventStream) -> None:
        looks.append(time.monotonic())
        look(stream)

    monkeypatch.setattr(EventStream, "_keep_alive", counted)
    site = Site()
    with serving(site.app) as url, RawClient(url) as client:
        client.send(head("GET", "/stream/silent"))
        for _ in range(5):
            client.until(b": keep-alive")
    assert len(looks) <= 1 + 2 * 6, "a timer that comes a moment early must not be set again and again until it is time"


class Held:
    """Stands for what a request holds, such as a body of many megabytes."""


def test_a_request_that_is_refused_leaves_nothing_to_the_garbage_collector() -> None:
    async def planned(held: Held) -> None:
        await asyncio.sleep(0)
        raise unavailable("not here")

    async def worked(request: Request) -> weakref.ref[Held]:
        held = Held()
        with contextlib.suppress(ApiError):
            await while_connected(request, planned(held))
        return weakref.ref(held)

    async def streamed(request: Request) -> weakref.ref[Held]:
        held = Held()
        stream = EventStream()
        stream.on_close = functools.partial(id, held)  # which holds the generations
        stream.fail(unavailable("not here"), b"")
        with contextlib.suppress(ApiError):
            await stream.begin(request)
        return weakref.ref(held)

    async def scenario() -> list[Held | None]:
        async def nothing() -> Message:
            await asyncio.sleep(60)
            raise AssertionError

        held = []
        for way in (worked, streamed):
            async with contextlib.AsyncExitStack() as stack:
                scope = {"type": "http", "method": "POST", "path": "/", "headers": [], EXCHANGE: stack}
                held.append(await way(Request(scope, nothing)))
            del scope
            await asyncio.sleep(0.01)
        return [each() for each in held]

    gc.disable()
    try:
        assert asyncio.run(scenario()) == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("step", ["begin", "start", "first event", "waiting"])
def test_a_request_that_is_cancelled_at_any_moment_closes_its_stream_once(step: str) -> None:
    """As the server does with what is still running when its time is over."""
    site = Site()

    async def scenario() -> None:
        reached = asyncio.Event()

        async def block() -> None:
            reached.set()
            await asyncio.sleep(60)

        async def receive() -> Message:
            await asyncio.sleep(60)
            raise AssertionError

        async def send(message: Message) -> None:
            at = {"http.response.start": "start", "http.response.body": "first event"}[message["type"]]
            if at == step:
                await block()

        async def handle(scope: Scope, receive: Receive, send: Send) -> None:
            if step == "begin":
                asyncio.get_running_loop().call_later(event_stream.FIRST_EVENT_S / 5, reached.set)
            response = await site.make("silent" if step == "begin" else "endless").begin(Request(scope))
            if step == "waiting":
                asyncio.get_running_loop().call_later(0.1, reached.set)
            await response(scope, receive, send)

        scope: dict[str, Any] = {"type": "http", "method": "GET", "path": "/", "headers": []}
        whole: Awaitable[None] = Exchange(handle)(scope, receive, send)
        task = asyncio.ensure_future(whole)
        await asyncio.wait_for(reached.wait(), 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while site.generators:  # noqa: ASYNC110  it has been cancelled
            await asyncio.sleep(0)
        assert site.closes == 1

    asyncio.run(scenario())


def test_a_slow_client_gets_everything_in_order_and_nobody_waits_for_it(site: Site) -> None:
    """What it does not take gathers in the stream, and leaves as soon as it reads on."""
    lines = [f"data: {number:06d}{'x' * 4000}\n\n".encode() for number in range(5000)]
    pushed = threading.Event()

    async def flood(request: Request) -> Response:
        stream = EventStream()

        async def push() -> None:
            await asyncio.sleep(0.1)
            for line in lines:
                stream.push(line)
            stream.end(b"")
            pushed.set()

        site.pushing = asyncio.ensure_future(push())  # type: ignore[attr-defined]
        return await stream.begin(request)

    site.app.router.routes.append(Route("/flood", flood))
    with serving(site.app) as url, httpx.stream("GET", f"{url}/flood") as response:
        assert pushed.wait(5)
        assert response.read() == b"".join(lines)


def test_work_that_fails_in_the_moment_in_which_it_is_given_up_leaves_no_complaint() -> None:
    complaints: list[dict[str, Any]] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, complaint: complaints.append(complaint))

        async def failing() -> None:
            whole.cancel()
            raise unavailable("not here")

        async def silent() -> Message:
            await asyncio.Event().wait()
            raise AssertionError

        whole = asyncio.ensure_future(while_connected(Request({"type": "http"}, silent), failing()))
        with pytest.raises(ApiError, match="not here"):
            await whole
        gc.collect()

    asyncio.run(run())
    assert not complaints

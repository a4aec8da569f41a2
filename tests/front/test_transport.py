"""Event streams over a real socket: they open at once, stay open, and whatever way they end, what they hold ends too."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
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

from banyan_runtime.front import transport
from banyan_runtime.front.errors import ApiError, ClientGone, unavailable
from banyan_runtime.front.transport import EventStream, Exchange, while_connected
from tests.server.raw import RawClient, eventually, head, serving

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


async def broken() -> AsyncGenerator[bytes, None]:
    yield b"data: 1\n\n"
    raise RuntimeError("a bug")


async def empty() -> AsyncGenerator[bytes, None]:
    return
    yield b""


STREAMS: dict[str, Events] = {
    events.__name__: events for events in (slow, late, endless, silent, refused, refused_late, broken, empty)
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

    def close(self) -> None:
        self.closes += 1

    async def events(self, name: str) -> AsyncGenerator[bytes, None]:
        self.generators += 1
        try:
            async with contextlib.aclosing(STREAMS[name]()) as events:
                async for event in events:
                    yield event
        finally:
            self.generators -= 1

    async def stream(self, request: Request) -> Response:
        try:
            return await EventStream.begin(request, self.events(request.path_params["name"]), close=self.close)
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
    monkeypatch.setattr(transport, "KEEP_ALIVE_S", 0.1)
    with serving(site.app) as url:
        yield url


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


def test_a_refusal_that_comes_within_moments_has_a_status_of_its_own(url: str, site: Site) -> None:
    response = httpx.get(f"{url}/stream/refused")
    assert (response.status_code, response.headers["retry-after"]) == (503, "5")
    assert response.json()["error"]["message"] == "not here"
    eventually(lambda: (site.closes, site.generators) == (1, 0))


@pytest.mark.parametrize(("name", "message"), [("refused_late", "not any longer"), ("broken", "Internal server error")])
def test_an_error_after_the_status_is_the_last_event(
    url: str, site: Site, name: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    response = httpx.get(f"{url}/stream/{name}")
    assert response.status_code == 200
    *_, error, done, end = response.text.split("\n\n")
    assert f'"message":"{message}"' in error
    assert (done, end) == ("data: [DONE]", "")
    assert ("RuntimeError: a bug" in caplog.text) == (name == "broken")
    eventually(lambda: (site.closes, site.generators) == (1, 0))


@pytest.mark.parametrize("name", ["slow", "late", "empty"])
def test_a_stream_that_is_read_to_its_end_is_closed_once(url: str, site: Site, name: str) -> None:
    assert httpx.get(f"{url}/stream/{name}").status_code == 200
    eventually(lambda: (site.closes, site.generators) == (1, 0))


@pytest.mark.parametrize("name", ["endless", "silent"])
@pytest.mark.parametrize("half_closes_first", [False, True])
def test_a_client_that_goes_away_ends_the_stream(
    url: str, site: Site, name: str, half_closes_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One that closes altogether is noticed at once; one that lived on for a while, with the next comment.
    monkeypatch.setattr(transport, "KEEP_ALIVE_S", 0.5 if half_closes_first else 60.0)
    with RawClient(url) as client:
        client.send(head("GET", f"/stream/{name}"))
        client.until(b"\r\n\r\n")
        if half_closes_first:
            client.end()
            client.until(b": keep-alive")
    eventually(lambda: (site.closes, site.generators) == (1, 0), 3)


def test_a_client_that_goes_away_before_the_stream_opens_ends_it(url: str, site: Site) -> None:
    for _ in range(20):
        with RawClient(url) as client:
            client.send(head("GET", "/stream/endless"))
    eventually(lambda: site.closes == 20 and site.generators == 0, 5)


@pytest.mark.parametrize("name", ["slow", "silent", "broken"])
def test_a_stream_whose_response_is_never_called_is_closed_with_its_request(url: str, site: Site, name: str) -> None:
    assert httpx.get(f"{url}/dropped/{name}").text == "something else"
    eventually(lambda: (site.closes, site.generators) == (1, 0))


@pytest.mark.parametrize("half_closes_first", [False, True])
def test_a_client_that_goes_away_ends_the_work(url: str, site: Site, half_closes_first: bool) -> None:
    with RawClient(url) as client:
        client.send(head("GET", "/work"))
        assert site.working.wait(5)
        if half_closes_first:
            client.end()
            time.sleep(0.4)
            assert not site.worked.is_set()
    assert site.worked.wait(3)


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
            events = site.events("silent" if step == "begin" else "endless")
            if step == "begin":
                asyncio.get_running_loop().call_later(transport.FIRST_EVENT_S / 5, reached.set)
            response = await EventStream.begin(Request(scope), events, close=site.close)
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
        assert (site.closes, site.generators) == (1, 0)

    asyncio.run(scenario())

"""Event streams over a real socket: idle connections stay open, and a client that goes away ends the work."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Iterator

import httpx2 as httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from banyan_runtime.front import transport
from banyan_runtime.front.errors import ClientGone
from banyan_runtime.front.transport import EventStream, while_connected


class Site:
    """A small application on a free port."""

    def __init__(self) -> None:
        self.closed = threading.Event()
        routes = [Route("/slow", self.slow), Route("/endless", self.endless), Route("/work", self.work)]
        self._server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), port=0, log_level="error", lifespan="off"))
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        while not self._server.started:
            self._thread.join(0.01)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)

    async def slow(self, request: Request) -> Response:
        async def events() -> AsyncGenerator[bytes, None]:
            yield b"data: 1\n\n"
            await asyncio.sleep(0.5)
            yield b"data: 2\n\n"

        return EventStream(events())

    async def endless(self, request: Request) -> Response:
        async def events() -> AsyncGenerator[bytes, None]:
            try:
                yield b"data: 1\n\n"
                await asyncio.sleep(60)
            finally:
                self.closed.set()

        return EventStream(events())

    async def work(self, request: Request) -> Response:
        async def forever() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                self.closed.set()

        try:
            await while_connected(request, forever())
        except ClientGone:
            return Response(status_code=499)
        return PlainTextResponse("done")


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(transport, "KEEP_ALIVE_S", 0.1)
    site = Site()
    yield site
    site.stop()


def test_an_idle_stream_is_kept_open_by_comments_between_its_events(site: Site) -> None:
    text = httpx.get(f"{site.url}/slow").text
    first, *comments, second, end = text.split("\n\n")
    assert (first, second, end) == ("data: 1", "data: 2", "")
    assert 2 <= len(comments) <= 6
    assert set(comments) == {": keep-alive"}


@pytest.mark.parametrize("path", ["/endless", "/work"])
def test_a_client_that_goes_away_ends_the_work_at_once(site: Site, path: str) -> None:
    with contextlib.suppress(httpx.ReadTimeout), httpx.stream("GET", site.url + path, timeout=0.3) as response:
        next(response.iter_bytes())
    assert site.closed.wait(1)

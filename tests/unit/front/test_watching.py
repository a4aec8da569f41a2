"""Hearing of a client's end, and what is left behind it: on kept connections, behind swallowed cancellations, of requests that are over."""

from __future__ import annotations

import asyncio
import contextlib
import gc

import httpx2 as httpx
import pytest
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from banyan_runtime.front import transport
from banyan_runtime.front.errors import ClientGone, unavailable
from banyan_runtime.front.transport import while_connected
from tests.support.server.raw import RawClient, head, serving


def test_who_watches_beyond_the_answer_costs_the_next_request_on_the_connection_nothing() -> None:
    told: list[str] = []

    class Lingering(Response):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            forget = transport.watch(scope, receive, lambda: told.append("gone"))
            await super().__call__(scope, receive, send)
            await asyncio.sleep(0.5)
            forget()

    async def count(request: Request) -> Response:
        return Lingering(str(len(await request.body())))

    with serving(Starlette(routes=[Route("/count", count, methods=["POST"])])) as url, RawClient(url) as client:
        for size in (10, 100_000, 20):
            client.send(head("POST", "/count", f"Content-Length: {size}") + bytes(size))
            assert client.until(b"\r\n\r\n" + str(size).encode())
        client.end()
        client.rest()
    assert told == [], "it is not theirs any longer"


def test_a_handler_that_returns_late_does_not_end_the_next_request_on_the_connection() -> None:
    async def slow(request: Request) -> Response:
        await asyncio.sleep(0.2)
        await while_connected(request, asyncio.sleep(0.01))
        return PlainTextResponse("done", background=BackgroundTask(asyncio.sleep, 0.1))

    with serving(Starlette(routes=[Route("/slow", slow)])) as url, RawClient(url) as client:
        client.send(head("GET", "/slow") + head("GET", "/slow", "Connection: close"))
        assert client.rest().count(b"HTTP/1.1 200") == 2


def test_work_that_makes_something_else_of_being_cancelled_is_given_up_all_the_same() -> None:
    async def stubborn() -> str:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        return "done"

    async def failing() -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise unavailable("not here") from None
        return "done"

    async def leaving() -> Message:
        await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    async def scenario() -> None:
        task = asyncio.current_task()
        assert task is not None
        for work in (stubborn, failing):
            with pytest.raises(ClientGone):
                await while_connected(Request({"type": "http"}, leaving), work())
            assert not task.cancelling(), "whoever limits the time would take it for another's"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await asyncio.sleep(60)

    asyncio.run(scenario())


def test_who_has_forgotten_the_client_hears_nothing_though_its_end_was_noticed_before() -> None:
    async def scenario() -> list[str]:
        told: list[str] = []

        async def leaving() -> Message:
            return {"type": "http.disconnect"}

        forget = transport.watch({"type": "http"}, leaving, lambda: told.append("gone"))
        await asyncio.sleep(0)  # it has ended by now, and its callback is on its way
        forget()
        await asyncio.sleep(0.01)
        return told

    assert asyncio.run(scenario()) == []


def test_a_request_leaves_nothing_of_its_body_to_the_garbage_collector() -> None:
    async def passed_by(request: Request) -> Response:
        return PlainTextResponse("not here", 404)

    gc.collect()
    gc.disable()
    try:
        with serving(Starlette(routes=[Route("/none", passed_by, methods=["POST"])])) as url, httpx.Client() as client:
            for _ in range(20):
                assert client.post(f"{url}/none", content=bytes(60_000)).status_code == 404
            left = [each for each in gc.get_objects() if type(each).__name__ == "RequestResponseCycle"]
            assert len(left) <= 2, "that of the connection, and one that is just ending"
    finally:
        gc.enable()

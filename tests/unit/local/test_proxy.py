"""The proxy of a server: turns, streams, dead replicas, and what a client hears when nothing is ready."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import aiohttp

from banyan_operator.local.ports import FIRST, HOST, LAST, Ports
from banyan_operator.local.proxy import Proxy


async def backend(name: bytes, *, gone: asyncio.Event | None = None) -> tuple[asyncio.Server, int]:
    """A server that answers with its name; with `gone` it streams until the client leaves, and says when it noticed."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if gone is None:
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(name), name))
            writer.close()
            return
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        writer.write(b"data: one\n\n")
        await writer.drain()
        assert await reader.read() == b""
        gone.set()
        writer.close()

    server = await asyncio.start_server(answer, HOST, 0)
    return server, server.sockets[0].getsockname()[1]


def with_proxy(work: Callable[[Proxy, aiohttp.ClientSession], Awaitable[None]]) -> None:
    async def life() -> None:
        proxy = Proxy("chat", Ports().listen("a test"))
        await proxy.start()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
            try:
                await work(proxy, session)
            finally:
                await proxy.close()

    asyncio.run(life())


async def get(session: aiohttp.ClientSession, proxy: Proxy) -> str:
    async with session.get(f"http://{HOST}:{proxy.port}/") as response:
        return await response.text()


def test_connections_go_to_the_ready_pods_in_turn() -> None:
    async def work(proxy: Proxy, session: aiohttp.ClientSession) -> None:
        (_one, one), (_two, two) = await backend(b"one"), await backend(b"two")
        proxy.targets = [one, two]
        assert sorted([await get(session, proxy) for _ in range(4)]) == ["one", "one", "two", "two"]

    with_proxy(work)


def test_a_backend_that_refuses_is_passed_over() -> None:
    async def work(proxy: Proxy, session: aiohttp.ClientSession) -> None:
        (_one, one), (gone, two) = await backend(b"one"), await backend(b"two")
        gone.close()
        await gone.wait_closed()
        proxy.targets = [two, one]
        assert [await get(session, proxy) for _ in range(3)] == ["one"] * 3

    with_proxy(work)


def test_without_a_ready_pod_the_client_hears_503_with_a_reason_it_can_read() -> None:
    async def work(proxy: Proxy, session: aiohttp.ClientSession) -> None:
        async with session.get(f"http://{HOST}:{proxy.port}/v1/models") as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "1"
            assert "no replica of 'chat' is ready" in json.loads(await response.text())["error"]["message"]

    with_proxy(work)


def test_a_client_that_leaves_a_stream_is_noticed_by_the_backend() -> None:
    async def work(proxy: Proxy, session: aiohttp.ClientSession) -> None:
        gone = asyncio.Event()
        _server, port = await backend(b"", gone=gone)
        proxy.targets = [port]
        response = await session.get(f"http://{HOST}:{proxy.port}/")
        assert await response.content.readline() == b"data: one\n"
        response.close()
        await asyncio.wait_for(gone.wait(), 5)

    with_proxy(work)


def test_the_same_purpose_gets_the_same_port_and_a_taken_one_is_left_alone() -> None:
    first = Ports().listen("a test")
    port: int = first.getsockname()[1]
    assert FIRST <= port <= LAST
    with Ports().listen("a test") as second:
        assert second.getsockname()[1] != port
        assert Ports().take("a test") not in (port, second.getsockname()[1])
    first.close()
    with Ports().listen("a test") as again:
        assert again.getsockname()[1] == port

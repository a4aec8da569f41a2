"""What one line costs the client: requests a second and CPU microseconds a request, of a plain aiohttp session, of the batch's
`Client` and of a whole `Sender`, against a server process that answers at once.

    python benchmarks/batch_client.py [--requests 20000] [--concurrency 64] [--rounds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import multiprocessing.connection
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import cast

import aiohttp
import uvloop

from banyan_runtime.batch.client import Client
from banyan_runtime.batch.sender import Expected, Sender, Target

PATH = "/v1/chat/completions"
REQUEST = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 900}], "max_tokens": 64}).encode()
CONTENT = {"role": "assistant", "content": "y" * 1200}
USAGE = {"prompt_tokens": 200, "completion_tokens": 64, "total_tokens": 264, "prompt_tokens_details": {"cached_tokens": 0}}
ANSWER = json.dumps({"id": "chatcmpl-1", "choices": [{"index": 0, "message": CONTENT, "finish_reason": "stop"}], "usage": USAGE}).encode()
HEAD = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nx-request-id: r-1\r\ncontent-length: {len(ANSWER)}\r\n\r\n".encode()


class AtOnce(asyncio.Protocol):
    """Answers each request as soon as its last byte is there; knows nothing of HTTP but lengths."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._data = bytearray()

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._data[:end]).lower()
            at = head.find(b"content-length: ")
            length = int(head[at + 16 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._data) < end + 4 + length:
                return
            del self._data[: end + 4 + length]
            self._transport.write(HEAD + ANSWER)


def serve(port: multiprocessing.connection.Connection) -> None:
    async def run() -> None:
        server = await asyncio.get_running_loop().create_server(AtOnce, "127.0.0.1", 0, backlog=4096)
        port.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    uvloop.run(run())


async def many(requests: int, concurrency: int, one: Callable[[int], Awaitable[object]]) -> tuple[float, float]:
    """Requests a second, and CPU microseconds a request, of `requests` calls of which `concurrency` run at a time."""
    numbers = iter(range(requests))

    async def work() -> None:
        for number in numbers:
            await one(number)

    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(work() for _ in range(concurrency)))
    return requests / (time.perf_counter() - began), (time.process_time() - cpu) / requests * 1e6


async def plain(url: str, requests: int, concurrency: int) -> tuple[float, float]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(_: int) -> None:
            async with session.post(url + PATH, data=REQUEST, headers={"Content-Type": "application/json"}) as response:
                assert len(await response.read()) == len(ANSWER)

        return await many(requests, concurrency, one)


async def client(url: str, requests: int, concurrency: int) -> tuple[float, float]:
    async with Client(url, PATH, api_key=None, timeout_s=60) as posts:

        async def one(_: int) -> None:
            await posts.post(REQUEST, "127.0.0.1")

        return await many(requests, concurrency, one)


async def sender(url: str, requests: int, concurrency: int) -> tuple[float, float]:
    async with Sender(Target(url, PATH, max_concurrency=concurrency), Expected(requests)) as sends:
        return await many(requests, concurrency, lambda number: sends.send(REQUEST, key=b"", order=number))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{ours.recv()}"
    measured: dict[str, list[tuple[float, float]]] = {}
    for _ in range(options.rounds):  # interleaved, so that a busy machine is unkind to all alike
        for kind in (plain, client, sender):
            measured.setdefault(kind.__name__, []).append(uvloop.run(kind(url, options.requests, options.concurrency)))
    for name, results in measured.items():
        rate, cpu = (statistics.median(column) for column in zip(*results, strict=True))
        print(f"{'aiohttp' if name == 'plain' else name:12} {rate:8.0f} requests/s {cpu:7.1f} us CPU/request")
    server.kill()


if __name__ == "__main__":
    main()

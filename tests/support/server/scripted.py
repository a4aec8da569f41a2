"""A real HTTP server whose answers are scripted: what a line's prompt says is what it does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from aiohttp import web

Handler = Callable[[web.Request, dict[str, Any], str, int], Awaitable[web.StreamResponse]]


class ScriptedServer:
    """Answers chat completions. `tries` counts requests by prompt; `peak` is the most that were open at once."""

    def __init__(self) -> None:
        self.tries: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.ready: dict[str, Any] | None = None  # None: ready
        self.api_key: str | None = None
        self.model = "scripted"
        self.delay_s = 0.0
        self.limit = 10_000  # open requests; beyond: 429
        self.open = self.peak = 0
        self.probes = 0  # of /readyz
        self.handler: Handler = obey
        self.url = ""

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        if self.api_key and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return problem(401, "Incorrect API key provided.", "invalid_api_key")
        if body.get("model", self.model) != self.model:
            return problem(404, f"The model `{body['model']}` does not exist.", "model_not_found")
        prompt = body["messages"][0]["content"]
        self.tries[prompt] += 1
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        if self.open >= self.limit:
            return problem(429, "Too many requests.", "rate_limit_exceeded")
        self.open += 1
        self.peak = max(self.peak, self.open)
        try:
            await asyncio.sleep(self.delay_s)
            return await self.handler(request, body, prompt, self.tries[prompt])
        finally:
            self.open -= 1

    async def _readyz(self, _: web.Request) -> web.Response:
        self.probes += 1
        return web.json_response(self.ready or {"state": "ready", "percent": 100, "detail": ""}, status=503 if self.ready else 200)

    @contextlib.contextmanager
    def running(self) -> Iterator[ScriptedServer]:
        loop = asyncio.new_event_loop()
        app = web.Application(client_max_size=64 << 20)
        app.add_routes([web.post("/v1/chat/completions", self._complete), web.get("/readyz", self._readyz)])
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)

        async def start() -> int:
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
            return int(runner.addresses[0][1])

        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        self.url = f"http://127.0.0.1:{asyncio.run_coroutine_threadsafe(start(), loop).result()}"
        try:
            yield self
        finally:
            asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()


async def obey(request: web.Request, body: dict[str, Any], prompt: str, attempt: int) -> web.StreamResponse:
    """Do what the prompt says: 'status 500 twice' fails two times and then passes; 'cut', 'slow 0.3', 'nonsense' likewise."""
    words = prompt.split()
    times = {"once": 1, "twice": 2, "always": 10**9}.get(words[-1], 10**9)
    if attempt > times:
        return completion(prompt)
    match words:
        case ["status", status, *_]:
            return problem(int(status), f"scripted {status}", None, {"Retry-After": "0"} if status in ("429", "503") else {})
        case ["cut", *_]:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        case ["nonsense", *_]:
            return web.Response(text="<html>not JSON</html>")
        case ["page", *_]:
            return web.Response(text="<html>bad gateway</html>", status=400)
        case ["slow", seconds, *_]:
            await asyncio.sleep(float(seconds))
        case ["pretty", *_]:
            return web.Response(text=json.dumps({"id": "x", "spaced": [1, 2]}, indent=2), content_type="application/json")
    return completion(prompt)


def completion(prompt: str) -> web.Response:
    answer = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": f"You said: {prompt}"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8, "prompt_tokens_details": {"cached_tokens": 2}},
    }
    return web.json_response(answer, headers={"X-Request-Id": "req-1"})


def problem(status: int, message: str, code: str | None, headers: dict[str, str] | None = None) -> web.Response:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return web.json_response({"error": error}, status=status, headers=headers)


def line(custom_id: str, prompt: str, **more: Any) -> str:
    """One line of a batch, whose prompt says what the scripted server does."""
    body = {"messages": [{"role": "user", "content": prompt}]}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body} | more)


@pytest.fixture(name="server")
def scripted_server() -> Iterator[ScriptedServer]:
    with ScriptedServer().running() as scripted:
        yield scripted

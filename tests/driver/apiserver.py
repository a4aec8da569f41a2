"""An API server small enough to break on purpose: objects by path, resource versions, and answers that a test can replace."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from kubernetes.aio import client as kube

from banyan_operator.cluster.client import Api, TokenBucket


@dataclass
class Call:
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: Any


@dataclass
class ApiServer:
    """Stores what is created and patched; a PUT with an old resourceVersion gets 409."""

    objects: dict[str, dict[str, Any]] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    answer: Callable[[Call], web.Response | None] = field(default=lambda _: None)
    revision: int = 100

    async def handle(self, request: web.Request) -> web.Response:
        raw = await request.read()
        call = Call(request.method, request.path, dict(request.query), dict(request.headers), json.loads(raw) if raw else None)
        self.calls.append(call)
        if (scripted := self.answer(call)) is not None:
            return scripted
        known = self.objects.get(call.path.removesuffix("/status"))
        match call.method:
            case "GET":
                return web.json_response(known) if known is not None else refusal(404, "NotFound", f"{call.path} not found")
            case "POST":
                place = f"{call.path}/{call.body['metadata']['name']}"
                return refusal(409, "AlreadyExists", "exists") if place in self.objects else self.store(place, call.body, 201)
            case "PUT":
                if known is None:
                    return refusal(404, "NotFound", "not found")
                if call.body["metadata"].get("resourceVersion") != known["metadata"]["resourceVersion"]:
                    return refusal(409, "Conflict", "the object has been modified")
                return self.store(call.path, call.body, 200)
            case "PATCH":
                return self.store(call.path.removesuffix("/status"), (known or {}) | call.body, 200)
        self.objects.pop(call.path, None)
        return web.json_response({"kind": "Status", "status": "Success"})

    def store(self, place: str, manifest: dict[str, Any], status: int) -> web.Response:
        self.revision += 1
        kept = {**manifest, "metadata": {**manifest.get("metadata", {}), "resourceVersion": str(self.revision)}}
        self.objects[place] = kept
        return web.json_response(kept, status=status)


def refusal(status: int, reason: str, message: str, causes: list[dict[str, str]] | None = None) -> web.Response:
    body = {"kind": "Status", "status": "Failure", "reason": reason, "message": message, "details": {"causes": causes or []}}
    return web.json_response(body, status=status)


@asynccontextmanager
async def serving(server: ApiServer) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def connected(server: ApiServer, writes: TokenBucket | None = None) -> AsyncIterator[Api]:
    """A client of `server`."""
    async with serving(server) as url:
        api = Api.of(kube.Configuration(host=url), lambda *_: None, writes)
        try:
            yield api
        finally:
            await api.close()

"""The API server of `apiserver.py` over HTTP, small enough to break on purpose: routes, lists, watches, discovery, and answers that a
test can replace."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from kubernetes.aio import client as kube

from banyan_operator.cluster.client import Api, ApiError, TokenBucket
from banyan_operator.cluster.connection import Connection
from banyan_operator.kube import kinds
from banyan_operator.kube.objects import Key, key_of
from tests.support.kube.apiserver import EPOCH, Server, merged

Manifest = dict[str, Any]


@dataclass
class Call:
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: Any

    @property
    def watches(self) -> bool:
        return "watch" in self.query


class RealTime:
    """The clock of the machine. No garbage is collected: what goes, and when, is for a test to say."""

    @property
    def now(self) -> float:
        return time.time() - EPOCH

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any) -> None:
        pass


class Objects(Mapping[str, Manifest]):
    """The objects of a server by their paths."""

    def __init__(self, kept: Server) -> None:
        self._kept = kept

    def __getitem__(self, path: str) -> Manifest:
        return self._kept.objects[Place.of(path).key]

    def __iter__(self) -> Iterator[str]:
        return (_KINDS[key.kind].path(key.namespace, key.name) for key in list(self._kept.objects))

    def __len__(self) -> int:
        return len(self._kept.objects)


@dataclass(frozen=True)
class Place:
    """What a path names: an object, or (name "") those of a namespace, or (namespace "") those of all."""

    kind: kinds.Kind
    namespace: str
    name: str
    subresource: str

    @property
    def key(self) -> Key:
        return Key(self.kind.kind, self.namespace, self.name)

    @staticmethod
    def of(path: str) -> Place:
        """A KeyError where no kind of ours lies there."""
        before, _, after = path.partition("/namespaces/")
        namespace, _, rest = after.partition("/")
        plural, _, rest = rest.partition("/")
        name, _, subresource = rest.partition("/")
        return Place(_COLLECTIONS[f"{before}/{plural}" if plural else before], namespace, name, subresource)

    def holds(self, manifest: Manifest) -> bool:
        return manifest["kind"] == self.kind.kind and self.namespace in ("", manifest["metadata"]["namespace"])


@dataclass
class ApiServer:
    """Routes to the objects that it keeps; uid, generation, versions and refusals are those of `Server`."""

    calls: list[Call] = field(default_factory=list)
    answer: Callable[[Call], web.Response | None] = field(default=lambda _: None)
    silent: bool = False  # takes requests, and never answers (for the rest of its life)
    deaf_watches: bool = False  # watches show nothing: what has happened is missed for good
    withdrawn: set[kinds.Kind] = field(default_factory=set)  # kinds whose definition was deleted; see `withdraw`
    unlisted: set[kinds.Kind] = field(default_factory=set)  # kinds that are served, but not yet told to be
    _log: list[tuple[int, str, Manifest]] = field(default_factory=list)  # (version, type, object), for watches
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.kept = Server(RealTime(), random.Random(0))
        self.kept.changes.append(self._changed)
        self.objects = Objects(self.kept)

    # --- what tests do ---

    def store(self, path: str, manifest: Manifest) -> Manifest:
        """Somebody writes this object, or all of it anew."""
        place = Place.of(path)
        meta = {**manifest.get("metadata", {}), "name": place.name, "namespace": place.namespace}
        return self.kept.put({**manifest, "apiVersion": place.kind.api_version, "kind": place.kind.kind, "metadata": meta})

    def remove(self, path: str) -> None:
        """Somebody deletes this object, and it is gone at once."""
        self.kept.remove(key_of(self.objects[path]))

    @property
    def revision(self) -> int:
        return self.kept.version

    def interrupt_watches(self, code: int, reason: str, kind: kinds.Kind | None = None) -> None:
        """Each watch, or each one of `kind`, shows an ERROR event."""
        told: Manifest = {"kind": "Status", "status": "Failure", "reason": reason, "code": code, "message": reason}
        self.kept.version += 1
        self._tell("ERROR", told if kind is None else {**told, "details": {"kind": kind.plural}})

    def withdraw(self, kind: kinds.Kind) -> None:
        """Its CustomResourceDefinition is deleted: its objects go, its watches end, and nothing of it is served any more."""
        for one in self.kept.of(kind):
            self.kept.remove(key_of(one))
        self.withdrawn.add(kind)
        self._wake()

    # --- requests ---

    async def handle(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        call = Call(
            request.method,
            request.path,
            dict(request.query),
            dict(request.headers),
            json.loads(raw) if raw else None,
        )
        self.calls.append(call)
        if self.silent:
            await asyncio.Event().wait()
        if (scripted := self.answer(call)) is not None:
            return scripted
        if call.method == "GET" and (found := _discovered(call.path, self.withdrawn | self.unlisted)) is not None:
            return web.json_response(found)
        try:
            place = Place.of(call.path)
        except KeyError:
            return not_found(call.path)
        if place.kind in self.withdrawn:
            return unserved()
        if call.method == "GET" and not place.name:
            return await self._watch(request, call, place) if call.watches else self._list(call, place)
        try:
            return web.json_response(self._one(call, place), status=201 if call.method == "POST" else 200)
        except ApiError as error:
            causes = [dict(zip(("field", "message"), cause.split(": ", 1), strict=True)) for cause in error.causes]
            return refusal(error.status, error.reason, error.message, causes)

    def _one(self, call: Call, place: Place) -> Manifest:
        key, body = place.key, call.body or {}
        meta = body.get("metadata") or {}
        if call.method == "POST":
            whole = {"apiVersion": place.kind.api_version, "kind": place.kind.kind, **body}
            return self.kept.create({**whole, "metadata": {**meta, "namespace": place.namespace}})
        if call.method == "PATCH" and "apply-patch" in call.headers["Content-Type"]:
            return self.kept.apply(body)
        known = self.kept.get(key)
        if known is None:
            raise ApiError(404, "NotFound", f"{call.path} not found")
        if call.method != "GET" and meta.get("resourceVersion") not in (None, known["metadata"]["resourceVersion"]):
            raise ApiError(409, "Conflict", "the object has been modified")
        match call.method:
            case "DELETE":
                foreground = body.get("propagationPolicy") == "Foreground"
                self.kept.delete(key, (body.get("preconditions") or {}).get("uid"), foreground=foreground)
                return {"kind": "Status", "status": "Success"}
            case "PUT":
                return self.kept.put(body)
            case "PATCH" if place.subresource == "status":
                return self.kept.patch_status(key, body["status"], "")
            case "PATCH":
                self.kept.edit(key, lambda live: merged(live, body))
        return self.kept.objects[key]

    def _list(self, call: Call, place: Place) -> web.Response:
        items = [one for one in self.kept.of(place.kind) if place.holds(one) and _selected(one, call.query)]
        return web.json_response({"kind": "List", "metadata": {"resourceVersion": str(self.revision)}, "items": items})

    async def _watch(self, request: web.Request, call: Call, place: Place) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        told = int(call.query.get("resourceVersion") or self.revision)
        before: set[Key] = set()  # what the selector has shown
        deadline = asyncio.get_running_loop().time() + float(call.query.get("timeoutSeconds") or 3600)
        while (left := deadline - asyncio.get_running_loop().time()) > 0 and place.kind not in self.withdrawn:
            for version, type_, manifest in self._log[self._after(told) :]:
                told = version
                if type_ == "ERROR":
                    if (manifest.get("details") or {}).get("kind", place.kind.plural) != place.kind.plural:
                        continue
                elif not place.holds(manifest) or not (_selected(manifest, call.query) or key_of(manifest) in before):
                    continue
                elif _selected(manifest, call.query):
                    before.add(key_of(manifest))
                else:
                    type_ = "DELETED"
                    before.discard(key_of(manifest))
                if not self.deaf_watches:
                    await response.write(json.dumps({"type": type_, "object": manifest}).encode() + b"\n")
            try:
                async with asyncio.timeout(left):
                    await self._news.wait()
            except TimeoutError:
                break
        return response

    # --- news ---

    def _changed(self, before: Manifest | None, after: Manifest | None) -> None:
        if after is not None:
            self._tell("ADDED" if before is None else "MODIFIED", after)
        elif before is not None:
            self._tell("DELETED", {**before, "metadata": {**before["metadata"], "resourceVersion": str(self.revision)}})

    def _after(self, told: int) -> int:
        first = len(self._log)
        while first and self._log[first - 1][0] > told:
            first -= 1
        return first

    def _tell(self, type_: str, manifest: Manifest) -> None:
        self._log.append((self.revision, type_, manifest))
        self._wake()

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


def refusal(status: int, reason: str, message: str, causes: list[dict[str, str]] | None = None, **headers: str) -> web.Response:
    details = {"name": "x", "kind": "things", "causes": causes or []}
    body = {"kind": "Status", "status": "Failure", "reason": reason, "message": message, "details": details}
    return web.json_response(body, status=status, headers=headers)


def not_found(path: str) -> web.Response:
    return refusal(404, "NotFound", f"{path} not found")


def unserved() -> web.Response:
    """What the API server answers for a group that it does not have."""
    return web.Response(status=404, text="404 page not found\n")


_COLLECTIONS = {kind.path(None): kind for kind in kinds.TABLE}
_KINDS = {kind.kind: kind for kind in kinds.TABLE}


def _selected(manifest: Manifest, query: dict[str, str]) -> bool:
    labels = manifest["metadata"].get("labels") or {}
    wanted = [part.partition("=") for part in query.get("labelSelector", "").split(",") if part]
    return all(labels.get(name) == value for name, _, value in wanted)


def _discovered(path: str, hidden: Collection[kinds.Kind]) -> Manifest | None:
    groups = {kind.group for kind in kinds.TABLE if kind.group and not kind.optional}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        listed = []
        for group in sorted(groups):
            versions = [
                {"groupVersion": f"{group}/{v}", "version": v} for v in sorted({k.version for k in kinds.TABLE if k.group == group})
            ]
            listed.append({"name": group, "versions": versions, "preferredVersion": versions[0]})
        return {"kind": "APIGroupList", "groups": listed}
    for kind in kinds.TABLE:
        if path == kind.path(None).rpartition("/")[0] and not kind.optional:
            verbs = ["get", "list", "watch", "create", "patch", "delete"]
            found = [k for k in kinds.TABLE if (k.group, k.version) == (kind.group, kind.version) and k not in hidden]
            resources = [
                {"name": k.plural, "singularName": k.kind.lower(), "kind": k.kind, "namespaced": True, "verbs": verbs} for k in found
            ]
            if not kind.group:
                resources.append({"name": "namespaces", "singularName": "", "kind": "Namespace", "namespaced": False, "verbs": verbs})
            return {"kind": "APIResourceList", "groupVersion": kind.api_version, "resources": resources}
    return None


@asynccontextmanager
async def serving(server: ApiServer, port: int = 0) -> AsyncIterator[str]:
    app = web.Application(client_max_size=2**30)
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def connected(server: ApiServer, writes: TokenBucket | None = None) -> AsyncIterator[Api]:
    """A client of `server`."""
    async with serving(server) as url:
        api = Api(Connection(kube.Configuration(host=url)), lambda *_: None, writes)
        try:
            yield api
        finally:
            await api.close()


async def _serve(port: int) -> None:
    async with serving(ApiServer(), port) as url:
        print(url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    asyncio.run(_serve(parser.parse_args().port))

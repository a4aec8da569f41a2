"""An API server small enough to break on purpose: objects by path, resource versions, lists, watches, discovery, and answers that a
test can replace."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from kubernetes.aio import client as kube

from banyan_operator.cluster.client import Api, TokenBucket
from banyan_operator.cluster.connection import Connection
from banyan_operator.kube import kinds

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


@dataclass
class ApiServer:
    """What it stores has uid, generation and resourceVersion; writes are checked as the real one checks them."""

    objects: dict[str, Manifest] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    answer: Callable[[Call], web.Response | None] = field(default=lambda _: None)
    revision: int = 100
    prefix: str = ""  # of all paths, as behind another server
    silent: bool = False  # takes requests, and never answers (for the rest of its life)
    deaf_watches: bool = False  # watches show nothing: what has happened is missed for good
    withdrawn: set[kinds.Kind] = field(default_factory=set)  # kinds whose definition was deleted; see `withdraw`
    unlisted: set[kinds.Kind] = field(default_factory=set)  # kinds that are served, but not yet told to be
    _log: list[tuple[int, str, Manifest]] = field(default_factory=list)  # (revision, type, object), for watches
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        call = Call(
            request.method,
            request.path.removeprefix(self.prefix),
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
        if any(_in_namespace(call.path).startswith(kind.path(None)) for kind in self.withdrawn):
            return unserved()
        if call.method == "GET" and _in_namespace(call.path) in _COLLECTIONS:
            return await self._watch(request, call) if call.watches else self._list(call)
        return self._one(call)

    # --- one object ---

    def _one(self, call: Call) -> web.Response:
        place = call.path.removesuffix("/status")
        known = self.objects.get(place)
        match call.method:
            case "GET":
                return web.json_response(known) if known is not None else not_found(place)
            case "POST":
                place = f"{call.path}/{call.body['metadata']['name']}"
                return refusal(409, "AlreadyExists", "exists") if place in self.objects else self.store(place, call.body, 201)
            case "DELETE":
                if known is None:
                    return not_found(place)
                wanted = ((call.body or {}).get("preconditions") or {}).get("uid")
                if wanted and wanted != known["metadata"]["uid"]:
                    return refusal(409, "Conflict", "the UID in the precondition does not match")
                self.remove(place)
                return web.json_response({"kind": "Status", "status": "Success"})
        meta = call.body.get("metadata") or {}
        if known is None and (call.method == "PUT" or "apply-patch" not in call.headers.get("Content-Type", "")):
            return not_found(place)
        if known is not None and meta.get("resourceVersion") not in (None, known["metadata"]["resourceVersion"]):
            return refusal(409, "Conflict", "the object has been modified")
        if meta.get("uid") and known is None:
            return refusal(409, "Conflict", "uid mismatch: no existing object was found")
        if known is not None and meta.get("uid") not in (None, known["metadata"]["uid"]):
            return refusal(422, "Invalid", "field is immutable", [{"field": "metadata.uid", "message": "field is immutable"}])
        if call.path.endswith("/status"):
            assert known is not None
            return self.store(place, {**known, "status": _patched(known.get("status"), call.body["status"])}, 200)
        return self.store(place, call.body if call.method == "PUT" or known is None else _patched(known, call.body), 200)

    def store(self, place: str, manifest: Manifest, status: int = 200) -> web.Response:
        """Store an object as if somebody wrote it."""
        known = self.objects.get(place)
        old = known["metadata"] if known is not None else {}
        meta = {**manifest.get("metadata", {})}
        parts = place.split("/")
        if "namespaces" in parts:
            meta.setdefault("namespace", parts[parts.index("namespaces") + 1])
        meta["uid"] = old.get("uid") or meta.get("uid") or f"uid-{self.revision + 1}"
        changed = known is None or known.get("spec") != manifest.get("spec")
        meta["generation"] = old.get("generation", 0) + changed
        kept = {**manifest, "metadata": {**meta, "resourceVersion": old.get("resourceVersion")}}
        if kept == known:
            return web.json_response(known, status=status)
        self.revision += 1
        kept["metadata"]["resourceVersion"] = str(self.revision)
        self.objects[place] = kept
        self._tell("ADDED" if known is None else "MODIFIED", kept)
        return web.json_response(kept, status=status)

    def remove(self, place: str) -> None:
        gone = self.objects.pop(place)
        self.revision += 1
        self._tell("DELETED", {**gone, "metadata": {**gone["metadata"], "resourceVersion": str(self.revision)}})

    # --- many ---

    def _list(self, call: Call) -> web.Response:
        items = [one for place, one in self.objects.items() if _lies_in(place, call.path) and _selected(one, call.query)]
        return web.json_response({"kind": "List", "metadata": {"resourceVersion": str(self.revision)}, "items": items})

    async def _watch(self, request: web.Request, call: Call) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        told = int(call.query.get("resourceVersion") or self.revision)
        before: set[str] = set()  # what the selector has shown
        deadline = asyncio.get_running_loop().time() + float(call.query.get("timeoutSeconds") or 3600)
        while (left := deadline - asyncio.get_running_loop().time()) > 0 and _COLLECTIONS[_in_namespace(call.path)] not in self.withdrawn:
            for revision, type_, manifest in self._log[self._after(told) :]:
                told = revision
                if type_ == "ERROR" and not call.path.endswith(f"/{(manifest.get('details') or {}).get('kind', '')}".rstrip("/")):
                    continue
                place = (
                    f"{kinds.of(manifest).path(manifest['metadata']['namespace'], manifest['metadata']['name'])}"
                    if type_ != "ERROR"
                    else ""
                )
                if type_ != "ERROR" and not (_lies_in(place, call.path) and (_selected(manifest, call.query) or place in before)):
                    continue
                if type_ != "ERROR" and not _selected(manifest, call.query):
                    type_ = "DELETED"
                    before.discard(place)
                elif type_ != "ERROR":
                    before.add(place)
                if not self.deaf_watches:
                    await response.write(json.dumps({"type": type_, "object": manifest}).encode() + b"\n")
            try:
                async with asyncio.timeout(left):
                    await self._news.wait()
            except TimeoutError:
                break
        return response

    def interrupt_watches(self, code: int, reason: str, kind: kinds.Kind | None = None) -> None:
        """Each watch, or each one of `kind`, shows an ERROR event."""
        self.revision += 1
        told: Manifest = {"kind": "Status", "status": "Failure", "reason": reason, "code": code, "message": reason}
        self._tell("ERROR", told if kind is None else {**told, "details": {"kind": kind.plural}})

    def withdraw(self, kind: kinds.Kind) -> None:
        """Its CustomResourceDefinition is deleted: its objects go, its watches end, and nothing of it is served any more."""
        for place in [place for place in self.objects if _lies_in(place, kind.path(None))]:
            self.remove(place)
        self.withdrawn.add(kind)
        self._wake()

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


def _in_namespace(path: str) -> str:
    """The path of all namespaces' objects for that of one namespace's."""
    before, found, after = path.partition("/namespaces/")
    return f"{before}/{after.partition('/')[2]}" if found else path


def _lies_in(place: str, collection: str) -> bool:
    own = place.rpartition("/")[0]
    return collection in (own, _in_namespace(own))


def _selected(manifest: Manifest, query: dict[str, str]) -> bool:
    labels = manifest["metadata"].get("labels") or {}
    wanted = [part.partition("=") for part in query.get("labelSelector", "").split(",") if part]
    return all(labels.get(name) == value for name, _, value in wanted)


def _patched(target: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = _patched(result.get(name), value)
    return result


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

"""The API server, as far as the operator uses it: raw objects in and out, typed errors, a limit on writes."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
from kubernetes.aio import client as kube_client

from banyan_operator.cluster.connection import Connection, Observer
from banyan_operator.kube import kinds
from banyan_operator.kube.kinds import FIELD_MANAGER, Kind, Manifest

REQUEST_TIMEOUT_S: Final = 30.0
WRITES_PER_S: Final = 200.0  # as busy controllers are run; the API server has its own fairness, and says 429
WRITES_BURST: Final = 300
PAGE: Final = 500
_BY_RBAC: Final = re.compile(r' is forbidden: (User ".*" cannot \w+ resource |cannot set blockOwnerDeletion)')
_UNTYPED: Final = re.compile(r"failed to create typed patch object|field not declared in schema|duplicate entries for key")
_METADATA_ONLY: Final = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"


class ApiError(Exception):
    """What the API server (status >= 400) or the way to it (status 0) answered instead of an object."""

    def __init__(
        self,
        status: int,
        reason: str,
        message: str,
        causes: Sequence[str] = (),
        retry_after_s: float | None = None,
        *,
        unserved: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.message = message
        self.causes = tuple(causes)
        self.retry_after_s = retry_after_s
        self.unserved = unserved
        """The API itself is not there (404 for every object of the kind)."""

    @property
    def refused(self) -> bool:
        """The request itself is wrong or not allowed: repeating it unchanged gives the same answer.

        (An apply whose fields are unknown, of a wrong type, or twice in a keyed list: 500.)
        """
        if self.status == 500:
            return _UNTYPED.search(self.message) is not None
        return self.status in (400, 403, 405, 413, 415, 422) and not self.conflict

    @property
    def forbidden(self) -> bool:
        """Our own rights do not allow it. (Quotas, admission policies and Pod Security answer 403 too, but that is the user's.)"""
        return self.status == 403 and _BY_RBAC.search(self.message) is not None

    @property
    def conflict(self) -> bool:
        """The object is not the one that was meant: changed, or made anew, since it was read. (An apply that names another uid: 422.)"""
        return self.status == 409 or (self.status == 422 and any(cause.startswith("metadata.uid:") for cause in self.causes))


class TokenBucket:
    """Lets `rate` writes a second through, `burst` at once."""

    def __init__(self, rate: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._burst, self._clock = rate, burst, clock
        self._level, self._at = float(burst), clock()

    def reserve(self) -> float:
        """Take one token; how long to wait for it, s."""
        now = self._clock()
        self._level = min(self._burst, self._level + (now - self._at) * self._rate) - 1
        self._at = now
        return max(0.0, -self._level / self._rate)

    async def take(self) -> None:
        delay = self.reserve()
        if delay:
            await asyncio.sleep(delay)


class Api:
    """One connection pool. Every method raises ApiError; those that say "or None" answer None for 404."""

    def __init__(self, connection: Connection, observe: Observer, writes: TokenBucket | None = None) -> None:
        self._connection, self._observe = connection, observe
        self._configuration = connection.configuration
        self._api: Any = kube_client.ApiClient(self._configuration)
        self._writes = writes or TokenBucket(rate=WRITES_PER_S, burst=WRITES_BURST)

    @property
    def host(self) -> str:
        return urlsplit(str(self._api.configuration.host)).netloc

    async def close(self) -> None:
        await self._api.close()

    async def get(self, kind: Kind, namespace: str, name: str) -> Manifest | None:
        return await self._or_none("GET", kind.path(namespace, name))

    async def exists(self, kind: Kind, namespace: str, name: str) -> bool:
        """Asks for metadata only, so that a Secret's content never reaches this process."""
        return await self._or_none("GET", kind.path(namespace, name), accept=_METADATA_ONLY) is not None

    async def list(self, kind: Kind, namespace: str | None, *, labels: str = "", fields: str = "") -> tuple[list[Manifest], int]:
        """All objects of a kind, in pages, and the resource version that the list stands for."""
        items: list[Manifest] = []
        query = [("limit", str(PAGE))]
        query += [("labelSelector", labels)] if labels else []
        query += [("fieldSelector", fields)] if fields else []
        token = ""
        while True:
            page = await self._call("GET", kind.path(namespace), query=[*query, *([("continue", token)] if token else [])])
            for item in page["items"]:
                items.append({"apiVersion": kind.api_version, "kind": kind.kind, **item})
            token = page["metadata"].get("continue") or ""
            if not token:
                return items, int(page["metadata"].get("resourceVersion") or 0)

    async def apply(self, manifest: Manifest) -> Manifest:
        """Server-side apply with force: exactly the fields of `manifest` become ours."""
        meta = manifest["metadata"]
        return await self._write(
            "PATCH",
            kinds.of(manifest).path(meta["namespace"], meta["name"]),
            query=[("fieldManager", FIELD_MANAGER), ("force", "true")],
            content_type="application/apply-patch+yaml",
            body=manifest,
        )

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str | None = None) -> None:
        """In the background; gone already is fine. With `uid`, only that very object (else 409)."""
        options: Manifest = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        try:
            await self._write("DELETE", kind.path(namespace, name), body=options)
        except ApiError as error:
            if error.status != 404:
                raise

    async def patch_status(self, kind: Kind, namespace: str, name: str, patch: Mapping[str, Any], version: str) -> Manifest:
        """`version`: the resource version that the patch was made from; 409 if the object is another by now, or was made anew."""
        return await self._write(
            "PATCH",
            kind.path(namespace, name, "status"),
            query=[("fieldManager", FIELD_MANAGER)],
            content_type="application/merge-patch+json",
            body={"metadata": {"resourceVersion": version}, "status": dict(patch)},
        )

    async def create(self, kind: Kind, namespace: str, manifest: Manifest) -> Manifest:
        return await self._write("POST", kind.path(namespace), query=[("fieldManager", FIELD_MANAGER)], body=manifest)

    async def replace(self, kind: Kind, namespace: str, name: str, manifest: Manifest) -> Manifest:
        """PUT; with metadata.resourceVersion set, 409 where another was quicker. Not slowed by the limit on writes: the lease uses it."""
        return await self._call("PUT", kind.path(namespace, name), query=[("fieldManager", FIELD_MANAGER)], body=manifest)

    async def merge(self, kind: Kind, namespace: str, name: str, patch: Manifest) -> Manifest:
        return await self._write("PATCH", kind.path(namespace, name), content_type="application/merge-patch+json", body=patch)

    async def _or_none(self, method: str, path: str, *, accept: str = "application/json") -> Manifest | None:
        try:
            return await self._call(method, path, accept=accept)
        except ApiError as error:
            if error.status == 404 and not error.unserved:
                return None
            raise

    async def _write(
        self, method: str, path: str, *, query: Sequence[tuple[str, str]] = (), content_type: str = "application/json", body: Manifest
    ) -> Manifest:
        await self._writes.take()
        return await self._call(method, path, query=query, content_type=content_type, body=body)

    async def _call(
        self,
        method: str,
        path: str,
        *,
        query: Sequence[tuple[str, str]] = (),
        content_type: str = "application/json",
        accept: str = "application/json",
        body: Manifest | None = None,
        again: bool = False,
    ) -> Manifest:
        began, status = time.monotonic(), 0
        used, api = self._configuration, self._api
        try:
            request = await api.param_serialize(
                method,
                path,
                query_params=list(query),
                header_params={"Content-Type": content_type, "Accept": accept},
                body=body,
                auth_settings=["BearerToken"],
            )
            response = await api.call_api(*request, _request_timeout=REQUEST_TIMEOUT_S)
            status = response.status
            raw = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ApiError(0, "Unreachable", f"the API server does not answer: {type(error).__name__} {error}") from error
        finally:
            self._observe(self.host, method, status, time.monotonic() - began)
        if status == 401 and not again and await self._connection.renew(used):
            await self._use(self._connection.configuration)
            return await self._call(method, path, query=query, content_type=content_type, accept=accept, body=body, again=True)
        if status >= 400:
            raise _error(status, raw, response.getheader("Retry-After"))
        answer: Manifest = json.loads(raw)
        return answer

    async def _use(self, configuration: kube_client.Configuration) -> None:
        if configuration is not self._configuration:
            old, self._configuration, self._api = self._api, configuration, kube_client.ApiClient(configuration)
            await old.close()


def _error(status: int, raw: bytes, retry_after: str | None) -> ApiError:
    try:
        body = json.loads(raw)
    except ValueError:
        body = {}
    body = body if isinstance(body, dict) else {}
    details = body.get("details") or {}
    causes = [f"{cause.get('field', '')}: {cause.get('message', '')}" for cause in details.get("causes") or ()]
    unserved = status == 404 and not (details.get("kind") or details.get("name"))
    wait = float(retry_after) if retry_after and retry_after.isdigit() else None
    message = body.get("message") or raw[:512].decode(errors="replace").strip() or f"HTTP {status}"
    return ApiError(status, body.get("reason") or str(status), message, causes, wait, unserved=unserved)

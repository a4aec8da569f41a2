"""The operator's way to the API server: each call takes time, may fail, may be lost before or after it was carried out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from banyan_operator.cluster.client import ApiError
from banyan_operator.kube import kinds
from banyan_operator.kube.kinds import Kind, Manifest
from banyan_operator.kube.objects import Key, key_of
from tests.simulation.operator.watches import shown_to
from tests.support.kube.apiserver import Server, merged, refusal

if TYPE_CHECKING:
    from tests.simulation.operator.operators import Operator

TIMEOUT_S = 30.0


@dataclass
class Weather:
    """How calls fare. `storm` is the share of calls that fail in some way."""

    latency_s: float = 0.01
    storm: float = 0.0
    refused: dict[str, tuple[float, str]] = field(default_factory=dict)  # kind → (until, how)

    def clear(self) -> None:
        self.storm = 0.0
        self.refused.clear()


def _refused(how: str, kind: Kind, name: str) -> ApiError:
    if how == "invalid":
        return refusal(422, "Invalid", f'{kind.kind} "{name}" is invalid: admission webhook says no')
    if how == "quota":
        return refusal(403, "Forbidden", f'{kind.plural} "{name}" is forbidden: exceeded quota: compute, requested: 1, limited: 0')
    text = f'{kind.plural} "{name}" is forbidden: User "system:serviceaccount:x:y" cannot patch resource "{kind.plural}"'
    return refusal(403, "Forbidden", text)


class Client:
    """Stands for `banyan_operator.cluster.client.Api`: the same methods, the same errors."""

    def __init__(self, server: Server, weather: Weather, operator: Operator) -> None:
        self._server, self._weather, self._operator = server, weather, operator

    async def get(self, kind: Kind, namespace: str, name: str) -> Manifest | None:
        key = Key(kind.kind, namespace, name)
        return await self._call("GET", kind, key, lambda: self._server.get(key))

    async def exists(self, kind: Kind, namespace: str, name: str) -> bool:
        return await self.get(kind, namespace, name) is not None

    async def list(self, kind: Kind, namespace: str | None, *, labels: str = "", fields: str = "") -> tuple[list[Manifest], int]:
        assert labels in ("", kinds.CHILD_SELECTOR)
        if kind.kind == "Event":
            return await self._call("LIST", kind, None, lambda: ([], self._server.version))
        return await self._call(
            "LIST", kind, None, lambda: ([one for one in self._server.of(kind) if shown_to(kind, one)], self._server.version)
        )

    async def apply(self, manifest: Manifest) -> Manifest:
        key = key_of(manifest)
        return await self._call("APPLY", kinds.of(manifest), key, lambda: self._operator.sim.on_apply(self._operator, manifest))

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str | None = None) -> None:
        key = Key(kind.kind, namespace, name)

        def effect() -> None:
            self._operator.sim.on_delete(self._operator, key, uid)

        try:
            await self._call("DELETE", kind, key, effect)
        except ApiError as error:
            if error.status != 404:
                raise

    async def patch_status(self, kind: Kind, namespace: str, name: str, patch: Mapping[str, Any], version: str) -> Manifest:
        key = Key(kind.kind, namespace, name)
        return await self._call("STATUS", kind, key, lambda: self._operator.sim.on_status(self._operator, key, patch, version))

    async def create(self, kind: Kind, namespace: str, manifest: Manifest) -> Manifest:
        def effect() -> Manifest:
            made = self._server.create({"apiVersion": kind.api_version, "kind": kind.kind, **manifest})
            self._operator.sim.on_event(made)
            return made

        return await self._call("CREATE", kind, Key(kind.kind, namespace, manifest["metadata"]["name"]), effect)

    async def merge(self, kind: Kind, namespace: str, name: str, patch: Manifest) -> Manifest:
        key = Key(kind.kind, namespace, name)

        def effect() -> Manifest:
            made = self._server.edit(key, lambda live: merged(live, patch))
            if made is None:
                raise refusal(404, "NotFound", f"{key} not found")
            self._operator.sim.on_event(made)
            return made

        return await self._call("MERGE", kind, key, effect)

    async def _call(self, verb: str, kind: Kind, key: Key | None, effect: Callable[[], Any]) -> Any:
        server, weather, operator, rng = self._server, self._weather, self._operator, self._server.rng
        loop = server.loop
        write = verb not in ("GET", "LIST")
        operator.sim.on_call(operator, verb, kind, key)
        task = asyncio.current_task()
        future: asyncio.Future[Any] = loop.create_future()

        def arrive() -> None:
            if operator.dead and rng.random() < 0.5:
                return  # it died before the request was on its way
            fate = rng.random() / weather.storm if weather.storm else 1.0
            lost = fate < 0.2 and write
            try:
                if fate < 1.0 and not lost:
                    raise self._trouble(fate)
                if write and kind.kind in weather.refused and verb != "STATUS":
                    until, how = weather.refused[kind.kind]
                    if loop.now < until:
                        raise _refused(how, kind, key.name if key else "")
                result, error = effect(), None
            except ApiError as raised:
                result, error = None, raised
            if lost:
                error = refusal(0, "Unreachable", "the API server does not answer")
                loop.call_later(rng.choice((0.1, 2.0, TIMEOUT_S)), answer, None, error)
            else:
                loop.call_later(weather.latency_s * rng.random(), answer, result, error)

        def answer(result: Any, error: ApiError | None) -> None:
            if future.done():
                return
            operator.sim.saw("ok" if error is None else str(error.status))
            if operator.sim.tracing:
                operator.sim.trace(f"{operator} {verb} {key or kind.plural} → {'ok' if error is None else f'{error.status} {error}'}")
            if error is None:
                future.set_result(result)
            else:
                if kind.kind != "Event" or verb == "LIST":  # what the recorder loses holds nobody up
                    operator.answered(task, error)
                future.set_exception(error)

        loop.call_later(weather.latency_s * rng.random(), arrive)
        return await future

    def _trouble(self, fate: float) -> ApiError:
        if fate < 0.4:
            return refusal(429, "TooManyRequests", "too many requests", float(self._server.rng.choice((1, 3, 20))))
        if fate < 0.6:
            return refusal(409, "Conflict", "the object has been modified; please apply your changes to the latest version")
        if fate < 0.8:
            return refusal(500, "InternalError", "etcdserver: leader changed")
        return refusal(0, "Unreachable", "the API server does not answer")

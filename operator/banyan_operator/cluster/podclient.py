"""What pods say of themselves over HTTP: a server's /readyz, a batch worker's /progress."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import aiohttp

from banyan_operator.kube.addresses import PROGRESS_PORT, SERVER_PORT
from banyan_operator.kube.kinds import DEPLOYMENT, JOB, POD, REPLICA_SET, Manifest
from banyan_operator.kube.objects import controller_uid, is_true, uid_of

TIMEOUT_S: Final = 2.0
FRESH_S: Final = 5.0  # an answer this young is not asked for again: its news, and several events of one pod, come at once
MAX_BYTES: Final = 64 * 1024
REMEMBER: Final = 8192

_READY_STATE: Final = "ready"


def newest(resource: Manifest, children: Iterable[Manifest], container: str) -> Manifest | None:
    """The youngest pod of `resource` that lives, has an address and runs `container`. Labels do not make a pod its own: owners do."""
    known, ours = tuple(children), {uid_of(resource)}
    for kind in (DEPLOYMENT, JOB, REPLICA_SET):
        ours |= {uid_of(child) for child in known if child["kind"] == kind.kind and controller_uid(child) in ours}
    pods = [child for child in known if child["kind"] == POD.kind and controller_uid(child) in ours and _reachable(child, container)]
    return max(pods, key=lambda pod: (pod["metadata"].get("creationTimestamp") or "", pod["metadata"]["name"]), default=None)


def _reachable(pod: Manifest, container: str) -> bool:
    status = pod.get("status") or {}
    if pod["metadata"].get("deletionTimestamp") or not status.get("podIP"):
        return False
    statuses = [*(status.get("containerStatuses") or ()), *(status.get("initContainerStatuses") or ())]
    return any(c["name"] == container and "running" in (c.get("state") or {}) for c in statuses)


class Pods:
    """What pods said last. Nobody waits for a pod, which may not answer: it is asked beside the work, and `news` is told what it says
    where that is news."""

    def __init__(self, news: Callable[[Manifest], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._news, self._clock = news, clock
        self._session: aiohttp.ClientSession | None = None
        self._answers: dict[tuple[str, str], tuple[float, Mapping[str, Any] | None]] = {}  # (pod uid, path) -> (when, body)
        self._asking: dict[tuple[str, str], asyncio.Task[None]] = {}

    async def readyz(self, pod: Manifest) -> Mapping[str, Any] | None:
        """The body of GET /readyz, whatever its status, as of the last time the pod was asked. None: it did not answer."""
        _, known = self._answers.get((pod["metadata"]["uid"], "/readyz"), (0.0, None))
        if known is not None and known.get("state") == _READY_STATE and is_true(pod, "Ready"):
            return known
        return self._last(pod, SERVER_PORT, "/readyz")

    async def progress(self, pod: Manifest) -> Mapping[str, Any] | None:
        """The body of GET /progress, likewise."""
        return self._last(pod, PROGRESS_PORT, "/progress")

    async def close(self) -> None:
        for task in list(self._asking.values()):
            task.cancel()
        if self._session is not None:
            await self._session.close()

    def _last(self, pod: Manifest, port: int, path: str) -> Mapping[str, Any] | None:
        place = (pod["metadata"]["uid"], path)
        when, body = self._answers.get(place, (float("-inf"), None))
        if place not in self._asking and self._clock() - when >= FRESH_S:
            self._asking[place] = task = asyncio.create_task(self._ask(place, pod, port))
            task.add_done_callback(lambda _: self._asking.pop(place, None))
        return body

    async def _ask(self, place: tuple[str, str], pod: Manifest, port: int) -> None:
        body = await self._fetch(pod, port, place[1])
        _, before = self._answers.pop(place, (0.0, None))
        self._answers[place] = (self._clock(), body)
        while len(self._answers) > REMEMBER:
            del self._answers[next(iter(self._answers))]
        if body != before:
            self._news(pod)

    async def _fetch(self, pod: Manifest, port: int, path: str) -> Mapping[str, Any] | None:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))
        address = pod["status"]["podIP"]
        host = f"[{address}]" if ":" in address else address
        try:
            async with self._session.get(f"http://{host}:{port}{path}", allow_redirects=False) as response:
                raw = bytearray()
                async for part in response.content.iter_any():
                    raw += part
                    if len(raw) > MAX_BYTES:
                        return None
                return _json(raw)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return None


def _json(raw: bytearray) -> Mapping[str, Any]:
    body = json.loads(raw)
    if not isinstance(body, dict):
        raise ValueError("not a JSON object")
    return body

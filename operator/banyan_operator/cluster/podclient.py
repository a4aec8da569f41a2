"""What pods say of themselves over HTTP: a server's /readyz, a batch worker's /progress."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import aiohttp

from banyan_operator.kube.addresses import PROGRESS_PORT, SERVER_PORT
from banyan_operator.kube.kinds import Manifest
from banyan_operator.kube.objects import is_true

TIMEOUT_S: Final = 2.0
FRESH_S: Final = 2.0  # an answer this young is not asked for again: several events of one pod come at once
MAX_BYTES: Final = 64 * 1024
REMEMBER: Final = 8192

_READY_STATE: Final = "ready"


def newest(children: Iterable[Manifest], container: str) -> Manifest | None:
    """The youngest pod that lives, has an address and runs `container`."""
    pods = [child for child in children if child["kind"] == "Pod" and _reachable(child, container)]
    return max(pods, key=lambda pod: (pod["metadata"].get("creationTimestamp") or "", pod["metadata"]["name"]), default=None)


def _reachable(pod: Manifest, container: str) -> bool:
    status = pod.get("status") or {}
    if pod["metadata"].get("deletionTimestamp") or not status.get("podIP"):
        return False
    statuses = [*(status.get("containerStatuses") or ()), *(status.get("initContainerStatuses") or ())]
    return any(c["name"] == container and "running" in (c.get("state") or {}) for c in statuses)


class Pods:
    """Asks pods, and keeps what does not change: the answer of a server that is ready."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._session: aiohttp.ClientSession | None = None
        self._answers: dict[tuple[str, str], tuple[float, Mapping[str, Any]]] = {}  # (pod uid, path) -> (when, body)

    async def readyz(self, pod: Manifest) -> Mapping[str, Any] | None:
        """The body of GET /readyz, whatever its status, or None if the pod did not answer."""
        known = self._answers.get((pod["metadata"]["uid"], "/readyz"))
        if known is not None and known[1].get("state") == _READY_STATE and is_true(pod, "Ready"):
            return known[1]
        return await self._ask(pod, SERVER_PORT, "/readyz")

    async def progress(self, pod: Manifest) -> Mapping[str, Any] | None:
        """The body of GET /progress, or None if the worker did not answer."""
        return await self._ask(pod, PROGRESS_PORT, "/progress")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _ask(self, pod: Manifest, port: int, path: str) -> Mapping[str, Any] | None:
        place, now = (pod["metadata"]["uid"], path), self._clock()
        known = self._answers.get(place)
        if known is not None and now - known[0] < FRESH_S:
            return known[1]
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))
        address = pod["status"]["podIP"]
        host = f"[{address}]" if ":" in address else address
        try:
            async with self._session.get(f"http://{host}:{port}{path}", allow_redirects=False) as response:
                raw = await response.content.read(MAX_BYTES)
                body = _json(raw)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return None
        self._answers.pop(place, None)
        self._answers[place] = (now, body)
        while len(self._answers) > REMEMBER:
            del self._answers[next(iter(self._answers))]
        return body


def _json(raw: bytes) -> Mapping[str, Any]:
    body = json.loads(raw)
    if not isinstance(body, dict):
        raise ValueError("not a JSON object")
    return body

"""What pods say of themselves over HTTP: a server's /readyz, a batch worker's /progress."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import aiohttp

from banyan_operator.kube.addresses import PROGRESS_PORT, SERVER_PORT, in_url
from banyan_operator.kube.kinds import DEPLOYMENT, JOB, POD, REPLICA_SET, Manifest
from banyan_operator.kube.objects import controller_uid, is_true, uid_of

TIMEOUT_S: Final = 2.0
FRESH_S: Final = 5.0  # an answer this young is not asked for again: its news, and several events of one pod, come at once
PROGRESS_EVERY_S: Final = 10.0
AT_ONCE: Final = 64  # pods of one batch that are asked at the same time
MAX_BYTES: Final = 64 * 1024
REMEMBER: Final = 8192  # answers, and of more pods than that those that are not old
OLD_S: Final = 60.0

_READY_STATE: Final = "ready"
_NEVER: Final[tuple[float, Mapping[str, Any] | None]] = (float("-inf"), None)


def newest(resource: Manifest, children: Iterable[Manifest], container: str) -> Manifest | None:
    """The youngest of the pods that `reachable` finds."""
    pods = reachable(resource, children, container)
    return max(pods, key=lambda pod: (pod["metadata"].get("creationTimestamp") or "", pod["metadata"]["name"]), default=None)


def reachable(resource: Manifest, children: Iterable[Manifest], container: str) -> list[Manifest]:
    """The pods of `resource` that live, have an address and run `container`. Labels do not make a pod its own: owners do."""
    known, ours = tuple(children), {uid_of(resource)}
    for kind in (DEPLOYMENT, JOB, REPLICA_SET):
        ours |= {uid_of(child) for child in known if child["kind"] == kind.kind and controller_uid(child) in ours}
    return [child for child in known if child["kind"] == POD.kind and controller_uid(child) in ours and _reachable(child, container)]


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

    async def progress(self, pods: Sequence[Manifest]) -> dict[str, Mapping[str, Any]]:
        """By pod name the body of GET /progress of each of these that answered last time. They are asked in one round, after which
        their owner's resource is told once: a thousand workers are no thousand pieces of news."""
        found = {}
        for pod in pods:
            _, body = self._answers.get((uid_of(pod), "/progress"), (0.0, None))
            if body is not None:
                found[str(pod["metadata"]["name"])] = body
        due = [pod for pod in pods if self._clock() - self._answers.get((uid_of(pod), "/progress"), _NEVER)[0] >= PROGRESS_EVERY_S]
        if due and (owner := (controller_uid(due[0]) or "", "/progress")) not in self._asking:
            self._asking[owner] = task = asyncio.create_task(self._round(due))
            task.add_done_callback(lambda _: self._asking.pop(owner, None))
        return found

    async def _round(self, pods: Sequence[Manifest]) -> None:
        """Ask all of them, so many at a time."""
        few = asyncio.Semaphore(AT_ONCE)

        async def ask(pod: Manifest) -> bool:
            async with few:
                return await self._ask((uid_of(pod), "/progress"), pod, PROGRESS_PORT)

        if any(await asyncio.gather(*map(ask, pods))):
            self._news(pods[0])

    async def close(self) -> None:
        for task in list(self._asking.values()):
            task.cancel()
        if self._session is not None:
            await self._session.close()

    def _last(self, pod: Manifest, port: int, path: str) -> Mapping[str, Any] | None:
        place = (pod["metadata"]["uid"], path)
        when, body = self._answers.get(place, _NEVER)
        if place not in self._asking and self._clock() - when >= FRESH_S:
            self._asking[place] = task = asyncio.create_task(self._ask_alone(place, pod, port))
            task.add_done_callback(lambda _: self._asking.pop(place, None))
        return body

    async def _ask_alone(self, place: tuple[str, str], pod: Manifest, port: int) -> None:
        if await self._ask(place, pod, port):
            self._news(pod)

    async def _ask(self, place: tuple[str, str], pod: Manifest, port: int) -> bool:
        """Whether it says something new."""
        body = await self._fetch(pod, port, place[1])
        _, before = self._answers.pop(place, (0.0, None))
        self._answers[place] = (self._clock(), body)
        while len(self._answers) > REMEMBER and self._clock() - next(iter(self._answers.values()))[0] > OLD_S:
            del self._answers[next(iter(self._answers))]
        return body != before

    async def _fetch(self, pod: Manifest, port: int, path: str) -> Mapping[str, Any] | None:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))
        host = in_url(pod["status"]["podIP"])
        try:
            async with self._session.get(f"http://{host}:{port}{path}", allow_redirects=False) as response:
                raw = bytearray()
                async for part in response.content.iter_any():
                    raw += part
                    if len(raw) > MAX_BYTES:
                        return None
                return _json(raw)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, RecursionError):
            return None


def _json(raw: bytearray) -> Mapping[str, Any]:
    body = json.loads(raw)
    if not isinstance(body, dict):
        raise ValueError("not a JSON object")
    return body

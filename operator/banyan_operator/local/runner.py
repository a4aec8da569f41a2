"""A resource and the pods that run for it. `turn` looks at what is there and starts or stops what differs; it may be called at any time."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Final

from banyan_operator import __version__
from banyan_operator.api import Resource, parse
from banyan_operator.desired.references import references
from banyan_operator.kube.kinds import Manifest
from banyan_operator.kube.objects import key_of
from banyan_operator.local.pod import Machine, Pod
from banyan_operator.observed.conditions import Finding
from banyan_operator.plan import Settings, World
from banyan_operator.reconcile.common import acceptable

SETTINGS: Final = Settings(runtime_image="local", operator_version=__version__, platform="local")


class Runner(ABC):
    """What both kinds have in common. `resource`: with the status as it was filled last."""

    def __init__(self, resource: Manifest, machine: Machine) -> None:
        self.resource = resource
        self.key = key_of(resource)
        self.leaving = False
        self._machine = machine
        self._parsed: Resource = parse(resource)
        self._invalid: Finding | None = None  # why no pod can be made of the spec
        self._tasks: dict[Pod, asyncio.Task[None]] = {}

    @property
    def pods(self) -> list[Pod]:
        """Oldest first."""
        return list(self._tasks)

    @property
    def readyz(self) -> Mapping[str, Any] | None:
        """What the newest server among them last said of itself."""
        return next((pod.readyz for pod in reversed(self.pods) if pod.readyz is not None and not pod.stopping), None)

    def update(self, resource: Manifest) -> None:
        """Take an edit over; the next turn acts on it."""
        self.resource, self._parsed, self._invalid = resource, parse(resource), None

    @abstractmethod
    def turn(self) -> None:
        """Start or stop the pods that differ from what is wanted."""

    def fill_status(self) -> None:
        """Write into the resource what is to be seen now."""
        prior = self.resource.get("status") or {}
        self.resource = {**self.resource, "status": self._status(prior, time.time())}

    @abstractmethod
    def _status(self, prior: Manifest, now: float) -> Manifest:
        """The status now. `prior`: as it was; `now`: Unix seconds."""

    def leave(self) -> None:
        """End all pods, and start none any more."""
        self.leaving = True
        for pod in self._tasks:
            pod.stop(pre_stop=False)

    @abstractmethod
    async def close(self) -> None:
        """Free what it holds beside its pods. Called when no pod is left."""

    @property
    def accepted(self) -> Finding:
        """Whether the spec can be carried out. Claims are never missing: a folder is found or made for each."""
        named = (ref for ref in references(self._parsed) if ref.kind != "PersistentVolumeClaim")
        missing = frozenset(ref for ref in named if self._machine.find(ref.key(self.key.namespace)) is None)
        return self._invalid or acceptable(self._parsed, World(now=0.0, missing=missing), SETTINGS)

    def _start(self, prefix: str, template: Manifest) -> Pod:
        pod = Pod(prefix, self.key.namespace, template, self._machine)
        self._tasks[pod] = asyncio.create_task(pod.run())
        return pod

    def _reap(self) -> list[Pod]:
        """Let go of the pods that are over. An exception of theirs is a bug, and raised."""
        over = [pod for pod, task in self._tasks.items() if task.done()]
        for pod in over:
            self._tasks.pop(pod).result()
        return over

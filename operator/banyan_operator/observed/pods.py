"""Pods as deciding needs them: small typed views of what the kubelet reports."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from banyan_operator.desired.metadata import SPEC_HASH
from banyan_operator.plan import Manifest
from banyan_operator.times import seconds


@dataclass(frozen=True, slots=True)
class LastWords:
    """What a process of ours left as its termination message: JSON, or the end of its log."""

    code: str
    message: str
    details: Mapping[str, Any]

    @staticmethod
    def of(text: str) -> LastWords:
        line = text.strip().splitlines()[-1] if text.strip() else ""
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            return LastWords("", text.strip()[-300:], {})
        return LastWords(str(found.get("code") or ""), str(found.get("message") or ""), found)


@dataclass(frozen=True, slots=True)
class End:
    """How a container ended."""

    reason: str
    exit_code: int
    words: LastWords
    finished: str | None


@dataclass(frozen=True, slots=True)
class Container:
    """One container of a pod, sidecars included."""

    name: str
    image: str
    ready: bool
    started: bool
    restarts: int
    waiting: str  # the kubelet's reason, "" when it does not wait
    waiting_message: str
    running_since: str | None
    ended: End | None  # it has ended, and does not run
    last_end: End | None  # how it ended before it was started again
    memory_limit: str | None

    @property
    def failure(self) -> End | None:
        """How it failed last, if it has not come up again since."""
        for end in (self.ended, self.last_end):
            if end is not None and not self.started and (end.exit_code != 0 or self.waiting == "CrashLoopBackOff"):
                return end
        return None


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod."""

    name: str
    revision: str
    created: str
    deleted: str | None  # when its grace period ends
    node: str
    phase: str
    reason: str
    message: str
    ready: bool
    ready_message: str
    unschedulable: str | None  # the scheduler's text
    disrupted: str | None
    containers: tuple[Container, ...]

    @property
    def active(self) -> bool:
        """It exists and is meant to go on."""
        return self.deleted is None and self.phase not in ("Succeeded", "Failed")

    def container(self, name: str) -> Container | None:
        return next((container for container in self.containers if container.name == name), None)


def pods(children: Iterable[Manifest]) -> tuple[Pod, ...]:
    """The pods among the children, newest first."""
    found = [_pod(child) for child in children if child["kind"] == "Pod"]
    return tuple(sorted(found, key=lambda pod: (pod.created, pod.name), reverse=True))


def _pod(manifest: Manifest) -> Pod:
    metadata, status = manifest["metadata"], manifest.get("status") or {}
    conditions = {condition["type"]: condition for condition in status.get("conditions") or ()}
    scheduled, ready, disrupted = (conditions.get(kind, {}) for kind in ("PodScheduled", "Ready", "DisruptionTarget"))
    unschedulable = scheduled.get("status") == "False" and scheduled.get("reason") in ("Unschedulable", "SchedulingGated")
    limits = {
        one["name"]: (one.get("resources") or {}).get("limits", {}).get("memory")
        for one in (*(manifest["spec"].get("initContainers") or ()), *manifest["spec"]["containers"])
    }
    statuses = (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ()))
    return Pod(
        name=metadata["name"],
        revision=(metadata.get("annotations") or {}).get(SPEC_HASH, ""),
        created=metadata.get("creationTimestamp") or "",
        deleted=metadata.get("deletionTimestamp"),
        node=manifest["spec"].get("nodeName") or "",
        phase=status.get("phase") or "Pending",
        reason=status.get("reason") or "",
        message=status.get("message") or "",
        ready=ready.get("status") == "True",
        ready_message=ready.get("message") or "",
        unschedulable=scheduled.get("message") or "no node fits" if unschedulable else None,
        disrupted=f"{disrupted.get('reason')}: {disrupted.get('message')}" if disrupted.get("status") == "True" else None,
        containers=tuple(_container(one, limits.get(one["name"])) for one in statuses),
    )


def _container(status: Manifest, memory_limit: str | None) -> Container:
    state, last = status.get("state") or {}, status.get("lastState") or {}
    waiting = state.get("waiting") or {}
    return Container(
        name=status["name"],
        image=status.get("image") or "",
        ready=bool(status.get("ready")),
        started=bool(status.get("started")),
        restarts=status.get("restartCount") or 0,
        waiting=waiting.get("reason") or "",
        waiting_message=waiting.get("message") or "",
        running_since=(state.get("running") or {}).get("startedAt"),
        ended=_end(state.get("terminated")),
        last_end=_end(last.get("terminated")),
        memory_limit=memory_limit,
    )


def _end(state: Mapping[str, Any] | None) -> End | None:
    if not state:
        return None
    return End(
        reason=state.get("reason") or "",
        exit_code=state.get("exitCode") or 0,
        words=LastWords.of(state.get("message") or ""),
        finished=state.get("finishedAt"),
    )


def age_s(since: str | None, now: float) -> float:
    """Seconds since then; 0 where unknown."""
    began = seconds(since)
    return max(0.0, now - began) if began is not None else 0.0

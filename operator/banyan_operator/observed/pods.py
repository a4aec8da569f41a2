"""Pods as deciding needs them: small typed views of what the kubelet reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from banyan_operator.desired.metadata import SPEC_HASH
from banyan_operator.kube.kinds import DEPLOYMENT, ENDPOINT_SLICE, JOB, POD, REPLICA_SET
from banyan_operator.kube.objects import controller, controller_uid, is_true, uid_of
from banyan_operator.observed.termination import TerminationMessage
from banyan_operator.plan import Manifest
from banyan_operator.times import seconds, stamp

EVICTED_AFTER_S: Final = 300
"""Seconds after which a pod leaves a node that does not answer, unless it tolerates that for another time: the API server's default."""
STUCK_AFTER_S: Final = 30.0
"""A pod that is still there so long after its grace period is ended by no node."""

_JOB_NAME: Final = "batch.kubernetes.io/job-name"  # the Job controller's own label


@dataclass(frozen=True, slots=True)
class End:
    """How a container ended."""

    reason: str
    exit_code: int
    message: TerminationMessage
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
    memory_limit: str | None = None

    @property
    def failure(self) -> End | None:
        """How it failed last, if it has not come up again since."""
        for end in (self.ended, self.last_end):
            if end is not None and not self.started and (end.exit_code != 0 or self.waiting == "CrashLoopBackOff"):
                return end
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """One pod."""

    name: str
    revision: str
    created: str
    deleted: str | None  # when its grace period ends
    node: str = ""
    phase: str
    reason: str = ""
    message: str = ""
    ready: bool
    ready_since: float | None = None  # unix seconds, to the second
    ready_message: str = ""
    unschedulable: str | None = None  # the scheduler's text
    disrupted: str | None = None
    lost: bool = False  # its node does not answer: nobody knows whether its processes still run
    evicted_after_s: int | None = None  # how long it stays on such a node; None: for ever
    containers: tuple[Container, ...]

    @property
    def active(self) -> bool:
        """It exists and is meant to go on."""
        return self.deleted is None and self.may_run

    @property
    def may_run(self) -> bool:
        """Processes of it run, or may yet, whether or not it was deleted."""
        return self.phase not in ("Succeeded", "Failed")

    def stuck(self, now: float) -> bool:
        """It was deleted, and is still there long after its grace period. `now`: unix seconds."""
        return age_s(self.deleted, now) > STUCK_AFTER_S

    def abandoned(self, now: float) -> bool:
        """It is to end, and no node ends it. `now`: unix seconds."""
        return self.may_run and self.deleted is not None and (self.lost or self.stuck(now))

    @property
    def place(self) -> str:
        """What it has in common with those that came or come in its place: the Job controller names pods JOB-INDEX-RANDOM."""
        return self.name.rpartition("-")[0]

    def container(self, name: str) -> Container | None:
        return next((container for container in self.containers if container.name == name), None)


def pods_of(owners: Iterable[Manifest], children: Iterable[Manifest]) -> tuple[Pod, ...]:
    """The pods that one of `owners` (ReplicaSets, a Job) controls, newest first. Labels do not make a pod somebody's."""
    uids = {uid_of(owner) for owner in owners}
    return newest_first(_pod(child) for child in children if child["kind"] == POD.kind and controller_uid(child) in uids)


def newest_first(found: Iterable[Pod]) -> tuple[Pod, ...]:
    return tuple(sorted(found, key=lambda pod: (pod.created, pod.name), reverse=True))


def orphans(children: Iterable[Manifest]) -> tuple[Pod, ...]:
    """Pods of Jobs that are gone: the garbage collector has not come to them yet, or was told to leave them."""
    known = tuple(children)
    jobs = {uid_of(child) for child in known if child["kind"] == JOB.kind}

    def left(pod: Manifest) -> bool:
        owner = controller(pod)
        if owner is None:
            return _JOB_NAME in (pod["metadata"].get("labels") or {})
        return owner.get("kind") == JOB.kind and owner["uid"] not in jobs

    return newest_first(_pod(child) for child in known if child["kind"] == POD.kind and left(child))


def listed(service: str, children: Iterable[Manifest]) -> frozenset[str] | None:
    """Names of the pods that this Service sends requests to, as far as nodes are told; None where nothing is known of it."""
    slices = [one for one in children if one["kind"] == ENDPOINT_SLICE.kind]
    slices = [one for one in slices if (one["metadata"].get("labels") or {}).get("kubernetes.io/service-name") == service]
    endpoints = [point for one in slices for point in one.get("endpoints") or ()]
    ready = [point for point in endpoints if (point.get("conditions") or {}).get("ready") is not False]
    return frozenset(str((point.get("targetRef") or {}).get("name")) for point in ready) if slices else None


def strangers(deployment: str, selector: Mapping[str, str], children: Iterable[Manifest]) -> tuple[str, ...]:
    """Names of the pods that a Service with this selector sends requests to, although no Deployment of this name made them."""
    known = tuple(children)
    sets = {uid_of(child): child for child in known if child["kind"] == REPLICA_SET.kind}

    def foreign(pod: Manifest) -> bool:
        owner = controller(pod)
        if owner is None or owner.get("kind") != REPLICA_SET.kind:
            return True
        if owner["uid"] not in sets:
            return False  # not seen yet: it may turn out to be ours
        above = controller(sets[owner["uid"]])
        return above is None or (above.get("kind"), above.get("name")) != (DEPLOYMENT.kind, deployment)

    def selected(pod: Manifest) -> bool:
        return not selector.items() - (pod["metadata"].get("labels") or {}).items() and is_true(pod, "Ready")

    pods = (child for child in known if child["kind"] == POD.kind and not child["metadata"].get("deletionTimestamp"))
    return tuple(sorted(str(pod["metadata"]["name"]) for pod in pods if selected(pod) and foreign(pod)))


def given_up(pod: Manifest, now: float) -> Manifest:
    """The status of a pod that its node does not end, as Kubernetes' own collector of garbage writes it when the Node object is gone:
    the Job's controller waits for a pod that has failed, and does not count this one as a failure of the work."""
    message = f"Node {pod['spec'].get('nodeName') or '(none)'} does not end the pod, and the storage refuses what it may still write."
    conditions = list((pod.get("status") or {}).get("conditions") or ())
    if not is_true(pod, "DisruptionTarget"):
        taken = {"type": "DisruptionTarget", "status": "True", "reason": "NodeLost", "message": message, "lastTransitionTime": stamp(now)}
        conditions = [one for one in conditions if one["type"] != "DisruptionTarget"] + [taken]
    metadata = {name: pod["metadata"].get(name, "") for name in ("name", "namespace", "uid", "resourceVersion")}
    status = {"phase": "Failed", "reason": "NodeLost", "message": message, "conditions": conditions}
    return {"apiVersion": POD.api_version, "kind": POD.kind, "metadata": metadata, "status": status}


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
        ready_since=seconds(ready.get("lastTransitionTime")) if ready.get("status") == "True" else None,
        ready_message=ready.get("message") or "",
        unschedulable=scheduled.get("message") or "no node fits" if unschedulable else None,
        disrupted=f"{disrupted.get('reason')}: {disrupted.get('message')}" if disrupted.get("status") == "True" else None,
        lost=_is_lost(status, conditions),
        evicted_after_s=_evicted_after_s(manifest),
        containers=tuple(_container(one, limits.get(one["name"])) for one in statuses),
    )


def _is_lost(status: Mapping[str, Any], conditions: Mapping[str, Mapping[str, Any]]) -> bool:
    """The node controller takes back the Ready condition when the node falls silent, and what the kubelet last said of the
    containers stands. A kubelet writes both at once, and only a readiness gate makes them differ otherwise."""
    ready, containers = conditions.get("Ready", {}), status.get("containerStatuses") or ()
    if status.get("phase") != "Running" or ready.get("status") != "False" or ready.get("reason") == "ReadinessGatesNotReady":
        return False
    if conditions.get("ContainersReady", {}).get("status") == "False":
        return False
    return bool(containers) and all(one.get("ready") and "running" in (one.get("state") or {}) for one in containers)


def _evicted_after_s(manifest: Manifest) -> int | None:
    for one in manifest["spec"].get("tolerations") or ():
        if one.get("effect") in (None, "NoExecute") and one.get("key") in (None, "node.kubernetes.io/unreachable"):
            stays: int | None = one.get("tolerationSeconds")
            return stays
    return EVICTED_AFTER_S


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
        message=TerminationMessage.parse(state.get("message") or ""),
        finished=state.get("finishedAt"),
    )


def age_s(since: str | None, now: float) -> float:
    """Seconds since then; 0 where unknown."""
    began = seconds(since)
    return max(0.0, now - began) if began is not None else 0.0

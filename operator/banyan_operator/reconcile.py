"""One resource and the world around it, into what to do now: the heart of the operator.

Pure and level-triggered. It reads no clock, keeps nothing between calls, and may be run twice, late, or after any crash:
what it needs to know stands in the resource, in the children, and in the status it wrote earlier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from banyan_operator import api
from banyan_operator.api import BatchJob, InferenceServer, Metadata, Resource, SpecError
from banyan_operator.desired import batch as desired_batch
from banyan_operator.desired import server as desired_server
from banyan_operator.desired.difference import Difference, difference, find
from banyan_operator.desired.metadata import SPEC_HASH
from banyan_operator.desired.references import references
from banyan_operator.observed import batch as observed_batch
from banyan_operator.observed import news
from banyan_operator.observed import server as observed_server
from banyan_operator.observed.batch import CANCEL, EXPIRE, Stop
from banyan_operator.observed.conditions import Finding, condition, is_true, no, refused, yes
from banyan_operator.plan import Event, Manifest, Plan, Ref, Settings, World
from banyan_operator.times import seconds

WATCH_S: Final = {"cluster": 10.0, "local": 1.0}
"""How often what is moving is looked at: progress and loading are seen by asking, not by a watch."""
MISSING_S: Final = 30.0
WAIT_S: Final = 5.0
KEEP_JOB_S: Final = 600.0  # a finished Job stays so long, for its pods' logs

_MISSING: Final = {"Secret": "SecretNotFound", "ConfigMap": "ConfigMapNotFound", "PersistentVolumeClaim": "ClaimNotFound"}


def reconcile(resource: Manifest, world: World, settings: Settings) -> Plan:
    """What to do now for `resource`, an InferenceServer or BatchJob as the API server stores it."""
    prior: Mapping[str, Any] = resource.get("status") or {}
    metadata = Metadata.of(resource)
    if metadata.deleting:
        return Plan(status=_if_changed({**prior, "phase": "Terminating"}, prior))
    try:
        parsed = api.parse(resource)
    except SpecError as error:
        return _unreadable(resource["kind"], metadata, error, world, prior)
    if isinstance(parsed, InferenceServer):
        return _server(parsed, world, prior, settings)
    return _batch(parsed, world, prior, settings)


# --- InferenceServer ---


def _server(server: InferenceServer, world: World, prior: Mapping[str, Any], settings: Settings) -> Plan:
    live = find(world.children, Ref("apps/v1", "Deployment", server.metadata.name))
    wanted: tuple[Manifest, ...] = ()
    changes = Difference()
    accepted = _acceptable(server, world, settings)
    if accepted.status == "True":
        try:
            wanted = desired_server.children(server, settings, live)
            changes = difference(server, wanted, world.children)
            accepted = _carried_out(accepted, changes, world)
        except SpecError as error:
            accepted = no("InvalidSpec", str(error))
    deployment = next((manifest for manifest in wanted if manifest["kind"] == "Deployment"), None)
    status = observed_server.status(server, accepted, deployment, world, prior, settings).dump()
    act = not server.spec.paused and not changes.conflicts
    events = [*changes.events, *_rollout_events(deployment, live)] if act else []
    return Plan(
        apply=tuple(changes.apply) if act else (),
        delete=tuple(changes.delete) if act and accepted.status == "True" else (),
        status=_if_changed(status, prior),
        events=(*events, *news.of_server(prior, status)),
        requeue_after_s=_look_again(server, accepted, changes, status, settings),
    )


def _rollout_events(wanted: Manifest | None, live: Manifest | None) -> list[Event]:
    if wanted is None:
        return []
    if live is None:
        return [Event("Normal", "Created", f"Deployment {wanted['metadata']['name']} with {wanted['spec']['replicas']} replicas")]
    events = []
    before, after = (_revision(one) for one in (live, wanted))
    if before != after:
        events.append(Event("Normal", "RolloutStarted", f"Revision {before or 'unknown'} is to be replaced by {after}"))
    had, wants = live["spec"].get("replicas"), wanted["spec"]["replicas"]
    if had != wants:
        events.append(Event("Normal", "Scaled", f"From {had} to {wants} replicas"))
    return events


def _revision(deployment: Manifest) -> str:
    return str((deployment["spec"]["template"].get("metadata", {}).get("annotations") or {}).get(SPEC_HASH, ""))


def _look_again(
    server: InferenceServer, accepted: Finding, changes: Difference, status: Mapping[str, Any], settings: Settings
) -> float | None:
    if accepted.reason in _MISSING.values():
        return MISSING_S
    if changes.waiting:
        return WAIT_S
    settled = condition({"status": status}, "Progressing").get("reason") == "UpToDate"
    ready = is_true({"status": status}, "Ready")
    return None if accepted.status == "False" or (settled and ready) or server.spec.paused else WATCH_S[settings.platform]


# --- BatchJob ---


def _batch(job: BatchJob, world: World, prior: Mapping[str, Any], settings: Settings) -> Plan:
    if observed_batch.is_terminal(prior):
        return _finished(job, world, prior)
    seen = observed_batch.see(job, world, settings)
    hold, stop = _hold(job, world, seen.work), _stop(job, world, prior)
    accepted = _acceptable(job, world, settings)
    over = seen.complete or seen.failed
    changes = Difference()
    if not over and (accepted.status == "True" or (stop is not None and seen.work is not None)):
        try:
            suspend = job.spec.suspend or hold is not None or stop is not None
            url = world.server_url or _server_url(job, world)
            wanted = desired_batch.children(job, settings, server_url=url, suspend=suspend, live=seen.work)
            changes = difference(job, _as_far_as_possible(wanted, seen.work, suspend), world.children)
            if accepted.status == "True":
                accepted = _carried_out(accepted, changes, world)
        except SpecError as error:
            accepted = no("InvalidSpec", str(error))
    status = observed_batch.status(job, accepted, hold, stop, seen, world, prior, settings).dump()
    return Plan(
        apply=() if changes.conflicts else tuple(changes.apply),
        delete=tuple(name for name in changes.delete if name.kind != "Job") if accepted.status == "True" else (),
        status=_if_changed(status, prior),
        events=(*changes.events, *news.of_batch(prior, status)),
        requeue_after_s=_look_again_at_batch(job, accepted, hold, changes, world, status, settings),
    )


def _as_far_as_possible(wanted: Sequence[Manifest], live: Manifest | None, suspend: bool) -> list[Manifest]:
    """What can be applied of the wanted children: a Job is not made before it may run, and of one that exists only `suspend`
    changes, because a Job's other fields are fixed. Further changes of the spec wait for a new BatchJob."""
    found = [manifest for manifest in wanted if manifest["kind"] != "Job"]
    work = next(manifest for manifest in wanted if manifest["kind"] == "Job")
    if live is None:
        return found if suspend else [*found, work]
    annotations = live["metadata"].get("annotations") or {}
    kept = {**work["metadata"], "annotations": {key: annotations.get(key, value) for key, value in work["metadata"]["annotations"].items()}}
    return [*found, {**work, "metadata": kept, "spec": {**live["spec"], "suspend": suspend}}]


def _hold(job: BatchJob, world: World, work: Manifest | None) -> Finding | None:
    """Why the work has to wait for its InferenceServer."""
    if job.spec.server_ref is None:
        return None
    name = job.spec.server_ref.name
    if world.server is None or world.server["metadata"].get("deletionTimestamp"):
        return no("WaitingForServer", f"InferenceServer {name} does not exist in namespace {job.metadata.namespace}. Create it.")
    accepted = condition(world.server, "Accepted")
    if accepted.get("status") == "False":
        return no("WaitingForServer", f"InferenceServer {name} is not accepted: {accepted.get('message')}")
    if work is not None and not work["spec"].get("suspend"):
        return None  # it has begun: the worker itself waits out what is temporary
    if not is_true(world.server, "Available"):
        why = condition(world.server, "Available").get("message") or "no status yet"
        return no("WaitingForServer", f"InferenceServer {name} takes no requests yet: {why}")
    return None


def _stop(job: BatchJob, world: World, prior: Mapping[str, Any]) -> Stop | None:
    if job.spec.cancel:
        return CANCEL
    ends = observed_batch.deadline(job, prior)
    return EXPIRE if ends is not None and world.now >= ends else None


def _server_url(job: BatchJob, world: World) -> str | None:
    if job.spec.server_ref is None or world.server is None:
        return None
    port = ((world.server.get("spec") or {}).get("service") or {}).get("port", 80)
    return f"http://{job.spec.server_ref.name}.{job.metadata.namespace}.svc:{port}"


def _finished(job: BatchJob, world: World, prior: Mapping[str, Any]) -> Plan:
    """Nothing changes any more; what is left of the run goes away in time."""
    ended = seconds(prior.get("completionTime")) or world.now
    ttl = job.spec.ttl_seconds_after_finished
    if ttl is not None and world.now >= ended + ttl:
        return Plan(delete=(Ref(api.API_VERSION, "BatchJob", job.metadata.name),))
    due = [] if ttl is None else [ended + ttl]
    delete: tuple[Ref, ...] = ()
    if find(world.children, Ref("batch/v1", "Job", desired_batch.work_name(job))) is not None:
        if world.now >= ended + KEEP_JOB_S:
            delete = tuple(name for name in difference(job, [], world.children).delete if name.kind == "Job")
        else:
            due.append(ended + KEEP_JOB_S)
    return Plan(delete=delete, requeue_after_s=max(1.0, min(due) - world.now) if due else None)


def _look_again_at_batch(
    job: BatchJob, accepted: Finding, hold: Finding | None, changes: Difference, world: World, status: Mapping[str, Any], settings: Settings
) -> float | None:
    due: list[float] = []
    ends = observed_batch.deadline(job, status)
    if status["phase"] in observed_batch.TERMINAL:
        due.append(KEEP_JOB_S if job.spec.ttl_seconds_after_finished is None else min(KEEP_JOB_S, job.spec.ttl_seconds_after_finished))
    elif accepted.reason in _MISSING.values():
        due.append(MISSING_S)
    elif accepted.status == "True" and (hold is not None or changes.waiting):
        due.append(min(WAIT_S, WATCH_S[settings.platform]))
    elif accepted.status == "True" and status["phase"] != "Suspended":
        due.append(WATCH_S[settings.platform])
    if ends is not None and status["phase"] not in observed_batch.TERMINAL:
        due.append(max(1.0, ends - world.now))
    return min(due, default=None)


# --- both ---


def _acceptable(resource: Resource, world: World, settings: Settings) -> Finding:
    """Whether the spec can be carried out: all of it is built, and what it refers to exists."""
    if problems := api.unsupported(resource, settings.platform):
        return no("Unsupported", "; ".join(map(str, problems)) + ".")
    paths = references(resource)
    for missing in sorted(world.missing & paths.keys(), key=str):
        text = f"{missing.kind} {missing.name} ({paths[missing]}) does not exist in namespace {resource.metadata.namespace}. Create it."
        return no(_MISSING[missing.kind], text)
    if isinstance(resource, InferenceServer) and resource.spec.ingress is not None and settings.platform == "local":
        return yes("Accepted", "The spec can be carried out; spec.ingress has no effect in local mode.")
    return yes("Accepted", "The spec can be carried out.")


def _carried_out(accepted: Finding, changes: Difference, world: World) -> Finding:
    """Whether nothing is in the way of what is to be applied."""
    if changes.conflicts:
        names = ", ".join(f"{one.kind} {one.name}" for one in changes.conflicts)
        text = f"{names} exists and belongs to somebody else. Rename this resource, delete the object, or annotate it"
        return no("NameConflict", f"{text} with serving.banyan.dev/adopt=true.")
    for name, said in sorted(world.refused.items(), key=str):
        reason = "QuotaExceeded" if "exceeded quota" in said else "InvalidSpec"
        return no(reason, f"the API server refuses {name.kind} {name.name}: {said}")
    return accepted


def _unreadable(kind: str, metadata: Metadata, error: SpecError, world: World, prior: Mapping[str, Any]) -> Plan:
    """The spec breaks the schema: children stay as they are, and no time will heal it."""
    finding = no("InvalidSpec", str(error))
    if kind == "InferenceServer":
        status = refused(prior, {"Accepted": finding, "Ready": finding}, "Failed", metadata.generation, world.now)
        return Plan(status=_if_changed(status, prior), events=tuple(news.of_server(prior, status)))
    if observed_batch.is_terminal(prior):
        return Plan()
    phase = prior.get("phase") or "Pending"
    status = refused(prior, {"Accepted": finding, "Running": finding, "Complete": finding}, phase, metadata.generation, world.now)
    return Plan(status=_if_changed(status, prior), events=tuple(news.of_batch(prior, status)))


def _if_changed(status: Mapping[str, Any], prior: Mapping[str, Any]) -> Mapping[str, Any] | None:
    return None if status == prior else status

"""The status of an InferenceServer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from banyan_operator.api import InferenceServer
from banyan_operator.api.status import Address, InferenceServerStatus, ServedModel, ServerPhase
from banyan_operator.desired.metadata import SPEC_HASH, selector
from banyan_operator.kube.objects import condition, is_true
from banyan_operator.observed import diagnosis
from banyan_operator.observed.conditions import Finding, conditions, no, unknown, yes
from banyan_operator.observed.diagnosis import Diagnosis, View
from banyan_operator.observed.failures import kept, last_failure
from banyan_operator.observed.pods import Pod, pods
from banyan_operator.plan import Manifest, Settings, World

RESTART_LOOP: Final = 3  # restarts of the current pods from which a server counts as degraded


@dataclass(frozen=True, slots=True)
class Seen:
    """What the world shows of one server, counted."""

    deployment: Manifest | None
    wanted: int
    current: tuple[Pod, ...]  # active pods of the revision that is wanted, newest first
    others: tuple[Pod, ...]  # active pods of earlier revisions
    leaving: tuple[Pod, ...]  # deleted, still there
    diagnosis: Diagnosis | None
    revision: str
    rolled_back: bool  # the Deployment's deadline has passed

    @property
    def ready_current(self) -> int:
        return sum(pod.ready for pod in self.current)

    @property
    def ready_any(self) -> int:
        return self.ready_current + sum(pod.ready for pod in self.others)

    @property
    def rolling(self) -> bool:
        return bool(self.others)

    @property
    def complete(self) -> bool:
        return self.ready_current >= self.wanted and not self.others and len(self.current) <= self.wanted

    @property
    def restarts(self) -> int:
        return sum(container.restarts for pod in self.current for container in pod.containers)


def status(
    server: InferenceServer, accepted: Finding, desired: Manifest | None, world: World, prior: Mapping[str, Any], settings: Settings
) -> InferenceServerStatus:
    """The whole status. `desired`: the Deployment as rendered now, None where the spec cannot be rendered; `prior`: as it was."""
    seen = see(server, desired, world, settings)
    addresses, route = _addresses(server, world, settings)
    found: dict[str, Finding] = {
        "Accepted": accepted,
        "Available": _available(seen),
        "Progressing": _progressing(server, seen),
        "Ready": _ready(server, accepted, seen, route),
        "Degraded": _degraded(seen),
    }
    if route is not None:
        found["RouteReady"] = route
    readyz = world.readyz or {}
    model = readyz.get("model") or {}
    return InferenceServerStatus(
        observed_generation=server.metadata.generation,
        phase=_phase(server, found, seen),
        conditions=conditions(prior, found, server.metadata.generation, world.now),
        replicas=len(seen.current) + len(seen.others),
        ready_replicas=seen.ready_any,
        updated_replicas=len(seen.current),
        desired_replicas=seen.wanted,
        ready=f"{seen.ready_current}/{seen.wanted}",
        selector=",".join(f"{key}={value}" for key, value in sorted(selector(server).items())),
        url=next((address.url for address in addresses if address.type != "Internal"), addresses[0].url),
        addresses=addresses,
        served_names=server.served_names,
        accelerator=_accelerator(server) or "cpu",
        model=ServedModel(
            uri=server.spec.model.uri,
            revision=(prior.get("model") or {}).get("revision"),
            context_length=model.get("contextLength") or _unless_rolled(prior, seen, "model", "contextLength"),
        ),
        current_revision=seen.revision if seen.complete and seen.revision else prior.get("currentRevision"),
        update_revision=seen.revision or prior.get("updateRevision"),
        restarts=seen.restarts,
        last_failure=last_failure((*seen.current, *seen.others), _view(server, world, settings, rolling=seen.rolling)) or kept(prior),
        runtime_version=readyz.get("version") or _unless_rolled(prior, seen, "runtimeVersion"),
    )


def see(server: InferenceServer, desired: Manifest | None, world: World, settings: Settings) -> Seen:
    """Count and sort the pods, and find what is wrong with them."""
    deployment = next(
        (one for one in world.children if one["kind"] == "Deployment" and one["metadata"]["name"] == server.metadata.name), None
    )
    rendered = desired if desired is not None and not server.spec.paused else deployment
    revision = ((rendered or {}).get("spec", {}).get("template", {}).get("metadata", {}).get("annotations") or {}).get(SPEC_HASH, "")
    known = pods(world.children)
    current = tuple(pod for pod in known if pod.active and pod.revision == revision)
    others = tuple(pod for pod in known if pod.active and pod.revision != revision)
    leaving = tuple(pod for pod in known if pod.deleted)
    failed = tuple(pod for pod in known if pod.revision == revision and not pod.active and not pod.deleted)
    view = _view(server, world, settings, rolling=bool(others))
    missing = len(current) < server.spec.replicas
    found = diagnosis.creation_diagnosis(_creation_errors(world.children, revision)) if missing else None
    found = found or diagnosis.worst([pod for pod in current if not pod.ready], view)
    if found is None and missing:
        found = diagnosis.worst(failed, view) or diagnosis.worst(leaving, view)
    return Seen(
        deployment=deployment,
        wanted=server.spec.replicas,
        current=current,
        others=others,
        leaving=leaving,
        diagnosis=found,
        revision=revision,
        rolled_back=condition(deployment, "Progressing").get("reason") == "ProgressDeadlineExceeded",
    )


def _view(server: InferenceServer, world: World, settings: Settings, *, rolling: bool) -> View:
    return View(
        now=world.now,
        startup_timeout_s=server.spec.probes.startup_timeout_seconds,
        accelerators=_accelerator(server),
        rolling=rolling,
        local=settings.platform == "local",
        readyz=world.readyz,
        model_uri=server.spec.model.uri,
        events=world.events,
    )


def _creation_errors(children: Sequence[Manifest], revision: str) -> list[str]:
    """What the ReplicaSet (of this revision) or the Deployment says about pods that it could not make."""
    found = []
    for one in children:
        if one["kind"] == "ReplicaSet":
            annotations = one["spec"].get("template", {}).get("metadata", {}).get("annotations") or {}
            if annotations.get(SPEC_HASH) != revision:
                continue
        elif one["kind"] != "Deployment":
            continue
        if is_true(one, "ReplicaFailure"):
            found.append(str(condition(one, "ReplicaFailure").get("message") or ""))
    return found


# --- conditions ---


def _available(seen: Seen) -> Finding:
    if seen.ready_any:
        return yes("MinimumReplicasAvailable", f"{seen.ready_any} of {seen.wanted} replicas take requests.")
    if seen.wanted == 0:
        return no("ScaledToZero", "spec.replicas is 0.")
    return no("NoReadyReplicas", seen.diagnosis.message if seen.diagnosis else "No pod exists yet.")


def _progressing(server: InferenceServer, seen: Seen) -> Finding:
    if server.spec.paused:
        return no("Paused", "spec.paused is true: changes are not carried out.")
    if seen.complete:
        return no("UpToDate", f"Revision {seen.revision} runs everywhere.")
    if seen.rolled_back:
        why = seen.diagnosis.message if seen.diagnosis else ""
        return no("DeadlineExceeded", f"No progress for {server.spec.rollout.progress_deadline_seconds} s. {why}".strip())
    if seen.rolling:
        old = ", ".join(sorted({pod.revision or "unknown" for pod in seen.others}))
        why = f" {seen.diagnosis.message}" if seen.diagnosis else ""
        return yes("RollingOut", f"Revision {old} is being replaced by {seen.revision}: {seen.ready_current} of {seen.wanted} ready.{why}")
    if len(seen.current) != seen.wanted:
        return yes("Scaling", f"{len(seen.current)} pods exist, {seen.wanted} are wanted.")
    return yes("Loading", seen.diagnosis.message if seen.diagnosis else f"{seen.ready_current} of {seen.wanted} replicas are ready.")


def _ready(server: InferenceServer, accepted: Finding, seen: Seen, route: Finding | None) -> Finding:
    if accepted.status != "True":
        return no(accepted.reason, accepted.message)
    if seen.wanted == 0:
        return yes("ScaledToZero", "spec.replicas is 0.")
    if seen.ready_current < seen.wanted:
        if seen.diagnosis is not None:
            return no(seen.diagnosis.reason, seen.diagnosis.message)
        if seen.others:
            return no("RollingOut", f"Revision {seen.revision} is being rolled out: {seen.ready_current} of {seen.wanted} ready.")
        return unknown("Reconciling", "Waiting for pods to be created.")
    if route is not None and route.status != "True":
        return no("RouteNotReady", route.message)
    return yes("Ready", f"{seen.ready_current} of {seen.wanted} replicas are ready.")


def _degraded(seen: Seen) -> Finding:
    if seen.diagnosis is not None and seen.diagnosis.reason == "OOMKilled":
        return yes("OOMKilled", seen.diagnosis.message)
    if seen.diagnosis is not None and seen.diagnosis.end is not None and seen.restarts >= RESTART_LOOP:
        return yes("RestartLoop", f"{seen.restarts} restarts. {seen.diagnosis.message}")
    if seen.ready_any and seen.diagnosis is not None and seen.diagnosis.reason not in diagnosis.EARLY:
        return yes("SomeReplicasUnavailable", seen.diagnosis.message)
    return no("AsExpected", "Nothing fails.")


def _phase(server: InferenceServer, found: Mapping[str, Finding], seen: Seen) -> ServerPhase:
    if server.spec.paused:
        return "Paused"
    if found["Accepted"].status == "False" or (found["Progressing"].reason == "DeadlineExceeded" and not seen.ready_any):
        return "Failed"
    if seen.wanted == 0 and not seen.ready_any:
        return "Stopped"
    if seen.rolling:
        return "Updating"
    if found["Degraded"].status == "True" and seen.ready_any:
        return "Degraded"
    if seen.ready_current >= seen.wanted:
        return "Ready"
    running = any(container.running_since for pod in seen.current for container in pod.containers)
    return "Loading" if running else "Pending"


# --- the rest ---


def _addresses(server: InferenceServer, world: World, settings: Settings) -> tuple[tuple[Address, ...], Finding | None]:
    """Where the server is reached, and whether the way from outside stands (None where none is wanted)."""
    name, namespace, port = server.metadata.name, server.metadata.namespace, server.spec.service.port
    own = world.server_url or f"http://{name}.{namespace}.svc" + ("" if port == 80 else f":{port}")
    found = [Address(type="Internal", url=own)]
    service = next((one for one in world.children if one["kind"] == "Service" and one["metadata"]["name"] == name), None)
    for point in _points(service):
        host = point.get("hostname") or point.get("ip")
        if host:
            found.append(Address(type="LoadBalancer", url=f"http://{host}" + ("" if port == 80 else f":{port}")))
    ingress = server.spec.ingress
    if ingress is None or settings.platform == "local":
        return tuple(found), None
    scheme = "https" if ingress.tls_secret_name else "http"
    live = next((one for one in world.children if one["kind"] == "Ingress" and one["metadata"]["name"] == name), None)
    if not _points(live):
        step = "Check that an ingress controller serves " + (f"class {ingress.class_name}" if ingress.class_name else "the default class")
        return tuple(found), no("NoAddress", f"the Ingress has no address yet. {step}.")
    path = ingress.path.rstrip("/")
    found += [Address(type="Ingress", url=f"{scheme}://{host}{path}") for host in ingress.hosts if not host.startswith("*")]
    return tuple(found[:16]), yes("Routed", "The Ingress has an address.")


def _points(manifest: Manifest | None) -> Sequence[Mapping[str, Any]]:
    return (((manifest or {}).get("status") or {}).get("loadBalancer") or {}).get("ingress") or ()


def _accelerator(server: InferenceServer) -> str:
    accelerator = server.spec.accelerator
    return f"{accelerator.count} x {accelerator.resource_name}" if accelerator.count else ""


def _unless_rolled(prior: Mapping[str, Any], seen: Seen, *path: str) -> Any:
    """What the prior status says, as long as it speaks of the revision that is wanted now."""
    value: Any = prior if prior.get("updateRevision") == seen.revision else {}
    for key in path:
        value = (value or {}).get(key)
    return value

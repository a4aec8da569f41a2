"""The status of an InferenceServer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from banyan_operator.api import InferenceServer
from banyan_operator.api.status import Address, InferenceServerStatus, ServedModel, ServerPhase
from banyan_operator.desired.metadata import SPEC_HASH, owner, selector
from banyan_operator.kube.addresses import in_url
from banyan_operator.kube.kinds import DEPLOYMENT, REPLICA_SET, SERVICE
from banyan_operator.kube.objects import Ref, condition, controller_uid, find_object, is_true, uid_of
from banyan_operator.observed import diagnosis
from banyan_operator.observed.answers import Readiness
from banyan_operator.observed.conditions import FORBIDDEN, Finding, conditions, messages, no, refused, said_once, unknown, yes
from banyan_operator.observed.diagnosis import Diagnosis, View
from banyan_operator.observed.failures import last_failure, recorded
from banyan_operator.observed.pods import Pod, listed, pods_of, strangers
from banyan_operator.observed.written import Written
from banyan_operator.plan import Manifest, World

SETTLED_S: Final = 2.0
"""From a pod's readiness until all nodes send it requests: its Service lists it, and their proxies learn of that."""
RESTART_LOOP: Final = 3  # restarts of the current pods from which a server counts as degraded


@dataclass(frozen=True, slots=True)
class Seen:
    """What the world shows of one server, counted. Pods are those of its own Deployment."""

    deployment: Manifest | None
    wanted: int
    enough: int  # ready replicas that make the server ready: fewer than wanted only while a rollout may take some away
    current: tuple[Pod, ...]  # active pods of the revision that is wanted, newest first
    others: tuple[Pod, ...]  # active pods of earlier revisions
    strangers: tuple[str, ...]  # pods of others that the Service sends requests to
    diagnosis: Diagnosis | None
    revision: str
    applied: bool  # the Deployment is of that revision, and of as many replicas
    late: bool  # its progress deadline has passed

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
        """All pods that are wanted, and no others, take requests."""
        rolled = self.deployment is not None and not self.others and len(self.current) <= self.wanted
        return rolled and self.ready_current >= self.wanted

    @property
    def restarts(self) -> int:
        return sum(container.restarts for pod in self.current for container in pod.containers)


def status(
    server: InferenceServer,
    accepted: Finding,
    desired: Manifest | None,
    written: Written,
    world: World,
    prior: Mapping[str, Any],
) -> InferenceServerStatus:
    """The whole status. `desired`: the Deployment as rendered now, None where the spec cannot be rendered; `prior`: as it was."""
    view = _view(server, world, prior)
    seen = see(server, desired, world, view)
    addresses, route = _addresses(server, world)
    was_ready = is_true({"status": prior}, "Ready")  # while pods follow each other it stays so
    found: dict[str, Finding] = {
        "Accepted": accepted,
        "Available": _available(server, accepted, seen, world),
        "Progressing": _progressing(server, accepted, seen, written),
        "Ready": _ready(accepted, seen, route, reached=was_ready or _reached(server, seen, world)),
        "Degraded": _degraded(seen, str(prior.get("phase"))),
        **written.found,
    }
    if route is not None:
        found["RouteReady"] = route
    found = said_once(found, ("Accepted", "Ready", "Degraded"))
    readyz = view.readyz
    return InferenceServerStatus(
        observed_generation=server.metadata.generation,
        phase=_phase(server, found, seen),
        conditions=conditions(prior, found, server.metadata.generation, world.now),
        replicas=len(seen.current) + len(seen.others),
        ready_replicas=seen.ready_any,
        updated_replicas=len(seen.current),
        desired_replicas=seen.wanted,
        ready=f"{seen.ready_any}/{seen.wanted}",
        selector=",".join(f"{key}={value}" for key, value in sorted(selector(server).items())),
        url=next((address.url for address in addresses if address.type != "Internal"), addresses[0].url),
        addresses=addresses,
        served_names=server.served_names,
        accelerator=server.spec.accelerator.text or "cpu",
        model=ServedModel(
            uri=server.spec.model.uri,
            revision=(prior.get("model") or {}).get("revision"),
            context_length=(readyz and readyz.context_length) or _unless_rolled(prior, seen, "model", "contextLength"),
        ),
        current_revision=seen.revision if seen.complete and seen.revision else prior.get("currentRevision"),
        update_revision=seen.revision or prior.get("updateRevision"),
        restarts=seen.restarts,
        last_failure=recorded(last_failure((*seen.current, *seen.others), view), prior, found),
        runtime_version=(readyz and readyz.version) or _unless_rolled(prior, seen, "runtimeVersion"),
    )


def serves_as_wanted(server: Mapping[str, Any]) -> bool:
    """Whether its status says that all replicas which are wanted take requests, be that none."""
    return is_true(server, "Ready") or (server.get("status") or {}).get("phase") == "Stopped"


def leaving(told: Mapping[str, Any], world: World, generation: int) -> dict[str, Any]:
    """The status `told` of a server that is being deleted, with what is left of it."""
    sets = [child for child in world.children if child["kind"] == REPLICA_SET.kind]
    ready = sum(pod.active and pod.ready for pod in pods_of(sets, world.children))
    what = f"The server is being deleted; {ready} of its replicas take requests."
    gone = no("Terminating", what)
    found = {"Ready": gone, "Available": yes("Terminating", what) if ready else gone}
    counted = {"readyReplicas": ready, "ready": f"{ready}/{told.get('desiredReplicas', 0)}"}
    return refused({**told, **counted}, found, str(told["phase"]), generation, world.now)


def see(server: InferenceServer, desired: Manifest | None, world: World, view: View) -> Seen:
    """Count and sort the pods, and find what is wrong with them."""
    deployment = own_deployment(server, world)
    revision = _revision(desired if desired is not None and not server.spec.paused else deployment)
    applied = deployment is not None and _revision(deployment) == revision and deployment["spec"].get("replicas") == server.spec.replicas
    sets = [] if deployment is None else [one for one in world.children if _is_set_of(deployment, one)]
    known = pods_of(sets, world.children)
    current = tuple(pod for pod in known if pod.active and pod.revision == revision)
    others = tuple(pod for pod in known if pod.active and pod.revision != revision)
    missing = len(current) < server.spec.replicas
    view = replace(view, rolling=bool(others))
    found = diagnosis.creation_diagnosis(_creation_errors(deployment, sets, revision)) if missing else None
    found = found or diagnosis.worst([pod for pod in current if not pod.ready], view)
    if found is None and missing:
        failed = [pod for pod in known if pod.revision == revision and not pod.active and pod.deleted is None]
        leaving = [pod for pod in known if pod.deleted is not None]
        # of the pods of an earlier revision only the loss of their node is news: that they go is wanted
        lost = next((one for pod in others if (one := diagnosis.node_lost(pod, view))), None)
        found = diagnosis.worst(failed, view) or diagnosis.worst(leaving, view) or lost
    return Seen(
        deployment=deployment,
        wanted=server.spec.replicas,
        enough=_enough(server, bool(others)),
        current=current,
        others=others,
        strangers=strangers(
            server.metadata.name if deployment is None else deployment["metadata"]["name"], selector(server), world.children
        ),
        diagnosis=found,
        revision=revision,
        applied=applied,
        late=applied and _is_late(deployment),
    )


def _reached(server: InferenceServer, seen: Seen, world: World) -> bool:
    """Whether requests come to enough pods. What is not known of a Service does not count against it."""
    known, ready = listed(server.metadata.name, world.children), [pod for pod in (*seen.current, *seen.others) if pod.ready]
    # a time ahead of ours by more than that says nothing: the node's clock is wrong
    settled = [pod for pod in ready if pod.ready_since is None or not -SETTLED_S <= world.now - pod.ready_since < SETTLED_S]
    return sum(known is None or pod.name in known for pod in settled) >= seen.enough


def own_deployment(server: InferenceServer, world: World) -> Manifest | None:
    """The Deployment that this very server controls, or is about to where it lost its owner; whoever else's have its name."""
    live = find_object(world.children, Ref.to(DEPLOYMENT, server.metadata.name))
    return live if live is not None and owner(server).may_change(live) else None


def _revision(workload: Manifest | None) -> str:
    """Of the pods that a Deployment or ReplicaSet makes."""
    template = ((workload or {}).get("spec") or {}).get("template") or {}
    return str(((template.get("metadata") or {}).get("annotations") or {}).get(SPEC_HASH, ""))


def _is_late(deployment: Manifest | None) -> bool:
    """Whether its progress deadline has passed, by what its controller says of this generation."""
    if deployment is None or (deployment.get("status") or {}).get("observedGeneration", 0) < deployment["metadata"].get("generation", 0):
        return False
    return condition(deployment, "Progressing").get("reason") == "ProgressDeadlineExceeded"


def _is_set_of(deployment: Manifest, child: Manifest) -> bool:
    return child["kind"] == REPLICA_SET.kind and controller_uid(child) == uid_of(deployment)


def _enough(server: InferenceServer, rolling: bool) -> int:
    """How many replicas have to take requests: all, but for those that a rollout is allowed to take away; one at least."""
    wanted, rollout = server.spec.replicas, server.spec.rollout
    if not rolling or rollout.strategy != "RollingUpdate" or not wanted:
        return wanted
    allowed = rollout.max_unavailable
    spare = allowed if isinstance(allowed, int) else wanted * int(allowed.rstrip("%")) // 100
    return max(1, wanted - spare)


def _view(server: InferenceServer, world: World, prior: Mapping[str, Any]) -> View:
    return View(
        now=world.now,
        startup_timeout_s=server.spec.probes.startup_timeout_seconds,
        accelerators=server.spec.accelerator.text,
        readyz=Readiness.of(world.readyz),
        default_image=server.spec.runtime.image is None,
        model_uri=server.spec.model.uri,
        events=world.events,
        told=messages(prior),
    )


def _creation_errors(deployment: Manifest | None, sets: Sequence[Manifest], revision: str) -> list[str]:
    """What the ReplicaSet (of this revision) or the Deployment says about pods that it could not make."""
    asked = [*(one for one in sets if _revision(one) == revision), *([deployment] if deployment is not None else [])]
    return [str(condition(one, "ReplicaFailure").get("message") or "") for one in asked if is_true(one, "ReplicaFailure")]


# --- conditions ---


def _available(server: InferenceServer, accepted: Finding, seen: Seen, world: World) -> Finding:
    if seen.ready_any:
        service = find_object(world.children, Ref.to(SERVICE, server.metadata.name))
        if accepted.reason == "NameConflict" and (service is None or not owner(server).may_change(service)):
            return no("NameConflict", accepted.message)
        return yes("MinimumReplicasAvailable", f"{seen.ready_any} of {seen.wanted} replicas take requests.")
    if seen.wanted == 0:
        return no("ScaledToZero", "spec.replicas is 0.")
    return no("NoReadyReplicas", seen.diagnosis.message if seen.diagnosis else "No pod exists yet.")


def _progressing(server: InferenceServer, accepted: Finding, seen: Seen, written: Written) -> Finding:
    found = _rollout(server, accepted, seen)
    if written.waiting and found.reason == "UpToDate":
        found = yes("Recreating", found.message)
    return replace(found, message=f"{found.message} {written.pending}") if written.pending else found


def _rollout(server: InferenceServer, accepted: Finding, seen: Seen) -> Finding:
    if server.spec.paused:
        return no("Paused", "spec.paused is true: changes are not carried out.")
    if seen.deployment is None:
        if accepted.status != "True":
            return no(accepted.reason, "No Deployment exists, and none can be made now.")
        return yes("Creating", "The Deployment does not exist yet.")
    if _held(accepted, seen):
        return no(accepted.reason, f"The spec is not carried out; what was made before it stays: {seen.ready_any} replicas take requests.")
    if seen.complete:
        return no("UpToDate", f"Revision {seen.revision} runs everywhere." if seen.wanted else "No replicas are wanted, and none exist.")
    why = f" {seen.diagnosis.message}" if seen.diagnosis else ""
    if seen.late:
        return no("DeadlineExceeded", f"No progress for {server.spec.rollout.progress_deadline_seconds} s.{why}")
    if seen.rolling:
        old = ", ".join(sorted({pod.revision or "unknown" for pod in seen.others}))
        return yes("RollingOut", f"Revision {old} is being replaced by {seen.revision}: {seen.ready_current} of {seen.wanted} ready.{why}")
    if len(seen.current) != seen.wanted:
        return yes("Scaling", f"{len(seen.current)} pods exist, {seen.wanted} are wanted.{why}")
    return yes("Loading", seen.diagnosis.message if seen.diagnosis else f"{seen.ready_current} of {seen.wanted} replicas are ready.")


def _held(accepted: Finding, seen: Seen) -> bool:
    """Whether something is in the way of what the Deployment is to become: nothing moves until that is mended."""
    return accepted.status != "True" and not seen.applied


def _ready(accepted: Finding, seen: Seen, route: Finding | None, *, reached: bool) -> Finding:
    """Whether the spec holds and enough replicas take requests, of whichever revision: how far a rollout is, Progressing tells."""
    enough = seen.deployment is not None and seen.ready_any >= seen.enough
    # what only the operator is not allowed to do takes nothing from a server that serves
    if accepted.status != "True" and not (enough and accepted.reason == FORBIDDEN):
        return no(accepted.reason, accepted.message)
    if seen.deployment is None:
        return unknown("Reconciling", "The Deployment does not exist yet.")
    if seen.wanted == 0:
        return no("ScaledToZero", "spec.replicas is 0: nothing takes requests.")
    if not enough:
        if seen.diagnosis is not None:
            return no(seen.diagnosis.reason, seen.diagnosis.message)
        if seen.others:
            return no(
                "RollingOut", f"{seen.ready_any} of {seen.wanted} replicas take requests while revision {seen.revision} is rolled out."
            )
        return unknown("Reconciling", "Waiting for pods to be created.")
    if not reached:
        return no(
            "EndpointsPending", f"{seen.ready_any} of {seen.wanted} replicas are ready; their Service is about to send them requests."
        )
    if route is not None and route.status != "True":
        return no("RouteNotReady", route.message)
    if _held(accepted, seen):
        text = f"{seen.ready_any} replicas take requests; the spec as it is now is not carried out"
        return yes(accepted.reason, f"{text}: {accepted.message}")
    if seen.others:
        text = f"{seen.ready_any} of {seen.wanted} replicas take requests; {seen.ready_current} of them run revision {seen.revision}"
        why = f" {seen.diagnosis.message}" if seen.diagnosis and seen.diagnosis.reason not in diagnosis.EARLY else ""
        return yes("RollingOut", f"{text}, which is being rolled out.{why}")
    return yes("Ready", f"{seen.ready_any} of {seen.wanted} replicas take requests.")


def _degraded(seen: Seen, was: str) -> Finding:
    """`was`: the phase before. What takes no requests just behind its start has not failed, as it has where it took some."""
    if seen.diagnosis is not None and seen.diagnosis.reason == "OOMKilled":
        return yes("OOMKilled", seen.diagnosis.message)
    if seen.diagnosis is not None and seen.diagnosis.end is not None and seen.restarts >= RESTART_LOOP:
        return yes("RestartLoop", seen.diagnosis.message)
    if seen.ready_any and seen.diagnosis is not None and seen.diagnosis.reason not in diagnosis.EARLY:
        return yes("SomeReplicasUnavailable", seen.diagnosis.message)
    fell = seen.diagnosis is not None and seen.diagnosis.reason == "NotReady" and was in ("Ready", "Degraded")
    if seen.diagnosis is not None and (fell or seen.diagnosis.end is not None):
        return yes(seen.diagnosis.reason, seen.diagnosis.message)
    if seen.strangers:
        names = ", ".join(seen.strangers[:5]) + (", …" if len(seen.strangers) > 5 else "")
        text = f"pods that are not of this server carry its labels, so its Service sends them requests: {names}"
        return yes("ForeignPods", f"{text}. Delete them or take the labels off. They do not count as replicas.")
    return no("AsExpected", "Nothing fails.")


def _phase(server: InferenceServer, found: Mapping[str, Finding], seen: Seen) -> ServerPhase:
    late = found["Progressing"].reason == "DeadlineExceeded"
    accepted = found["Accepted"]
    if server.spec.paused:
        return "Paused"
    if (accepted.status == "False" and accepted.reason != FORBIDDEN) or (late and not seen.ready_any):
        return "Failed"
    if seen.wanted == 0 and seen.deployment is not None and not seen.ready_any:
        return "Stopped"
    if (late or _held(accepted, seen) or found["Degraded"].status == "True") and seen.ready_any:
        return "Degraded"
    if seen.rolling and not _held(accepted, seen):
        return "Updating"
    if seen.deployment is not None and seen.ready_current >= seen.wanted:
        return "Ready"
    if found["Degraded"].status == "True" and found["Degraded"].reason != "ForeignPods":
        return "Degraded"  # through all restarts, as long as it has not come up again
    running = any(container.running_since and not pod.lost for pod in seen.current for container in pod.containers)
    return "Loading" if running else "Pending"


# --- the rest ---


def _addresses(server: InferenceServer, world: World) -> tuple[tuple[Address, ...], Finding | None]:
    """Where the server is reached, and whether the way from outside stands (None where none is wanted)."""
    name, namespace, port = server.metadata.name, server.metadata.namespace, server.spec.service.port
    own = f"http://{name}.{namespace}.svc" + ("" if port == 80 else f":{port}")
    found = [Address(type="Internal", url=own)]
    service = next((one for one in world.children if one["kind"] == "Service" and one["metadata"]["name"] == name), None)
    for point in _points(service):
        host = point.get("hostname") or point.get("ip")
        if host:
            found.append(Address(type="LoadBalancer", url=f"http://{in_url(host)}" + ("" if port == 80 else f":{port}")))
    ingress = server.spec.ingress
    if ingress is None:
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


def _unless_rolled(prior: Mapping[str, Any], seen: Seen, *path: str) -> Any:
    """What the prior status says, as long as it speaks of the revision that is wanted now."""
    value: Any = prior if prior.get("updateRevision") == seen.revision else {}
    for key in path:
        value = (value or {}).get(key)
    return value

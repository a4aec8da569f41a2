"""An InferenceServer: as many replicas of its pod template as it wants, behind one proxy; an edit replaces them one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from banyan_operator.api import InferenceServer, SpecError
from banyan_operator.api.status import Address, InferenceServerStatus, ServedModel, ServerPhase
from banyan_operator.desired.metadata import SPEC_HASH
from banyan_operator.desired.server import pod_template
from banyan_operator.kube.addresses import SERVER_PORT
from banyan_operator.kube.kinds import Manifest
from banyan_operator.local.pod import Machine, Pod
from banyan_operator.local.proxy import Proxy
from banyan_operator.local.runner import SETTINGS, Runner
from banyan_operator.observed import diagnosis
from banyan_operator.observed.answers import Readiness
from banyan_operator.observed.conditions import Finding, conditions, no, unknown, yes
from banyan_operator.observed.diagnosis import Diagnosis, View
from banyan_operator.observed.failures import last_failure, recorded


def replica_count(server: InferenceServer) -> int:
    """How many replicas are wanted."""
    return server.spec.replicas


def targets(replicas: Sequence[Pod]) -> list[int]:
    """Where the proxy sends requests: ports of the replicas that take them."""
    return [replica.ports[SERVER_PORT] for replica in replicas if replica.ready]


@dataclass(frozen=True, slots=True)
class Step:
    """What brings a set of replicas nearer to what is wanted."""

    start: int = 0
    stop: tuple[Pod, ...] = ()


def next_step(replicas: Sequence[Pod], revision: str, wanted: int, *, surge: bool, recreate: bool) -> Step:
    """`replicas`: oldest first, those that are stopping too. `surge`: a new one is started before an old one is stopped, else after.
    `recreate`: all old ones go before new ones come."""
    active = [one for one in replicas if not one.stopping]
    old = [one for one in active if one.revision != revision]
    new = [one for one in active if one.revision == revision]
    if recreate and old:
        return Step(stop=tuple(old))
    if recreate and len(active) < len(replicas):
        return Step()
    stop = sorted(new, key=lambda one: one.ready, reverse=True)[wanted:]  # the ready and oldest stay
    stop += [one for one in old if not one.ready]
    spare = sum(one.ready for one in active if one not in stop) - (wanted if surge else max(wanted - 1, 0))
    stop += [one for one in old if one.ready][: max(0, spare)]
    room = wanted + surge - (len(active) - len(stop))
    return Step(start=max(0, min(wanted - len(new), room)), stop=tuple(stop))


class ServerRunner(Runner):
    """`proxy` stands from the start, so that its URL answers with a reason while the server loads."""

    def __init__(self, resource: Manifest, machine: Machine, proxy: Proxy) -> None:
        super().__init__(resource, machine)
        self.proxy = proxy
        self._template: Manifest | None = None
        self._moved: tuple[object, float] = None, 0.0  # what a rollout counts, and since when it is so (unix seconds)

    @property
    def server(self) -> InferenceServer:
        assert isinstance(self._parsed, InferenceServer)
        return self._parsed

    @property
    def takes_requests(self) -> bool:
        return bool(self.proxy.targets)

    def update(self, resource: Manifest) -> None:
        super().update(resource)
        self._template = None

    def turn(self) -> None:
        self._reap()
        if not self.leaving and not self.server.spec.paused and self.accepted.status == "True":
            self._carry_out()
        self.proxy.targets = targets(self.pods)

    def leave(self) -> None:
        self.proxy.stop_listening()
        super().leave()

    async def close(self) -> None:
        await self.proxy.close()
        self._machine.ports.give_back(self.proxy.port)

    def _carry_out(self) -> None:
        if self._template is None:
            try:
                self._template = pod_template(self.server, SETTINGS)
            except SpecError as error:
                self._invalid = no("InvalidSpec", str(error))
                return
        wanted, recreate = replica_count(self.server), self.server.spec.rollout.strategy == "Recreate"
        step = next_step(self.pods, self._revision, wanted, surge=self._surges, recreate=recreate)
        for pod in step.stop:
            pod.stop()
        for _ in range(step.start):
            self._start(f"{self.key.name}-{self._revision}-", self._template)

    @property
    def _revision(self) -> str:
        return str(self._template["metadata"]["annotations"][SPEC_HASH]) if self._template else ""

    @property
    def _surges(self) -> bool:
        return self.server.spec.rollout.max_surge not in (0, "0%")

    # --- status ---

    def _status(self, prior: Manifest, now: float) -> Manifest:
        server, wanted, accepted = self.server, replica_count(self.server), self.accepted
        active = [pod for pod in reversed(self.pods) if not pod.stopping]
        readyz = Readiness.of(self.readyz)
        revision = self._revision or (active[0].revision if active else "")
        seen = [pod.observed() for pod in active]
        current = [pod for pod in seen if pod.revision == revision]
        ready, rolling = sum(pod.ready for pod in seen), len(current) < len(seen)
        counts = server.metadata.generation, revision, len(current), ready
        if self._moved[0] != counts:
            self._moved = counts, now
        late = now - self._moved[1] >= server.spec.rollout.progress_deadline_seconds and (rolling or ready < wanted)
        view = View(
            now=now,
            startup_timeout_s=server.spec.probes.startup_timeout_seconds,
            accelerators=server.spec.accelerator.text,
            rolling=rolling,
            local=True,
            readyz=readyz,
            model_uri=server.spec.model.uri,
        )
        problem = diagnosis.worst([pod for pod in current if not pod.ready], view)
        enough = max(1, wanted - 1) if wanted and rolling and not self._surges else wanted
        found = {"Accepted": accepted, "Ready": _ready(accepted, ready, wanted, enough, problem)}
        begun = any(container.running_since for pod in current for container in pod.containers)
        phase: ServerPhase = "Loading" if begun else "Pending"
        fell = problem is not None and problem.reason == "NotReady" and prior.get("phase") in ("Ready", "Degraded")
        if server.spec.paused:
            phase = "Paused"
        elif accepted.status != "True" or (late and not ready):
            phase = "Failed"
        elif late:
            phase = "Degraded"
        elif rolling:
            phase = "Updating"
        elif ready >= wanted:
            phase = "Ready" if wanted else "Stopped"
        elif problem is not None and (fell or problem.end is not None):
            phase = "Degraded"
        model = prior.get("model") or {}
        return InferenceServerStatus(
            observed_generation=server.metadata.generation,
            phase=phase,
            conditions=conditions(prior, found, server.metadata.generation, now),
            replicas=len(seen),
            ready_replicas=ready,
            updated_replicas=len(current),
            desired_replicas=wanted,
            ready=f"{ready}/{wanted}",
            url=self.proxy.url,
            addresses=(Address(type="Internal", url=self.proxy.url),),
            served_names=server.served_names,
            accelerator=server.spec.accelerator.text or "cpu",
            model=ServedModel(uri=server.spec.model.uri, context_length=(readyz and readyz.context_length) or model.get("contextLength")),
            current_revision=revision if not rolling and ready >= wanted else prior.get("currentRevision"),
            update_revision=revision,
            restarts=sum(container.restarts for pod in current for container in pod.containers),
            last_failure=recorded(last_failure(seen, view), prior, found),
            runtime_version=(readyz and readyz.version) or prior.get("runtimeVersion"),
        ).dump()


def _ready(accepted: Finding, ready: int, wanted: int, enough: int, problem: Diagnosis | None) -> Finding:
    if accepted.status != "True":
        return no(accepted.reason, accepted.message)
    if wanted == 0:
        return no("ScaledToZero", "spec.replicas is 0: nothing takes requests.")
    if ready >= enough:
        return yes("Ready", f"{ready} of {wanted} replicas take requests.")
    return no(problem.reason, problem.message) if problem is not None else unknown("Reconciling", "Waiting for pods to be created.")

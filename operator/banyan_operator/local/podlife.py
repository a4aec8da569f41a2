"""The life of one pod, as the kubelet leads it: what to start, check, stop, and when. Pure: the clock is handed in, what
happened is told, and what to do comes back as actions for `kubelet` to carry out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from banyan_operator.local.containers import Container, Phase, Role
from banyan_operator.local.probes import ProbeKind
from banyan_operator.plan import Manifest
from banyan_operator.times import stamp

NODE = "local"
ADDRESS = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Start:
    container: str


@dataclass(frozen=True, slots=True)
class Terminate:
    container: str


@dataclass(frozen=True, slots=True)
class Kill:
    container: str


@dataclass(frozen=True, slots=True)
class Check:
    container: str
    kind: ProbeKind


Action = Start | Terminate | Kill | Check


class Pod:
    """One pod. Call `turn` whenever something was told to it, and when `due` has come."""

    def __init__(self, manifest: Manifest, now: float) -> None:
        spec = manifest["spec"]
        self.name: str = manifest["metadata"]["name"]
        self.uid: str = manifest["metadata"]["uid"]
        self.policy: str = spec.get("restartPolicy", "Always")
        self.grace_s = float(spec.get("terminationGracePeriodSeconds", 30))
        self.notes: list[str] = []
        """What a person at the screen should know; whoever prints them empties the list."""
        self.unschedulable: str | None = None
        """Why the pod may not start yet (no free accelerator)."""
        self._accepted_at = now
        init: list[Manifest] = spec.get("initContainers", [])
        waiting = "PodInitializing" if init else "ContainerCreating"
        self.first: list[Container] = []
        for one in init:
            role: Role = "sidecar" if one.get("restartPolicy") == "Always" else "init"
            self.first.append(Container(one, role, waiting))
        self.main = [Container(one, "main", waiting) for one in spec["containers"]]
        self._by_name = {container.name: container for container in (*self.first, *self.main)}
        self._initialized = not init
        self._failed_init = False
        self._stop_by: float | None = None
        """Deleted: everything is killed by then."""
        self._conditions: dict[str, dict[str, Any]] = {}

    def __iter__(self) -> Iterator[Container]:
        return iter((*self.first, *self.main))

    def __getitem__(self, name: str) -> Container:
        return self._by_name[name]

    # --- what happened ---

    def runs(self, name: str, now: float, handle: str) -> None:
        """`handle` names the process, as containerID does a container."""
        self[name].runs(now, handle)

    def ended(self, name: str, exit_code: int, message: str, now: float, reason: str = "") -> None:
        container = self[name]
        asked = container.stopping or self.finished or self.deleted
        container.ended(exit_code, message, now, reason)
        if not asked and (exit_code or container.role == "sidecar"):
            self.notes.append(f"{self.name}: {name} ended with exit code {exit_code}")

    def cannot_start(self, name: str, reason: str, message: str, now: float) -> None:
        if self[name].blocked != (reason, message):
            self.notes.append(f"{self.name}: {name} cannot start: {message}")
        self[name].cannot_start(reason, message, now)

    def checked(self, name: str, kind: ProbeKind, ok: bool, text: str, now: float) -> None:
        self[name].probes[kind].answered(ok, text, now)

    def delete(self, now: float, grace_s: float, *, pre_stop: bool = True) -> None:
        """Begin to end the pod; `pre_stop` False leaves the preStop wait out, where nobody routes requests to it any more."""
        stop_by = now + grace_s
        self._stop_by = stop_by if self._stop_by is None else min(self._stop_by, stop_by)
        for container in self:
            container.stop(now, grace_s, container.pre_stop_s if pre_stop else 0.0, may_terminate=container.role != "sidecar")

    # --- what it is ---

    @property
    def deleted(self) -> bool:
        return self._stop_by is not None

    @property
    def gone(self) -> bool:
        """Deleted, and nothing of it runs any more."""
        return self.deleted and not any(container.alive for container in self)

    @property
    def settled(self) -> bool:
        """The main containers (or an init container, for good) have ended and are not started again."""
        if self._failed_init:
            return True
        return all(c.phase is Phase.ENDED and not self._restarts(c) for c in self.main)

    @property
    def finished(self) -> bool:
        """Settled, and the sidecars have ended too."""
        return self.settled and not any(container.alive for container in self)

    @property
    def ready(self) -> bool:
        """Whether its service may send it requests."""
        sidecars = (c for c in self.first if c.role == "sidecar")
        return not self.deleted and not self.settled and all(c.ready for c in (*self.main, *sidecars))

    @property
    def phase(self) -> str:
        if self.finished:
            return "Succeeded" if not self._failed_init and all(c.succeeded for c in self.main) else "Failed"
        return "Running" if any(c.phase in (Phase.RUNNING, Phase.ENDED) for c in self.main) else "Pending"

    # --- what to do ---

    def turn(self, now: float) -> list[Action]:
        """Everything to do now. Doing it may bring news at once, then another turn follows."""
        actions: list[Action] = []
        if not self.deleted and self.unschedulable is None:
            if self.settled:
                self._wind_down(now)
            else:
                actions += self._starts(now)
                actions += self._checks(now)
        elif self.deleted and not any(c.alive for c in (*self.main, *self._of_role("init"))):
            self._stop_last_sidecar(now)
        actions += self._stops(now)
        return actions

    def due(self) -> float | None:
        """When `turn` has something to do again if nothing happens until then."""
        times: list[float] = []
        for container in self:
            for kind, tracker in container.probes.items():
                if tracker.due is not None and self._wants(container, kind):
                    times.append(tracker.due)
            if container.terminate_at is not None and not container.terminated:
                times.append(container.terminate_at)
            if container.kill_at is not None and not container.killed:
                times.append(container.kill_at)
            if not self.deleted and container.phase is Phase.ENDED and self._restarts(container):
                times.append(container.restart_due())
            if container.phase is Phase.WAITING and container.blocked is not None:
                times.append(container.retry_at)
        return min(times, default=None)

    def _restarts(self, container: Container) -> bool:
        if container.role == "sidecar":
            return True
        failed = not container.succeeded
        if container.role == "init":
            return failed and self.policy != "Never"
        return self.policy == "Always" or (self.policy == "OnFailure" and failed)

    def _of_role(self, role: Role) -> list[Container]:
        return [container for container in self.first if container.role == role]

    def _starts(self, now: float) -> Iterator[Action]:
        if not self._initialized:
            for container in self.first:
                yield from self._start(container, now)
                if container.role == "init" and container.phase is Phase.ENDED and not container.succeeded:
                    self._failed_init = not self._restarts(container)
                if not (container.succeeded if container.role == "init" else container.started):
                    return
            self._initialized = True
        for container in (*self._of_role("sidecar"), *self.main):
            yield from self._start(container, now)

    def _start(self, container: Container, now: float) -> Iterator[Action]:
        if container.phase is Phase.ENDED:
            if not self._restarts(container) or now < container.restart_due():
                return
            container.count_restart()
        elif container.phase is not Phase.WAITING or now < container.retry_at:
            return
        container.told_to_start()
        yield Start(container.name)

    def _checks(self, now: float) -> Iterator[Action]:
        for container in self:
            for kind, tracker in container.probes.items():
                if not self._wants(container, kind):
                    continue
                if tracker.failed and kind != "readiness":
                    self.notes.append(f"{self.name}: {container.name} failed its {kind} probe and is restarted ({tracker.last_text})")
                    container.stop(now, self._probe_grace(container, kind), container.pre_stop_s)
                    break
                if tracker.due is not None and tracker.due <= now:
                    tracker.sent()
                    yield Check(container.name, kind)

    def _wants(self, container: Container, kind: ProbeKind) -> bool:
        """Whether a probe is asked now: the start-up probe until it passed, the others from then on."""
        if not container.running or container.stopping or self.deleted or self.settled:
            return False
        return container.started != (kind == "startup")

    def _probe_grace(self, container: Container, kind: ProbeKind) -> float:
        return float(container.spec[f"{kind}Probe"].get("terminationGracePeriodSeconds", self.grace_s))

    def _wind_down(self, now: float) -> None:
        """The work is over: end what is left, sidecars in reverse order of their start."""
        for container in self._of_role("init"):
            container.stop(now, self.grace_s, 0.0)
        if not any(container.alive for container in (*self.main, *self._of_role("init"))):
            self._stop_last_sidecar(now)

    def _stop_last_sidecar(self, now: float) -> None:
        alive = [container for container in self._of_role("sidecar") if container.alive]
        if alive and alive[-1].terminate_at is None:
            rest = self.grace_s if self._stop_by is None else max(0.0, self._stop_by - now)
            alive[-1].stop(now, rest, 0.0)

    def _stops(self, now: float) -> Iterator[Action]:
        for container in self:
            if not container.running:
                continue
            if container.terminate_at is not None and container.terminate_at <= now and not container.terminated:
                container.terminated = True
                yield Terminate(container.name)
            if container.kill_at is not None and container.kill_at <= now and not container.killed:
                container.killed = True
                yield Kill(container.name)

    # --- how it looks ---

    def status(self, now: float) -> dict[str, Any]:
        """The pod's status as the kubelet reports it."""
        ready = self.ready
        unready = [c.name for c in self.main if not c.ready]
        missing = f"containers with unready status: [{' '.join(unready)}]"
        done = self.phase == "Succeeded"
        if self.unschedulable is None:
            self._condition(now, "PodScheduled", True)
        else:
            self._condition(now, "PodScheduled", False, "Unschedulable", self.unschedulable)
        initialized = self._initialized and self.unschedulable is None
        self._condition(now, "Initialized", initialized, "" if initialized else "ContainersNotInitialized")
        for kind in ("ContainersReady", "Ready"):
            reason = "" if ready else "PodCompleted" if done else "ContainersNotReady"
            self._condition(now, kind, ready, reason, "" if ready or done else missing)
        status: dict[str, Any] = {
            "phase": self.phase,
            "conditions": [dict(condition) for condition in self._conditions.values()],
            "hostIP": ADDRESS,
            "podIP": ADDRESS,
            "podIPs": [{"ip": ADDRESS}],
            "startTime": stamp(self._accepted_at),
            "containerStatuses": [self._container_status(container) for container in self.main],
        }
        if self.first:
            status["initContainerStatuses"] = [self._container_status(container) for container in self.first]
        return status

    def _container_status(self, container: Container) -> dict[str, Any]:
        return container.status(self.name, not self.settled and not self.deleted and self._restarts(container))

    def _condition(self, now: float, kind: str, true: bool, reason: str = "", message: str = "") -> None:
        word = "True" if true else "False"
        old = self._conditions.get(kind)
        since = old["lastTransitionTime"] if old is not None and old["status"] == word else stamp(now)
        condition: dict[str, Any] = {"type": kind, "status": word, "lastProbeTime": None, "lastTransitionTime": since}
        if reason:
            condition["reason"] = reason
        if message:
            condition["message"] = message
        self._conditions[kind] = condition

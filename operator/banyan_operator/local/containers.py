"""The life of one container, told by a clock that is handed in: waiting, running, stopping, ended, restarted after a while."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Literal

from banyan_operator.local.probes import KINDS, Probe, ProbeKind, Tracker
from banyan_operator.plan import Manifest
from banyan_operator.times import stamp

Role = Literal["init", "sidecar", "main"]

FIRST_BACKOFF_S = 10.0
LONGEST_BACKOFF_S = 300.0
BACKOFF_FORGOTTEN_S = 600.0
"""The kubelet's own numbers: the first restart is immediate, then 10 s, doubled up to 300 s; forgotten after 10 good minutes."""
LEAST_AFTER_PRESTOP_S = 2.0
"""What the kubelet leaves between SIGTERM and SIGKILL when preStop has used up the grace period."""
RETRY_S = 2.0
"""How soon a container is tried again that could not be started for want of a Secret or ConfigMap."""


class Phase(Enum):
    WAITING = auto()
    STARTING = auto()  # told to start, not yet heard of
    RUNNING = auto()
    ENDED = auto()


@dataclass(frozen=True, slots=True)
class End:
    """How a container ended. `message` is its termination message, at most 4096 bytes."""

    exit_code: int
    reason: str
    message: str
    started_at: float | None
    finished_at: float

    def state(self, handle: str) -> dict[str, Any]:
        terminated: dict[str, Any] = {"exitCode": self.exit_code, "reason": self.reason, "finishedAt": stamp(self.finished_at)}
        if self.started_at is not None:
            terminated |= {"startedAt": stamp(self.started_at), "containerID": handle}
        if self.message:
            terminated["message"] = self.message
        return {"terminated": terminated}


class Container:
    """One container of a pod. It is told what happened and when, and can be asked what to do; it does nothing itself."""

    def __init__(self, spec: Manifest, role: Role, waiting: str) -> None:
        self.spec = spec
        self.name: str = spec["name"]
        self.role = role
        self.phase = Phase.WAITING
        self.restarts = 0
        self.end: End | None = None
        """Of the run before this one, or of the last one."""
        self.probes: dict[ProbeKind, Tracker] = {}
        self.blocked: tuple[str, str] | None = None
        """Reason and message of what keeps it from starting (a missing Secret)."""
        self.retry_at = 0.0
        self._waiting = waiting
        self._handle = ""
        self._started_at = 0.0
        self._backoff_s = 0.0
        self._ever_ran = False
        self.terminate_at: float | None = None
        self.kill_at: float | None = None
        self.terminated = self.killed = False

    @property
    def running(self) -> bool:
        return self.phase is Phase.RUNNING

    @property
    def alive(self) -> bool:
        return self.phase in (Phase.RUNNING, Phase.STARTING)

    @property
    def stopping(self) -> bool:
        return self.kill_at is not None

    @property
    def started(self) -> bool:
        """Running, and past its startup probe if it has one."""
        return self.running and ("startup" not in self.probes or self.probes["startup"].passed)

    @property
    def ready(self) -> bool:
        """Counts for the pod's readiness. A stopping container is not ready: it takes no new work."""
        return self.started and not self.stopping and ("readiness" not in self.probes or self.probes["readiness"].passed)

    @property
    def succeeded(self) -> bool:
        return self.phase is Phase.ENDED and self.end is not None and self.end.exit_code == 0

    # --- what happened ---

    def told_to_start(self) -> None:
        self.phase = Phase.STARTING

    def runs(self, now: float, handle: str) -> None:
        if self._ever_ran:
            self.restarts += 1
        self._ever_ran = True
        self.phase = Phase.RUNNING
        self.blocked = None
        self._started_at, self._handle = now, handle
        probes = {kind: Probe.of(kind, self.spec[f"{kind}Probe"]) for kind in KINDS if f"{kind}Probe" in self.spec}
        self.probes = {kind: Tracker(probe, now) for kind, probe in probes.items() if probe is not None}

    def cannot_start(self, reason: str, message: str, now: float) -> None:
        """Not an end: nothing ran. It is tried again as long as the pod lives."""
        self.phase = Phase.WAITING
        self.blocked = (reason, message)
        self.retry_at = now + RETRY_S
        self.terminate_at = self.kill_at = None

    def ended(self, exit_code: int, message: str, now: float, reason: str = "") -> None:
        started = self._started_at if self.phase is Phase.RUNNING else None
        reason = reason or ("Completed" if exit_code == 0 else "Error")
        self.end = End(exit_code, reason, message, started, now)
        self.phase = Phase.ENDED
        self._ever_ran = True
        self.probes = {}
        self.terminate_at = self.kill_at = None
        self.terminated = self.killed = False
        ran_s = now - started if started is not None else 0.0
        if ran_s > BACKOFF_FORGOTTEN_S:
            self._backoff_s = 0.0

    def stop(self, now: float, grace_s: float, pre_stop_s: float, *, may_terminate: bool = True) -> None:
        """Begin to end it: SIGTERM after `pre_stop_s`, SIGKILL after `grace_s`. A second call can only shorten the grace.

        With `may_terminate` False only the SIGKILL is set, SIGTERM waits for a later call (a sidecar outlives its containers).
        """
        if not self.alive:
            return
        term_at = now + min(pre_stop_s, grace_s)
        kill_at = max(now + grace_s, term_at + LEAST_AFTER_PRESTOP_S) if pre_stop_s and grace_s else now + grace_s
        self.kill_at = kill_at if self.kill_at is None else min(self.kill_at, kill_at)
        if may_terminate and self.terminate_at is None:
            self.terminate_at = min(term_at, self.kill_at)

    # --- what to do ---

    def restart_due(self) -> float:
        """When an ended container may start again. The wait counts from its end."""
        assert self.end is not None
        return self.end.finished_at + self._backoff_s

    def count_restart(self) -> None:
        """Called with every restart: the next one waits longer."""
        self._backoff_s = min(LONGEST_BACKOFF_S, max(FIRST_BACKOFF_S, self._backoff_s * 2))

    @property
    def pre_stop_s(self) -> float:
        hook = self.spec.get("lifecycle", {}).get("preStop", {})
        return float(hook.get("sleep", {}).get("seconds", 0))

    # --- how it looks ---

    def status(self, pod_name: str, restarts: bool) -> dict[str, Any]:
        """An entry of containerStatuses. `restarts`: whether the pod starts it again when it ends."""
        status: dict[str, Any] = {
            "name": self.name,
            "image": self.spec.get("image", ""),
            "imageID": "",
            "ready": self.succeeded if self.role == "init" else self.ready,
            "started": self.started,
            "restartCount": self.restarts,
        }
        if self.running:
            status |= {"state": {"running": {"startedAt": stamp(self._started_at)}}, "containerID": self._handle}
            if self.end is not None:
                status["lastState"] = self.end.state(self._handle)
        elif self.phase is Phase.ENDED and self.end is not None and not (restarts and self._backoff_s):
            status["state"] = self.end.state(self._handle)
        elif self.phase is Phase.ENDED and self.end is not None:
            text = f"back-off {self._backoff_s:g}s restarting failed container={self.name} pod={pod_name}"
            status |= {"state": {"waiting": {"reason": "CrashLoopBackOff", "message": text}}, "lastState": self.end.state(self._handle)}
        else:
            reason, message = self.blocked or (self._waiting, "")
            status["state"] = {"waiting": {"reason": reason} | ({"message": message} if message else {})}
            if self.end is not None:
                status["lastState"] = self.end.state(self._handle)
        status.setdefault("lastState", {})
        return status

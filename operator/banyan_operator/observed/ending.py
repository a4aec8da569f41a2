"""How a Job ended: by its own conditions, and by the last words of the pod that decided it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from banyan_operator.desired.batchjob import FINAL_CODES, STOPPED
from banyan_operator.desired.batchpod import CONTAINER
from banyan_operator.kube.objects import condition, is_true
from banyan_operator.observed.pods import End, Pod
from banyan_operator.plan import Manifest
from banyan_operator.times import seconds, stamp

REPORT_S: Final = 60.0
"""How long after a Job's end its deciding pod is waited for: watches of two kinds lag by different times, and a pod can be deleted."""

KILLED: Final = 137  # exit code, of SIGKILL
OOM_KILLED: Final = "OOMKilled"  # the kubelet's reason where the kernel sent it

DECIDED: Final = {"Complete": "SuccessCriteriaMet", "Failed": "FailureTarget"}
"""What a Job says as soon as its end is certain, by its final condition."""


@dataclass(frozen=True, slots=True)
class Ending:
    """A Job that goes on no more."""

    succeeded: bool
    message: str  # the Job's own words
    pod: Pod | None  # of those seen the one that decided it
    reported: bool  # that pod is known, and its end was seen
    due: float | None  # until when its report is waited for, unix seconds; None while the Job's last pods are still stopping

    @property
    def end(self) -> End | None:
        """How the deciding worker ended; None where only the pod's own end is known, or nothing."""
        container = self.pod.container(CONTAINER) if self.pod is not None else None
        return container.ended if container is not None else None

    def over(self, now: float) -> bool:
        """Whether nothing more is to be learned of it."""
        return self.due is not None and (self.reported or now >= self.due)

    @property
    def waiting(self) -> str:
        """What is waited for."""
        how = "is complete" if self.succeeded else "has failed"
        if self.due is None:
            return f"the Job {how}; its last pods are being stopped."
        return f"the Job {how}; waiting for the worker's pod, which says how it ended and what it counted, until {stamp(self.due)}."


def ending(work: Manifest | None, workers: Sequence[Pod]) -> Ending | None:
    """None while the Job goes on, or was deleted before its end: where the garbage collector ends its pods first, its controller may take
    that for its failure. `workers`: its own pods."""
    if is_true(work, "Complete") or is_true(work, "SuccessCriteriaMet"):
        pod = next((pod for pod in workers if (end := _worker_end(pod)) is not None and end.exit_code == 0), None)
        return Ending(True, "", pod, pod is not None, _due(work, "Complete", workers))
    if is_true(work, "Failed") or is_true(work, "FailureTarget"):
        assert work is not None
        said = condition(work, "Failed") or condition(work, "FailureTarget")
        ended = [pod for pod in workers if not pod.may_run or _worker_end(pod) is not None]
        failed = [pod for pod in ended if (end := _worker_end(pod)) is None or end.exit_code != 0]
        counted = [pod for pod in failed if pod.disrupted is None]  # those that were taken away do not count as failures
        final = [pod for pod in counted if (end := _worker_end(pod)) is not None and end.exit_code in FINAL_CODES]
        if final and said.get("reason") == "PodFailurePolicy":  # that one ended the Job, and the others with it, which end later
            return Ending(False, str(said.get("message") or ""), max(final, key=_ended_at), True, _due(work, "Failed", workers))
        pod = max(counted or failed, key=_ended_at, default=None)
        if pod is not None and _was_stopped(work, pod):
            return None
        all_seen = len(ended) == len(workers) and len(counted) >= ((work.get("status") or {}).get("failed") or 0)
        return Ending(False, str(said.get("message") or ""), pod, pod is not None and all_seen, _due(work, "Failed", workers))
    return None


def _due(work: Manifest | None, kind: str, workers: Sequence[Pod]) -> float | None:
    """`kind`: the Job's final condition. It comes when all pods have ended: of those on a node that does not answer, perhaps never."""
    found: Mapping[str, Any] = condition(work, kind)
    if not found and work is not None:
        status, open_pods = work.get("status") or {}, [pod for pod in workers if pod.may_run]
        left = (status.get("active") or 0) + (status.get("terminating") or 0)
        if open_pods and all(pod.lost for pod in open_pods) and left <= len(open_pods):
            found = condition(work, DECIDED[kind])
    if found.get("status") != "True":
        return None
    return (seconds(found.get("lastTransitionTime")) or 0.0) + REPORT_S


def _was_stopped(work: Manifest, pod: Pod) -> bool:
    """It was deleted with its Job, and that is why its worker has ended: it left off when it was told to, or was killed where it did not in
    time, or got none. What is killed for want of memory has failed by itself, and so has a Job that had failed before."""
    deleted, end = seconds(work["metadata"].get("deletionTimestamp")), _worker_end(pod)
    if deleted is None or pod.deleted is None or end is None:
        return False
    if end.exit_code == KILLED and end.reason != OOM_KILLED:
        times = [seconds(condition(work, kind).get("lastTransitionTime")) for kind in (DECIDED["Failed"], "Failed")]
        return all(at is None or at >= deleted for at in times)
    return end.exit_code == STOPPED


def _worker_end(pod: Pod) -> End | None:
    container = pod.container(CONTAINER)
    return None if container is None else container.ended


def _ended_at(pod: Pod) -> tuple[str, str, str]:
    end = _worker_end(pod)
    return (end.finished or "" if end is not None else "", pod.created, pod.name)

"""What of a BatchJob had ended when it went, as it was last: it says how, and is not asked again.

A Job with ttlSecondsAfterFinished: 0 is removed with its pods within the moment in which it ends. Labels may be anybody's, and of pods
there may be any number: what is kept is of the BatchJob's own Jobs, and no more than tells how these ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from banyan_operator.desired.batchjob import FINAL_CODES, STOPPED
from banyan_operator.desired.batchpod import CONTAINER, PHASES
from banyan_operator.desired.names import derived
from banyan_operator.kube import kinds
from banyan_operator.kube.kinds import Manifest
from banyan_operator.kube.objects import Key, controller, is_true, key_of, uid_of
from banyan_operator.kube.ownership import Owner

PODS: Final = 64  # of one Job
JOBS: Final = 2  # of one name: the last counts, and the end of the one before may be heard of after its own


class Remains:
    """Of the BatchJobs that are not over."""

    def __init__(self) -> None:
        self._kept: dict[Key, dict[tuple[str, str], dict[str, Manifest]]] = {}  # → name and uid of a Job → uid → it, or a pod of it

    def of(self, batch: Key) -> tuple[Manifest, ...]:
        return tuple(one for of_job in self._kept.get(batch, {}).values() for one in of_job.values())

    def forget(self, batch: Key) -> None:
        self._kept.pop(batch, None)

    def keep(self, batch: Manifest, gone: Manifest) -> None:
        """`gone`: what had ended."""
        if (job := _its_job(batch, gone)) is None:
            return
        jobs = self._kept.setdefault(key_of(batch), {})
        of_job = jobs.setdefault(job, {})
        of_job[uid_of(gone)] = gone
        pods = [one for one in of_job.values() if one["kind"] == kinds.POD.kind]
        if len(pods) > PODS:
            del of_job[uid_of(least_telling(pods))]
        for before in [one for one in jobs if one[0] == job[0]][:-JOBS]:
            del jobs[before]


def _its_job(batch: Manifest, one: Manifest) -> tuple[str, str] | None:
    """Name and uid of the Job of the BatchJob that this is, or is a pod of. A pod itself tells which: a list may have shown before that the
    Job is no more, and its own end may be heard of later."""
    if one["kind"] == kinds.JOB.kind:
        found = (one["metadata"]["name"], uid_of(one)) if Owner.of(batch).may_change(one) else None
    else:
        above = controller(one)
        found = (above["name"], above["uid"]) if above is not None and above.get("kind") == kinds.JOB.kind else None
    ours = [derived(batch["metadata"]["name"], phase) for phase in PHASES]
    return found if found is not None and found[0] in ours else None


def has_ended(child: Mapping[str, Any]) -> bool:
    """Whether a Job, or a pod, was over: no more is to be learned of it."""
    if child["kind"] == kinds.JOB.kind:
        return is_true(child, "Complete") or is_true(child, "Failed")
    return child["kind"] == kinds.POD.kind and (child.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def least_telling(pods: Sequence[Manifest]) -> Manifest:
    """Of pods of one Job that have ended, oldest first, the one that says least of how it did. When one ends the Job, all others are told
    to end; of those that have succeeded one is as good as another."""
    codes = [_exit_code(pod) for pod in pods]

    def telling(number: int) -> int:
        match codes[number]:
            case code if code == STOPPED:
                return 0
            case 0:
                return 1 if 0 in codes[number + 1 :] else 3
            case code:
                return 3 if code in FINAL_CODES else 2

    return pods[min(range(len(pods)), key=telling)]


def _exit_code(pod: Manifest) -> int | None:
    """Of its worker; None where only the pod's own end is known."""
    for one in (pod.get("status") or {}).get("containerStatuses") or ():
        if one["name"] == CONTAINER:
            code = ((one.get("state") or {}).get("terminated") or {}).get("exitCode")
            return code if isinstance(code, int) else None
    return None

"""The three Jobs of a BatchJob, made in turn: plan (one pod), work (as many as there are workers), merge (one pod).

A Job that exists keeps what it was made with, whoever made it: only how many work, and whether they may, is still decided.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from banyan_operator.api import BatchJob
from banyan_operator.desired.batchpod import CONTAINER, RUN_ID, Partial, Phase, template
from banyan_operator.desired.metadata import child, labels, owner_references
from banyan_operator.desired.names import derived
from banyan_operator.kube.kinds import GROUP
from banyan_operator.kube.objects import is_true
from banyan_operator.kube.ownership import APPLIED_HASH
from banyan_operator.plan import Manifest, Settings

FINAL_CODES: Final = (64, 65, 77, 78, 79)
"""Exit codes after which trying again is the same again: configuration, input, access, model, and the share of errors passed."""
STOPPED: Final = 143  # exit code of a worker that was told to end before the work was done
RETRIES: Final = 20  # of a plan and a merge, which fail when storage is away: with the Job's back-off one and a half hours
BECAUSE: Final = f"{GROUP}/because"
"""Annotation of a merge: why the work failed whose rest it publishes, as JSON."""
_REASON: Final = re.compile(r"[A-Z][a-zA-Z]{1,63}")


@dataclass(frozen=True, slots=True)
class Because:
    """Why the work failed."""

    reason: str
    message: str
    refusal: bool = False  # the spec asks for what cannot be

    def text(self) -> str:
        return json.dumps({"reason": self.reason, "message": self.message, "refusal": self.refusal})

    @staticmethod
    def of(job: Manifest) -> Because | None:
        try:
            found = json.loads((job["metadata"].get("annotations") or {}).get(BECAUSE) or "")
            known = Because(str(found["reason"]), str(found["message"]), bool(found["refusal"]))
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        return known if _REASON.fullmatch(known.reason) else None  # somebody else's word, which no status takes


@dataclass(frozen=True, slots=True)
class Order:
    """One Job that is wanted. Of one that exists only `suspend` counts, and of the work how many workers the spec has."""

    phase: Phase
    suspend: bool = False
    partial: Partial | None = None
    because: Because | None = None


def make(job: BatchJob, settings: Settings, order: Order, *, server_url: str | None) -> Manifest:
    """The Job, new. `server_url`: see `template`."""
    count = job.spec.workers if order.phase == "work" else 1
    body: Manifest = {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        "backoffLimitPerIndex": job.spec.worker_backoff_limit if order.phase == "work" else RETRIES,
        "podReplacementPolicy": "Failed",  # never two workers of one index: they would take each other's place
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "FailJob", "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": list(FINAL_CODES)}},
            ]
        },
        "successPolicy": {"rules": [{"succeededCount": 1}]},  # a worker succeeds only when the work of all is done
        "suspend": order.suspend,
        "template": template(job, settings, order.phase, server_url=server_url, partial=order.partial),
    }
    return child(
        job,
        settings,
        api_version="batch/v1",
        kind="Job",
        name=derived(job.metadata.name, order.phase),
        annotations={BECAUSE: order.because.text()} if order.because is not None else None,
        component=order.phase,
        body={"spec": body},
    )


def as_made(job: BatchJob, live: Manifest, order: Order) -> Manifest:
    """The Job that exists, as it was made."""
    metadata, spec = live["metadata"], live["spec"]
    annotations = dict(metadata.get("annotations") or {})
    suspend = order.suspend
    if is_over(live):
        suspend = spec.get("suspend", False)
    elif not spec.get("suspend", False) and is_true(live, "Suspended"):
        # its controller has yet to take up that it was resumed; until then its condition would be taken for an answer to this write
        suspend = False
    decided: dict[str, Any] = {"suspend": suspend}
    if order.phase == "work" and not is_over(live):
        decided |= {"completions": job.spec.workers, "parallelism": job.spec.workers}  # only together: one patch
    before = {"suspend": False, **{name: spec.get(name) for name in decided if name in spec}}
    if before != decided:  # our own change must not look like somebody else's
        made, _, _ = annotations.get(APPLIED_HASH, "").partition("-")
        workers = f"-{decided['completions']}" if "completions" in decided else ""
        annotations[APPLIED_HASH] = f"{made}-{'suspended' if suspend else 'running'}{workers}"
    kept = {"name": metadata["name"], "namespace": metadata["namespace"], "ownerReferences": owner_references(job)}
    return {
        "apiVersion": live["apiVersion"],
        "kind": live["kind"],
        "metadata": {**kept, "labels": {**(metadata.get("labels") or {}), **labels(job, order.phase)}, "annotations": annotations},
        "spec": {**spec, **decided},
    }


# --- what a Job says of itself ---


def is_over(job: Manifest) -> bool:
    """Whether it starts no more pods, whatever its spec says."""
    return any(is_true(job, one) for one in ("Complete", "SuccessCriteriaMet", "Failed", "FailureTarget"))


def partial_of(job: Manifest) -> str | None:
    """Why a merge publishes what is not done; None where everything is."""
    return _argument(job, "partial")


def run_of(job: Manifest) -> str:
    """The run that a Job's workers write for."""
    for variable in _worker(job).get("env") or ():
        if variable["name"] == RUN_ID:
            return str(variable.get("value") or "")
    return ""


def _argument(job: Manifest, name: str) -> str | None:
    given = (str(word).partition("=") for word in _worker(job).get("args") or ())
    return next((value for flag, _, value in given if flag == f"--{name}"), None)


def _worker(job: Manifest) -> Mapping[str, Any]:
    containers = job["spec"]["template"]["spec"]["containers"]
    return next((one for one in containers if one["name"] == CONTAINER), {})

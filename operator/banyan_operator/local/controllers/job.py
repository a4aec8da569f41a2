"""Job → pods: the Indexed Job that the operator renders. Each index runs to completion, with retries after a wait."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from banyan_operator.kube.objects import is_true, key_of, owner_reference
from banyan_operator.local.controllers.actions import (
    Action,
    Create,
    SetStatus,
    delete,
    is_active,
    is_deleted,
    is_finished,
    knows,
    new_condition,
)
from banyan_operator.plan import Manifest
from banyan_operator.times import seconds, stamp

INDEX = "batch.kubernetes.io/job-completion-index"
FIRST_RETRY_S = 10.0
LONGEST_RETRY_S = 360.0
"""The Job controller's own numbers: 10 s, doubled with each failure, at most six minutes."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a Job ends: the type of the condition that comes last, and why."""

    complete: bool
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Tally:
    """The pods of a Job, sorted by what they mean for it. Failures that the policy ignores are left out."""

    active: list[Manifest]
    leaving: list[Manifest]  # deleted, processes still there
    succeeded: list[Manifest]
    failed: list[Manifest]

    @staticmethod
    def of(job: Manifest, pods: Iterable[Manifest]) -> Tally:
        tally = Tally([], [], [], [])
        for pod in pods:
            if is_deleted(pod):
                if not is_finished(pod):
                    tally.leaving.append(pod)
            elif is_active(pod):
                tally.active.append(pod)
            elif pod["status"]["phase"] == "Succeeded":
                tally.succeeded.append(pod)
            elif _matching_rule(job, pod)[0] != "Ignore":
                tally.failed.append(pod)
        return tally


def decide(job: Manifest, pods: Sequence[Manifest], now: float) -> list[Action]:
    """One step of the Job. `pods`: those that it controls."""
    _check(job["spec"])
    if is_true(job, "Complete") or is_true(job, "Failed"):
        return []
    tally = Tally.of(job, pods)
    verdict = _announced(job) or _verdict(job, tally)
    suspended = verdict is None and job["spec"]["suspend"]
    actions: list[Action] = []
    if verdict is not None or suspended:
        actions += [delete(pod) for pod in tally.active]
    elif "startTime" in job.get("status", {}):  # the start is noted before anything runs
        actions += _keep_running(job, tally, now)
    actions.append(SetStatus(key_of(job), _status(job, tally, verdict, suspended, now)))
    return actions


def _check(spec: Mapping[str, Any]) -> None:
    """Assert that the Job is of the form that this controller carries out: all that the operator renders, and no more."""
    fields = ("completionMode", "completions", "parallelism", "backoffLimitPerIndex", "podReplacementPolicy", "suspend", "template")
    knows("Job.spec", spec, *fields, "podFailurePolicy", "successPolicy", needs=fields)
    assert spec["completionMode"] == "Indexed", spec["completionMode"]
    # a pod is replaced only when its processes are gone, so that two never do the same work
    assert spec["podReplacementPolicy"] == "Failed", spec["podReplacementPolicy"]
    for rule in spec.get("podFailurePolicy", {}).get("rules", ()):
        knows("Job.spec.podFailurePolicy.rules", rule, "action", "onPodConditions", "onExitCodes")
        assert rule["action"] in ("Ignore", "FailJob"), f"local mode does not carry this out: action {rule['action']}"
        for wanted in rule.get("onPodConditions", ()):
            knows("Job.spec.podFailurePolicy.rules.onPodConditions", wanted, "type", "status", needs=("type", "status"))
        if codes := rule.get("onExitCodes"):
            named = ("containerName", "operator", "values")
            knows("Job.spec.podFailurePolicy.rules.onExitCodes", codes, *named, needs=named)
            assert codes["operator"] == "In", codes["operator"]
    for rule in spec.get("successPolicy", {}).get("rules", ()):
        knows("Job.spec.successPolicy.rules", rule, "succeededCount", needs=("succeededCount",))


def _verdict(job: Manifest, tally: Tally) -> Verdict | None:
    spec = job["spec"]
    for pod in tally.failed:
        action, why = _matching_rule(job, pod)
        if action == "FailJob":
            return Verdict(False, "PodFailurePolicy", why)
    done, lost = _indexes(tally.succeeded), _failed_indexes(job, tally)
    if any(len(done) >= rule["succeededCount"] for rule in spec.get("successPolicy", {}).get("rules", ())):
        return Verdict(True, "SuccessPolicy", "Matched rules at index 0")
    if len(done | lost) < spec["completions"]:
        return None
    if lost:
        return Verdict(False, "FailedIndexes", "Job has failed indexes")
    return Verdict(True, "CompletionsReached", "Reached expected number of succeeded pods")


def _keep_running(job: Manifest, tally: Tally, now: float) -> list[Action]:
    spec = job["spec"]
    busy = _indexes(tally.active) | _indexes(tally.leaving)
    over = _indexes(tally.succeeded) | _failed_indexes(job, tally)
    actions: list[Action] = [delete(pod) for pod in tally.active if _index(pod) >= spec["completions"]]
    failures: dict[int, list[Manifest]] = defaultdict(list)
    for pod in tally.failed:
        failures[_index(pod)].append(pod)
    for index in range(spec["completions"]):
        if len(busy) >= spec["parallelism"]:
            break
        if index in busy or index in over or now < _retry_at(failures[index]):
            continue
        busy.add(index)
        actions.append(Create(_pod(job, index)))
    return actions


def _status(job: Manifest, tally: Tally, verdict: Verdict | None, suspended: bool, now: float) -> dict[str, Any]:
    before = job.get("status", {})
    found = {one["type"]: one for one in before.get("conditions", ())}
    status: dict[str, Any] = {}

    def note(kind: str, truth: str, reason: str, message: str) -> None:
        found[kind] = new_condition(job, kind, truth, reason, message, now)

    if suspended:
        note("Suspended", "True", "JobSuspended", "Job suspended")
    else:
        status["startTime"] = before.get("startTime", stamp(now))
        if "Suspended" in found:
            note("Suspended", "False", "JobResumed", "Job resumed")
    if verdict is not None:
        first, last = ("SuccessCriteriaMet", "Complete") if verdict.complete else ("FailureTarget", "Failed")
        note(first, "True", verdict.reason, verdict.message)
        if not tally.active and not tally.leaving:
            note(last, "True", verdict.reason, verdict.message)
            if verdict.complete:
                status["completionTime"] = stamp(now)
    counts = {
        "active": len(tally.active),
        "ready": sum(is_true(pod, "Ready") for pod in tally.active),
        "terminating": len(tally.leaving),
        "succeeded": len(tally.succeeded),
        "failed": len(tally.failed),
    }
    status |= {name: count for name, count in counts.items() if count}
    if found:
        status["conditions"] = list(found.values())
    return status


def _announced(job: Manifest) -> Verdict | None:
    """A verdict once made stands, whatever its last pods do."""
    for one in job.get("status", {}).get("conditions", ()):
        if one["type"] in ("SuccessCriteriaMet", "FailureTarget"):
            return Verdict(one["type"] == "SuccessCriteriaMet", one["reason"], one["message"])
    return None


def _matching_rule(job: Manifest, pod: Manifest) -> tuple[str, str]:
    """The action of the first rule of podFailurePolicy that fits a failed pod, with the words for it; else ('Count', '')."""
    ends = {
        one["name"]: one["state"]["terminated"]["exitCode"]
        for one in (*pod["status"].get("initContainerStatuses", ()), *pod["status"].get("containerStatuses", ()))
        if "terminated" in one["state"]
    }
    for number, rule in enumerate(job["spec"].get("podFailurePolicy", {}).get("rules", ())):
        for wanted in rule.get("onPodConditions", ()):
            if any(c["type"] == wanted["type"] and c["status"] == wanted["status"] for c in pod["status"]["conditions"]):
                return rule["action"], f"Pod {pod['metadata']['name']} has condition {wanted['type']} matching rule {number}"
        if codes := rule.get("onExitCodes"):
            name = codes["containerName"]
            if ends.get(name, 0) != 0 and ends[name] in codes["values"]:
                where = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
                said = f"failed with exit code {ends[name]} matching {rule['action']} rule at index {number}"
                return rule["action"], f"Container {name} for pod {where} {said}"
    return "Count", ""


def _retry_at(failed: Sequence[Manifest]) -> float:
    """When the next attempt of an index may start: after a wait that grows with every failure."""
    if not failed:
        return 0.0
    return max(map(_finished_at, failed)) + min(LONGEST_RETRY_S, FIRST_RETRY_S * 2.0 ** min(30, len(failed) - 1))


def _finished_at(pod: Manifest) -> float:
    statuses = (*pod["status"].get("initContainerStatuses", ()), *pod["status"].get("containerStatuses", ()))
    ends = [one["state"]["terminated"]["finishedAt"] for one in statuses if "terminated" in one["state"]]
    return seconds(str(max(ends, default=pod["metadata"]["creationTimestamp"])))


def _index(pod: Manifest) -> int:
    return int(pod["metadata"]["annotations"][INDEX])


def _indexes(pods: Iterable[Manifest]) -> set[int]:
    return set(map(_index, pods))


def _failed_indexes(job: Manifest, tally: Tally) -> set[int]:
    counts: dict[int, int] = defaultdict(int)
    for pod in tally.failed:
        counts[_index(pod)] += 1
    return {index for index, count in counts.items() if count > job["spec"]["backoffLimitPerIndex"]}


def _pod(job: Manifest, index: int) -> Manifest:
    template = copy.deepcopy(job["spec"]["template"])
    name, uid = job["metadata"]["name"], job["metadata"]["uid"]
    metadata = template["metadata"]
    labels = {"batch.kubernetes.io/job-name": name, "batch.kubernetes.io/controller-uid": uid, INDEX: str(index)}
    for container in (*template["spec"].get("initContainers", ()), *template["spec"]["containers"]):
        if not any(variable["name"] == "JOB_COMPLETION_INDEX" for variable in container.setdefault("env", [])):
            container["env"].append({"name": "JOB_COMPLETION_INDEX", "value": str(index)})
    metadata |= {
        "generateName": f"{name}-{index}-",
        "namespace": job["metadata"]["namespace"],
        "labels": {**metadata.get("labels", {}), **labels},
        "annotations": {**metadata.get("annotations", {}), INDEX: str(index)},
        "ownerReferences": [owner_reference(job)],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}

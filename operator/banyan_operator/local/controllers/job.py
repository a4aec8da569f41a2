"""Job → pods: runs to completion, with retries after a wait, indexed or not."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from banyan_operator.kube.objects import key_of, owner_reference
from banyan_operator.local.controllers.actions import (
    Action,
    Create,
    SetStatus,
    condition,
    delete,
    first_to_go,
    is_active,
    is_deleted,
    is_finished,
    is_ready,
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
    if ended_at := _ended_at(job):
        ttl = job["spec"].get("ttlSecondsAfterFinished")
        return [delete(job)] if ttl is not None and now >= ended_at + ttl else []
    tally = Tally.of(job, pods)
    status = job.get("status", {})
    conditions = {c["type"]: c for c in status.get("conditions", [])}
    verdict = _announced(conditions) or _verdict(job, tally, now)
    suspended = verdict is None and bool(job["spec"].get("suspend"))
    actions: list[Action] = []
    if verdict is not None or suspended:
        actions += [delete(pod) for pod in tally.active]
    elif "startTime" in status:  # the start is noted before anything runs
        actions += _keep_running(job, tally, now)
    actions.append(SetStatus(key_of(job), _status(job, tally, verdict, suspended, conditions, now)))
    return actions


def _verdict(job: Manifest, tally: Tally, now: float) -> Verdict | None:
    spec = job["spec"]
    for pod in tally.failed:
        action, why = _matching_rule(job, pod)
        if action == "FailJob":
            return Verdict(False, "PodFailurePolicy", why)
    started = job.get("status", {}).get("startTime")
    limit = spec.get("activeDeadlineSeconds")
    if limit is not None and started is not None and now - seconds(started) >= limit:
        return Verdict(False, "DeadlineExceeded", "Job was active longer than specified deadline")
    if _is_indexed(job):
        return _verdict_of_indexes(job, tally)
    if len(tally.failed) > spec.get("backoffLimit", 6):
        return Verdict(False, "BackoffLimitExceeded", "Job has reached the specified backoff limit")
    wanted = spec.get("completions")
    done = len(tally.succeeded)
    if (done >= wanted) if wanted is not None else (done and not tally.active):
        return Verdict(True, "CompletionsReached", "Reached expected number of succeeded pods")
    return None


def _verdict_of_indexes(job: Manifest, tally: Tally) -> Verdict | None:
    spec = job["spec"]
    done, lost = _indexes(tally.succeeded), _failed_indexes(job, tally)
    for rule in spec.get("successPolicy", {}).get("rules", ()):
        counted = done & _parse_indexes(rule["succeededIndexes"]) if "succeededIndexes" in rule else done
        needed = rule.get("succeededCount", len(_parse_indexes(rule.get("succeededIndexes", ""))))
        if len(counted) >= needed:
            return Verdict(True, "SuccessPolicy", "Matched rules at index 0")
    if "backoffLimitPerIndex" not in spec and len(tally.failed) > spec.get("backoffLimit", 6):
        return Verdict(False, "BackoffLimitExceeded", "Job has reached the specified backoff limit")
    most = spec.get("maxFailedIndexes")
    if most is not None and len(lost) > most:
        return Verdict(False, "MaxFailedIndexesExceeded", "Job has exceeded the specified maximal number of failed indexes")
    if len(done | lost) < spec["completions"]:
        return None
    if lost:
        return Verdict(False, "FailedIndexes", "Job has failed indexes")
    return Verdict(True, "CompletionsReached", "Reached expected number of succeeded pods")


def _keep_running(job: Manifest, tally: Tally, now: float) -> list[Action]:
    spec = job["spec"]
    parallelism: int = spec.get("parallelism", 1)
    # with the policy Failed a pod is replaced only when its processes are gone, so that two never do the same work
    waits = spec.get("podReplacementPolicy", "Failed" if "podFailurePolicy" in spec else "TerminatingOrFailed") == "Failed"
    taken = len(tally.active) + (len(tally.leaving) if waits else 0)
    if not _is_indexed(job):
        wanted = parallelism if spec.get("completions") is None else min(parallelism, spec["completions"] - len(tally.succeeded))
        if spec.get("completions") is None and tally.succeeded:
            wanted = 0  # a work queue that has seen its end
        surplus = max(0, len(tally.active) - wanted)
        if surplus:
            return [delete(pod) for pod in first_to_go(tally.active)[:surplus]]
        if now < _retry_at(tally.failed, tally.succeeded):
            return []
        return [Create(_pod(job, None)) for _ in range(wanted - taken)]
    busy = _indexes(tally.active) | (_indexes(tally.leaving) if waits else set())
    over = _indexes(tally.succeeded) | _failed_indexes(job, tally)
    actions: list[Action] = [delete(pod) for pod in tally.active if _index(pod) >= spec["completions"]]
    per_index: dict[int, list[Manifest]] = defaultdict(list)
    for pod in tally.failed:
        per_index[_index(pod)].append(pod)
    for index in range(spec["completions"]):
        if len(busy) >= parallelism:
            break
        failures = per_index[index] if "backoffLimitPerIndex" in spec else tally.failed
        if index in busy or index in over or now < _retry_at(failures, ()):
            continue
        busy.add(index)
        actions.append(Create(_pod(job, index)))
    return actions


def _status(
    job: Manifest, tally: Tally, verdict: Verdict | None, suspended: bool, conditions: dict[str, Manifest], now: float
) -> dict[str, Any]:
    old = list(conditions.values())
    before = job.get("status", {})
    status: dict[str, Any] = {"uncountedTerminatedPods": {}}
    if not suspended:
        status["startTime"] = before.get("startTime", stamp(now))
    if suspended:
        conditions["Suspended"] = condition(old, "Suspended", "True", "JobSuspended", "Job suspended", now)
    elif "Suspended" in conditions:
        conditions["Suspended"] = condition(old, "Suspended", "False", "JobResumed", "Job resumed", now)
    if verdict is not None:
        first, last = ("SuccessCriteriaMet", "Complete") if verdict.complete else ("FailureTarget", "Failed")
        conditions[first] = condition(old, first, "True", verdict.reason, verdict.message, now)
        if not tally.active and not tally.leaving:
            conditions[last] = condition(old, last, "True", verdict.reason, verdict.message, now)
            if verdict.complete:
                status["completionTime"] = stamp(now)
    counts = {
        "active": len(tally.active),
        "ready": sum(map(is_ready, tally.active)),
        "terminating": len(tally.leaving),
        "succeeded": len(tally.succeeded),
        "failed": len(tally.failed),
    }
    status |= {name: count for name, count in counts.items() if count}
    if _is_indexed(job):
        indexes = {"completedIndexes": _indexes(tally.succeeded), "failedIndexes": _failed_indexes(job, tally)}
        status |= {name: _write_indexes(found) for name, found in indexes.items() if found}
    if conditions:
        status["conditions"] = list(conditions.values())
    return status


def _announced(conditions: dict[str, Manifest]) -> Verdict | None:
    """A verdict once made stands, whatever its last pods do."""
    for kind, complete in (("SuccessCriteriaMet", True), ("FailureTarget", False)):
        if kind in conditions:
            return Verdict(complete, conditions[kind]["reason"], conditions[kind]["message"])
    return None


def _ended_at(job: Manifest) -> float | None:
    for one in job.get("status", {}).get("conditions", ()):
        if one["type"] in ("Complete", "Failed") and one["status"] == "True":
            return seconds(str(one["lastTransitionTime"]))
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
            if any(c["type"] == wanted["type"] and c["status"] == wanted.get("status", "True") for c in pod["status"]["conditions"]):
                return rule["action"], f"Pod {pod['metadata']['name']} has condition {wanted['type']} matching rule {number}"
        codes = rule.get("onExitCodes")
        for name, code in ends.items() if codes else ():
            if code == 0 or codes.get("containerName") not in (None, name):
                continue
            if (code in codes["values"]) == (codes["operator"] == "In"):
                where = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
                text = f"Container {name} for pod {where} failed with exit code {code} matching {rule['action']} rule at index {number}"
                return rule["action"], text
    return "Count", ""


def _retry_at(failed: Sequence[Manifest], succeeded: Sequence[Manifest]) -> float:
    """When the next attempt may start: after a wait that grows with every failure since the last success."""
    last_success = max(map(_finished_at, succeeded), default=0.0)
    failures = [at for at in map(_finished_at, failed) if at > last_success]
    if not failures:
        return 0.0
    return max(failures) + min(LONGEST_RETRY_S, FIRST_RETRY_S * 2.0 ** min(30, len(failures) - 1))


def _finished_at(pod: Manifest) -> float:
    statuses = (*pod["status"].get("initContainerStatuses", ()), *pod["status"].get("containerStatuses", ()))
    ends = [one["state"]["terminated"]["finishedAt"] for one in statuses if "terminated" in one["state"]]
    return seconds(str(max(ends, default=pod["metadata"]["creationTimestamp"])))


def _is_indexed(job: Manifest) -> bool:
    return bool(job["spec"].get("completionMode") == "Indexed")


def _index(pod: Manifest) -> int:
    return int(pod["metadata"]["annotations"][INDEX])


def _indexes(pods: Iterable[Manifest]) -> set[int]:
    return set(map(_index, pods))


def _failed_indexes(job: Manifest, tally: Tally) -> set[int]:
    limit = job["spec"].get("backoffLimitPerIndex")
    if limit is None:
        return set()
    counts: dict[int, int] = defaultdict(int)
    for pod in tally.failed:
        counts[_index(pod)] += limit + 1 if _matching_rule(job, pod)[0] == "FailIndex" else 1
    return {index for index, count in counts.items() if count > limit}


def _parse_indexes(text: str) -> set[int]:
    """'0,2-4' → {0, 2, 3, 4}"""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _write_indexes(indexes: set[int]) -> str:
    """{0, 2, 3, 4} → '0,2-4'"""
    parts: list[str] = []
    ordered = sorted(indexes)
    start = 0
    for i, index in enumerate(ordered):
        if i + 1 == len(ordered) or ordered[i + 1] != index + 1:
            first = ordered[start]
            parts.append(str(first) if first == index else f"{first}-{index}" if index > first + 1 else f"{first},{index}")
            start = i + 1
    return ",".join(parts)


def _pod(job: Manifest, index: int | None) -> Manifest:
    template = copy.deepcopy(job["spec"]["template"])
    name, uid = job["metadata"]["name"], job["metadata"]["uid"]
    metadata = template.get("metadata", {})
    labels = {"job-name": name, "controller-uid": uid, "batch.kubernetes.io/job-name": name, "batch.kubernetes.io/controller-uid": uid}
    prefix = name + "-"
    if index is not None:
        prefix += f"{index}-"
        labels[INDEX] = str(index)
        metadata["annotations"] = {**metadata.get("annotations", {}), INDEX: str(index)}
        for container in (*template["spec"].get("initContainers", ()), *template["spec"]["containers"]):
            if not any(variable["name"] == "JOB_COMPLETION_INDEX" for variable in container.setdefault("env", [])):
                container["env"].append({"name": "JOB_COMPLETION_INDEX", "value": str(index)})
    metadata |= {
        "generateName": prefix,
        "namespace": job["metadata"]["namespace"],
        "labels": {**metadata.get("labels", {}), **labels},
        "ownerReferences": [owner_reference(job)],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}

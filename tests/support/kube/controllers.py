"""Kubernetes' controllers and kubelets, as far as our children need them, on the objects of an API server in memory.

`Cluster`, the simulation's, is simple, and each of it as fast or slow as it happens to be. `ReadyAtOnce` has no time and no failures.
Both act on what is the case, not on what a watch shows: the lag between kinds is made by our own watches.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from banyan_operator.desired.batchjob import partial_of
from banyan_operator.desired.metadata import COMPONENT
from banyan_operator.kube import kinds
from banyan_operator.kube.kinds import Manifest
from banyan_operator.kube.objects import Key, controller, controller_uid, is_true, key_of, owner_reference, uid_of
from banyan_operator.times import stamp
from tests.support.kube.apiserver import Server

if TYPE_CHECKING:
    from tests.simulation.operator.run import Simulation

LINES: Final = 100  # of a batch
SHARDS: Final = 3
FINAL_CODES: Final = (64, 65, 77, 78, 79)
INDEX: Final = "batch.kubernetes.io/job-completion-index"


@dataclass(frozen=True)
class PodEnd:
    """How a worker ended: what its pod says of it."""

    pod: str
    uid: str
    code: int
    counts: Mapping[str, int]
    text: str
    at: float
    index: int = 0
    ignored: bool = False  # the pod was disrupted, which is no failure of the work
    word: str = ""


@dataclass
class JobTruth:
    """All that ever happened to one Job."""

    batch: str  # uid of its BatchJob
    phase: str  # "": a stranger's
    partial: str | None  # of a merge
    ends: list[PodEnd] = field(default_factory=list)
    finished: str | None = None  # Complete or Failed
    finished_at: float = 0.0
    pods: set[str] = field(default_factory=set)  # uids of those whose worker may run
    gone: bool = False

    @property
    def busy(self) -> bool:
        return bool(self.pods) or not (self.finished or self.gone)


class Cluster:
    """All controllers and kubelets."""

    def __init__(self, sim: Simulation) -> None:
        self.sim, self.server, self.rng, self.loop = sim, sim.server, sim.rng, sim.loop
        self.crashes = 0.0  # share of pods that crash
        self.silence = 0.5  # share of questions that a server's pod leaves without an answer
        self.speed = {name: self.rng.choice((0.02, 0.3, 2.0)) for name in ("deployment", "job", "kubelet", "gone")}
        self.work_s = self.rng.choice((1.0, 10.0, 40.0))
        self.jobs: dict[str, JobTruth] = {}  # by uid of the Job
        self.worked: dict[str, dict[str, int]] = {}  # uid of a BatchJob → the counts of its work, once all of it is done
        self._due: set[tuple[str, Key]] = set()
        self._templates: dict[str, Manifest] = {}  # uid of a ReplicaSet → the template it was made from
        self._began: dict[str, float] = {}  # uid of a worker's pod → when it began
        self._named = 0
        # with a chance of its own, so that other schedules stay as they are
        self.sweeps = random.Random(f"{sim.seed} sweeps").random() < 0.1  # a Job goes with its pods in the moment in which it ends
        self.in_the_foreground = random.Random(f"{sim.seed} foreground").random() < 0.5
        self.luck = random.Random(f"{sim.seed} nodes")
        self.cuts = self.luck.random() < 0.3  # a node falls silent under a worker
        self.cut: set[str] = set()  # nodes that do not answer; what ran there may run on
        self.server.changes.append(self._changed)

    # --- what sets them off ---

    def _changed(self, before: Manifest | None, after: Manifest | None) -> None:
        one = after or before
        assert one is not None
        match one["kind"]:
            case "Deployment":
                if after is not None and (before is None or before["spec"] != after["spec"]):
                    self._soon("deployment", key_of(one))
            case "Job":
                if after is None:
                    self._truth(one).gone = True
                elif before is None or before["spec"] != after["spec"]:
                    self._truth(one)
                    self._soon("job", key_of(one))
            case "Ingress" if before is None:
                self.loop.call_later(self.speed["deployment"], self._address, key_of(one))
            case "Pod":
                self._pod_changed(before, after)

    def _soon(self, what: str, key: Key) -> None:
        if (what, key) not in self._due:
            self._due.add((what, key))
            known = self.server.get(key) if self.rng.random() < 0.5 else None
            self.loop.call_later(self.speed[what] * self.rng.random(), self._sync, what, key, known)

    def _sync(self, what: str, key: Key, known: Manifest | None) -> None:
        """`known`: what the controller goes by, which has its own lag; None: what is."""
        self._due.discard((what, key))
        live = self.server.get(key)
        if live is None or live["metadata"].get("deletionTimestamp"):
            return
        if known is not None and uid_of(known) == uid_of(live) and known["spec"] != live["spec"]:
            live = {**live, "spec": known["spec"]}
            self._soon(what, key)
        if what == "deployment":
            self._deployment(live)
        else:
            self._job(live)

    def _owner_sync(self, pod: Manifest) -> None:
        owner = controller(pod)
        if owner is None:
            return
        if owner["kind"] == "Job":
            self._soon("job", Key("Job", pod["metadata"]["namespace"], owner["name"]))
        elif owner["kind"] == "ReplicaSet":
            live = self.server.get(Key("ReplicaSet", pod["metadata"]["namespace"], owner["name"]))
            above = controller(live) if live is not None else None
            if above is not None:
                self._soon("deployment", Key("Deployment", pod["metadata"]["namespace"], above["name"]))

    # --- Deployments ---

    def _deployment(self, live: Manifest) -> None:
        uid, template, wanted = uid_of(live), live["spec"]["template"], live["spec"]["replicas"]
        sets = self.server.controlled(kinds.REPLICA_SET, uid)
        current = next((one for one in sets if self._templates.get(uid_of(one)) == template), None)
        if current is None:
            current = self._replica_set(live, template)
            sets.append(current)
        pods = {uid_of(one): self._alive(uid_of(one)) for one in sets}
        news = pods.pop(uid_of(current))
        olds = [pod for group in pods.values() for pod in group]
        ready = sum(_is_ready(pod) for pod in news)
        if live["spec"]["strategy"]["type"] == "Recreate":
            leaving = [pod for one in sets if one is not current for pod in self.server.controlled(kinds.POD, uid_of(one))]
            for pod in olds:
                self._delete(pod)
            room = 0 if leaving else wanted
        else:
            room = wanted + 1 - len(olds)
            surplus = max(0, len(olds) - max(0, wanted - ready))
            for pod in sorted(olds, key=_is_ready)[:surplus]:
                self._delete(pod)
        for _ in range(min(wanted, room) - len(news)):
            self._pod(current, f"{current['metadata']['name']}-")
        for pod in sorted(news, key=_is_ready)[: max(0, len(news) - wanted)]:
            self._delete(pod)
        status = {"observedGeneration": live["metadata"]["generation"], "replicas": len(news) + len(olds), "readyReplicas": ready}
        available = {"type": "Available", "status": "True" if ready >= wanted else "False", "reason": "x"}
        self.server.set_status(key_of(live), {**status, "conditions": [available]})

    def _alive(self, replica_set: str) -> list[Manifest]:
        pods = self.server.controlled(kinds.POD, replica_set)
        return [
            pod for pod in pods if not pod["metadata"].get("deletionTimestamp") and pod["status"]["phase"] not in ("Failed", "Succeeded")
        ]

    def _replica_set(self, deployment: Manifest, template: Manifest) -> Manifest:
        mark = self._name()
        labels = {**template["metadata"]["labels"], "pod-template-hash": mark}
        made = self.server.create(
            {
                "apiVersion": "apps/v1",
                "kind": "ReplicaSet",
                "metadata": {
                    "name": f"{deployment['metadata']['name']}-{mark}",
                    "namespace": deployment["metadata"]["namespace"],
                    "labels": labels,
                    "ownerReferences": [owner_reference(deployment)],
                },
                "spec": {"replicas": 0, "template": {**template, "metadata": {**template["metadata"], "labels": labels}}},
            }
        )
        self._templates[uid_of(made)] = template
        return made

    def _address(self, key: Key) -> None:
        self.server.set_status(key, {"loadBalancer": {"ingress": [{"ip": "192.0.2.1"}]}})

    # --- Jobs ---

    def _truth(self, job: Manifest) -> JobTruth:
        if uid_of(job) not in self.jobs:
            phase = (job["metadata"].get("labels") or {}).get(COMPONENT, "")
            self.jobs[uid_of(job)] = JobTruth(batch=controller_uid(job) or "", phase=phase, partial=partial_of(job))
        return self.jobs[uid_of(job)]

    def _job(self, live: Manifest) -> None:
        truth = self._truth(live)
        pods = self.server.controlled(kinds.POD, uid_of(live))
        open_ = [pod for pod in pods if pod["status"]["phase"] not in ("Succeeded", "Failed")]
        staying = [pod for pod in open_ if not pod["metadata"].get("deletionTimestamp")]
        failures = [end for end in truth.ends if end.code != 0 and not end.ignored]
        limit, indexes = live["spec"]["backoffLimitPerIndex"], range(live["spec"]["completions"])
        spent = {index for index in indexes if sum(end.index == index for end in failures) > limit}
        old = live.get("status") or {}
        conditions = {one["type"]: one for one in old.get("conditions") or ()}
        if truth.finished:
            pass
        elif any(end.code == 0 for end in truth.ends):
            self._finish(truth, conditions, "SuccessCriteriaMet", "Complete", open_, "")
        elif any(end.code in FINAL_CODES for end in failures):
            self._finish(truth, conditions, "FailureTarget", "Failed", open_, "a pod ended so", "PodFailurePolicy")
        elif len(spent) == len(indexes):
            self._finish(truth, conditions, "FailureTarget", "Failed", open_, "Job has failed indexes")
        elif live["spec"].get("suspend"):
            conditions["Suspended"] = self._condition("Suspended", "True")
        else:
            if "Suspended" in conditions and conditions["Suspended"]["status"] == "True":
                conditions["Suspended"] = self._condition("Suspended", "False")
            for pod in [pod for pod in staying if _index(pod) not in indexes]:
                self._delete(pod)
                staying.remove(pod)
            for index in sorted(set(indexes) - spent - {_index(pod) for pod in open_}):
                pod = self._pod(live, f"{live['metadata']['name']}-{index}-", {INDEX: str(index)})
                staying, open_ = [*staying, pod], [*open_, pod]
        if live["spec"].get("suspend") or truth.finished or "SuccessCriteriaMet" in conditions or "FailureTarget" in conditions:
            for pod in staying:
                self._delete(pod)
            staying = []
        status: Manifest = {
            "active": len(staying),
            "ready": sum(_is_ready(pod) for pod in staying),
            "terminating": len(open_) - len(staying),
            "failed": len(failures),
            "conditions": list(conditions.values()),
        }
        if truth.finished:
            status |= {"active": 0, "terminating": 0, "ready": 0}
        self.server.set_status(key_of(live), status)
        if not truth.finished and ("SuccessCriteriaMet" in conditions or "FailureTarget" in conditions):
            self._soon("job", key_of(live))
        if truth.finished and self.sweeps:
            self.loop.call_later(self.speed["gone"] / 10, self._swept, key_of(live), uid_of(live))

    def _swept(self, key: Key, uid: str) -> None:
        """What ttlSecondsAfterFinished: 0 does, and who deletes it by hand: then it goes first."""
        live = self.server.get(key)
        if live is not None and uid_of(live) == uid:
            self.sim.saw("a Job is swept away")
            if self.in_the_foreground:
                self.server.delete(key, foreground=True)
                return
            for pod in self.server.controlled(kinds.POD, uid):
                self.server.delete(key_of(pod))
            self.server.delete(key)

    def _finish(
        self,
        truth: JobTruth,
        conditions: dict[str, Manifest],
        first: str,
        last: str,
        open_: list[Manifest],
        message: str,
        reason: str = "x",
    ) -> None:
        """In two steps: what decided it is known, then nothing of it runs any more."""
        if first not in conditions:
            conditions[first] = self._condition(first, "True", message, reason)
        elif not open_:
            truth.finished, truth.finished_at = last, self.loop.now
            conditions[last] = self._condition(last, "True", message, reason)

    def _condition(self, kind: str, status: str, message: str = "", reason: str = "x") -> Manifest:
        return {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": stamp(self.server.now())}

    # --- pods ---

    def _name(self) -> str:
        self._named += 1
        return f"{self._named:05d}"

    def _pod(self, owner: Manifest, prefix: str, annotations: Mapping[str, str] | None = None) -> Manifest:
        template = owner["spec"]["template"]
        return self.server.create(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    **template["metadata"],
                    "annotations": {**(template["metadata"].get("annotations") or {}), **(annotations or {})},
                    "name": prefix + self._name(),
                    "namespace": owner["metadata"]["namespace"],
                    "ownerReferences": [owner_reference(owner)],
                },
                "spec": template["spec"],
                "status": {"phase": "Pending", "conditions": []},
            }
        )

    def _delete(self, pod: Manifest) -> None:
        self.server.delete(key_of(pod), uid_of(pod))

    def _pod_changed(self, before: Manifest | None, after: Manifest | None) -> None:
        if after is None:
            assert before is not None
            self._ended(before, 143, "the pod is gone", silent=True)
            self._owner_sync(before)
            return
        if before is None:
            if controller(after) is not None:
                self._then(after, self._scheduled)
            return
        if after["metadata"].get("deletionTimestamp") and not before["metadata"].get("deletionTimestamp"):
            self.loop.call_later(self.speed["gone"] * self.rng.random(), self._stopped, key_of(after), uid_of(after))
        if after.get("status") != before.get("status") or after["metadata"].get("deletionTimestamp"):
            self._owner_sync(after)

    def _then(self, pod: Manifest, step: Any, factor: float = 1.0) -> None:
        self.loop.call_later(self.speed["kubelet"] * factor * self.rng.random(), self._step, step, key_of(pod), uid_of(pod))

    def _step(self, step: Any, key: Key, uid: str) -> None:
        pod = self.server.get(key)
        if pod is not None and uid_of(pod) == uid and not pod["metadata"].get("deletionTimestamp") and not self._is_cut_off(pod):
            step(pod)

    def _status(self, pod: Manifest, **status: Any) -> Manifest:
        changed = self.server.set_status(key_of(pod), {**pod["status"], **status})
        assert changed is not None
        return changed

    def _scheduled(self, pod: Manifest) -> None:
        job = self.jobs.get(controller_uid(pod) or "")
        there = self.cuts and job is not None and job.phase and "node-1" not in self.cut and self.luck.random() < 0.7
        node = "node-1" if there else "node-0"
        self.server.edit(key_of(pod), lambda live: {**live, "spec": {**live["spec"], "nodeName": node}})
        pod = self.server.objects[key_of(pod)]
        scheduled = {"type": "PodScheduled", "status": "True"}
        waiting = _container(pod, {"waiting": {"reason": "ContainerCreating"}})
        pod = self._status(pod, conditions=[scheduled], containerStatuses=[waiting])
        self._then(pod, self._runs)

    def _runs(self, pod: Manifest) -> None:
        running = {"running": {"startedAt": stamp(self.server.now())}}
        worker = _main(pod) == "worker"
        before = pod["status"]["containerStatuses"][0]
        status = {**before, "state": running, "ready": worker, "started": worker}
        conditions = [one for one in pod["status"]["conditions"] if one["type"] != "Ready"]
        conditions.append({"type": "Ready", "status": "True" if worker else "False"})
        pod = self._status(pod, phase="Running", conditions=conditions, containerStatuses=[status], podIP="10.1.0.9")
        if worker:
            job = self.jobs.get(controller_uid(pod) or "")
            if job is not None:
                job.pods.add(uid_of(pod))
                self.sim.checks.worker_runs(job, pod)
            self._began[uid_of(pod)] = self.loop.now
            if pod["spec"]["nodeName"] == "node-1" and self.luck.random() < 0.7:
                self.loop.call_later(self.work_s * self.luck.random() / 2, self.cut_power, "node-1", self.luck.choice((1.0, 30.0)))
            self.loop.call_later(self.work_s * self.rng.random(), self._step, self._works, key_of(pod), uid_of(pod))
        else:
            self._then(pod, self._ready, 2.0)

    def _ready(self, pod: Manifest) -> None:
        before = pod["status"]["containerStatuses"][0]
        if "running" not in before["state"]:
            return
        conditions = [one for one in pod["status"]["conditions"] if one["type"] != "Ready"]
        conditions.append({"type": "Ready", "status": "True"})
        pod = self._status(pod, conditions=conditions, containerStatuses=[{**before, "ready": True, "started": True}])
        if self.rng.random() < self.crashes:
            self._then(pod, self._crashes, 5.0)

    def _crashes(self, pod: Manifest) -> None:
        """A server's container ends and is started again, or the pod is evicted."""
        if self.crashes == 0.0:
            return
        conditions = [one for one in pod["status"]["conditions"] if one["type"] != "Ready"]
        conditions.append({"type": "Ready", "status": "False"})
        if self.rng.random() < 0.3:
            self._status(pod, phase="Failed", reason="Evicted", message="the node is low on memory", conditions=conditions)
            return
        end = {"exitCode": self.rng.choice((1, 69, 137)), "reason": "Error", "message": "boom", "finishedAt": stamp(self.server.now())}
        before = pod["status"]["containerStatuses"][0]
        again = {
            **before,
            "ready": False,
            "started": False,
            "restartCount": before["restartCount"] + 1,
            "state": {"waiting": {"reason": "CrashLoopBackOff"}},
            "lastState": {"terminated": end},
        }
        pod = self._status(pod, conditions=conditions, containerStatuses=[again])
        self._then(pod, self._runs)

    def _works(self, pod: Manifest) -> None:
        """The worker is done, one way or the other."""
        rng, job = self.rng, self.jobs[controller_uid(pod) or ""]
        phase = job.phase
        if rng.random() < (0.3 if phase == "work" else 0.15) + self.crashes:
            code = rng.choice((1, 1, 64, 65, 69, 75, 77, 79, 137, 143) if phase == "work" else (1, 1, 65, 75, 75, 77, 137, 143))
            done = rng.randrange(LINES) if phase != "plan" else 0
            self._end(pod, code, {"total": LINES, "completed": done, "failed": 0}, disrupted=code == 143 and rng.random() < 0.5)
            return
        failed = rng.randrange(4)
        counts = {"total": LINES, "completed": LINES - failed, "failed": failed}
        match phase:
            case "plan":
                self._end(pod, 0, {"total": LINES, "completed": 0, "failed": 0}, word="planned")
            case "work":
                self._end(pod, 0, self.worked.setdefault(job.batch, counts), word="worked")
            case "merge":
                if job.partial is None and rng.random() < 0.1:
                    self._end(pod, 65, {"total": LINES, "completed": 0, "failed": LINES}, word="all_lines_failed")
                else:
                    self._end(pod, 0, counts, word=(job.partial or "succeeded").replace("-", "_"))

    def _end(self, pod: Manifest, code: int, counts: Mapping[str, int], *, disrupted: bool = False, word: str = "Word") -> None:
        text = f"words of {pod['metadata']['name']}"
        plan = f', "shards": {SHARDS}, "fenced": true' if word == "planned" else ""
        words = f'{{"code": "{word}", "message": "{text}", "requestCounts": {_json(counts)}{plan}}}'
        state = {
            "exitCode": code,
            "reason": "Completed" if code == 0 else "Error",
            "message": words,
            "finishedAt": stamp(self.server.now()),
        }
        conditions = [one for one in pod["status"]["conditions"] if one["type"] != "Ready"]
        if disrupted:
            conditions.append({"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": "taken"})
        before = pod["status"]["containerStatuses"][0]
        status = {**before, "ready": False, "started": False, "state": {"terminated": state}}
        self._ended(pod, code, text, counts, ignored=disrupted, word=word)
        self._status(pod, phase="Succeeded" if code == 0 else "Failed", conditions=conditions, containerStatuses=[status])

    def _ended(
        self,
        pod: Manifest,
        code: int,
        text: str,
        counts: Mapping[str, int] | None = None,
        *,
        ignored: bool = False,
        silent: bool = False,
        word: str = "",
    ) -> None:
        """Note the end of a worker, once. `silent`: without last words."""
        job = self.jobs.get(controller_uid(pod) or "")
        if job is None or any(end.uid == uid_of(pod) for end in job.ends):
            return
        job.pods.discard(uid_of(pod))
        said, at = "" if silent else text, self.loop.now
        job.ends.append(PodEnd(pod["metadata"]["name"], uid_of(pod), code, counts or {}, said, at, _index(pod), ignored, word))

    def _stopped(self, key: Key, uid: str) -> None:
        """A deleted pod's processes end within its grace period, then it goes."""
        pod = self.server.get(key)
        if pod is None or uid_of(pod) != uid or self._is_cut_off(pod):
            return
        if _main(pod) == "worker" and pod["status"]["phase"] == "Running" and uid in self._began:
            suspended = True
            self._end(pod, 143, {"total": LINES, "completed": self._done(uid), "failed": 0}, disrupted=suspended)
            self.loop.call_later(self.speed["gone"] * self.rng.random(), self._gone, key, uid)
        else:
            self._gone(key, uid)

    def _gone(self, key: Key, uid: str) -> None:
        pod = self.server.get(key)
        if pod is not None and uid_of(pod) == uid:
            self.server.remove(key)

    # --- nodes ---

    def cut_power(self, node: str, after_s: float) -> None:
        """It does not answer, or its power is cut: nobody can tell. `after_s`: how long until pods are evicted from it."""
        if node in self.cut:
            return
        self.sim.saw("a node is cut off")
        self.cut.add(node)
        if self.luck.random() < 0.5:
            self.loop.call_later(self.luck.choice((2.0, 20.0, 100.0)) * self.luck.random() + after_s / 2, self.return_power, node)
        for pod in self._pods_on(node):
            self.loop.call_later(after_s * self.luck.random(), self._silent, key_of(pod), uid_of(pod))
        self.loop.call_later(after_s, self._evicts, node)

    def return_power(self, node: str) -> None:
        """The kubelet is back, and finds none of its containers. A node that stays away until all rests stays away for ever."""
        if self.sim.resting:
            return
        self.cut.discard(node)
        for pod in self._pods_on(node):
            if pod["metadata"].get("deletionTimestamp"):
                self._stopped(key_of(pod), uid_of(pod))
            elif pod["status"]["phase"] == "Running" and pod["status"]["containerStatuses"]:
                self._end(pod, 137, {"total": LINES, "completed": 0, "failed": 0})
            elif pod["status"]["phase"] == "Pending":
                self._then(pod, self._runs)

    def _pods_on(self, node: str) -> list[Manifest]:
        return [one for one in self.server.of(kinds.POD) if one["spec"].get("nodeName") == node]

    def _is_cut_off(self, pod: Manifest) -> bool:
        return pod["spec"].get("nodeName") in self.cut

    def working(self, job: JobTruth) -> list[str]:
        """Uids of its pods whose worker may run where a node still answers."""
        lost = {uid_of(one) for node in self.cut for one in self._pods_on(node)}
        return sorted(job.pods - lost)

    def given_up(self, pod: Manifest) -> None:
        """Somebody says that it has failed. What it writes from now on the storage refuses."""
        self._ended(pod, 137, "", ignored=is_true(pod, "DisruptionTarget"), silent=True)

    def _silent(self, key: Key, uid: str) -> None:
        """The node's controller takes back the Ready condition."""
        pod = self.server.get(key)
        if pod is None or uid_of(pod) != uid or not self._is_cut_off(pod) or not is_true(pod, "Ready"):
            return
        conditions = [one for one in pod["status"]["conditions"] if one["type"] != "Ready"]
        self._status(pod, conditions=[*conditions, {"type": "Ready", "status": "False"}])

    def _evicts(self, node: str) -> None:
        for pod in self._pods_on(node) if node in self.cut else ():
            if not pod["metadata"].get("deletionTimestamp") and pod["status"]["phase"] in ("Pending", "Running"):
                taken = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager", "message": "evicted"}
                self._status(pod, conditions=[*pod["status"]["conditions"], taken])
                self._delete(pod)

    # --- what pods answer ---

    def readyz(self, pod: Manifest) -> Mapping[str, Any] | None:
        if self.rng.random() < self.silence:
            return None
        live = self.server.get(key_of(pod))
        if live is None or not _is_ready(live):
            return {"state": "loading", "percent": 40}
        return {"state": "ready", "percent": 100, "model": {"contextLength": 2048}, "version": "0.1.0"}

    def progress(self, pod: Manifest) -> Mapping[str, Any] | None:
        """Of one worker."""
        live = self.server.get(key_of(pod))
        if live is None or uid_of(live) != uid_of(pod) or live["status"]["phase"] != "Running" or self.rng.random() < 0.3:
            return None
        if self._is_cut_off(live):
            return None
        said = {"phase": "running", "total": LINES, "completed": self._done(uid_of(pod)), "failed": 0, "tokensPerSecond": 5.0}
        return {**said, "requestsPerSecond": 3.0, "shards": {"total": SHARDS, "completed": 0, "running": 1}}

    def _done(self, uid: str) -> int:
        return min(LINES - 5, int((self.loop.now - self._began[uid]) * 3))


class ReadyAtOnce:
    """Makes what Kubernetes' controllers make of a Deployment, in the moment in which it is written."""

    def __init__(self, server: Server) -> None:
        self.server = server
        server.changes.append(self.changed)

    def changed(self, before: Manifest | None, after: Manifest | None) -> None:
        if after is None or after["kind"] != "Deployment":
            return
        if (after.get("status") or {}).get("observedGeneration") != after["metadata"]["generation"]:
            self._deployment(after)

    def address(self) -> str:
        """That of the next pod."""
        return "127.0.0.1"

    def _deployment(self, live: Manifest) -> None:
        name, count, template = live["metadata"]["name"], live["spec"]["replicas"], live["spec"]["template"]
        counts = {"replicas": count, "readyReplicas": count}
        replicas = self.child(kinds.REPLICA_SET, f"{name}-rs", live, template, counts, {"template": template})
        for number in range(count):
            self.pod(f"{name}-{number}", replicas, template, ready=True)
        counts |= {"availableReplicas": count, "updatedReplicas": count}
        available = {"type": "Available", "status": "True", "reason": "MinimumReplicasAvailable"}
        progress = {"type": "Progressing", "status": "True", "reason": "NewReplicaSetAvailable"}
        done = {**counts, "observedGeneration": live["metadata"]["generation"], "conditions": [available, progress]}
        self.server.set_status(key_of(live), done)

    def pod(self, name: str, owner: Manifest, template: Manifest, *, ready: bool) -> Manifest:
        """One that runs."""
        now = stamp(self.server.now())
        states = [
            {"name": one["name"], "ready": True, "started": True, "restartCount": 0, "image": "i", "state": {"running": {"startedAt": now}}}
            for one in template["spec"]["containers"]
        ]
        kinds_of = ("PodScheduled", "Initialized", "Ready") if ready else ()
        conditions = [{"type": kind, "status": "True", "lastTransitionTime": now} for kind in kinds_of]
        status = {"phase": "Running", "podIP": self.address(), "startTime": now, "conditions": conditions, "containerStatuses": states}
        return self.child(kinds.POD, name, owner, template, status, {**template["spec"], "nodeName": "n"})

    def child(self, kind: kinds.Kind, name: str, owner: Manifest, template: Manifest, status: Manifest, spec: Manifest) -> Manifest:
        meta = {**template["metadata"], "name": name, "namespace": owner["metadata"]["namespace"]}
        made = {"metadata": {**meta, "ownerReferences": [owner_reference(owner)]}, "spec": spec, "status": status}
        return self.server.put({"apiVersion": kind.api_version, "kind": kind.kind, **made})


def _index(pod: Manifest) -> int:
    return int((pod["metadata"].get("annotations") or {}).get(INDEX, 0))


def _main(pod: Manifest) -> str:
    return str(pod["spec"]["containers"][0]["name"])


def _is_ready(pod: Manifest) -> bool:
    return is_true(pod, "Ready") and not pod["metadata"].get("deletionTimestamp")


def _container(pod: Manifest, state: Manifest) -> Manifest:
    first = pod["spec"]["containers"][0]
    return {
        "name": first["name"],
        "image": first["image"],
        "ready": False,
        "started": False,
        "restartCount": 0,
        "state": state,
        "lastState": {},
    }


def _json(counts: Mapping[str, int]) -> str:
    return "{" + ", ".join(f'"{name}": {value}' for name, value in counts.items()) + "}"

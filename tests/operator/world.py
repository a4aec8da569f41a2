"""A small cluster in memory: a store, the controllers of Kubernetes that our children need, and kubelets that may fail.

Everything random comes from one seed, so a failing run replays.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable
from typing import Any

from banyan_operator import api
from banyan_operator.desired.difference import KINDS
from banyan_operator.desired.metadata import SPEC_HASH
from banyan_operator.desired.references import references
from banyan_operator.plan import Manifest, Plan, Ref, Settings, World
from banyan_operator.reconcile import reconcile
from banyan_operator.times import stamp
from tests.operator.conftest import SETTINGS, merge

Place = tuple[str, str]  # kind, name
RESOURCES = ("InferenceServer", "BatchJob")


class Cluster:
    """One namespace. `writes` counts what the operator changed."""

    def __init__(self, seed: int, settings: Settings = SETTINGS) -> None:
        self.random = random.Random(seed)
        self.settings = settings
        self.now = 1_700_000_000.0
        self.objects: dict[Place, Manifest] = {}
        self.exists: set[Ref] = {Ref("v1", "PersistentVolumeClaim", name) for name in ("models", "batches")}
        self.counter = 0
        self.faults = True
        self.writes = 0
        self.events: list[tuple[str, str]] = []

    # --- the API server ---

    def create(self, manifest: Manifest) -> Manifest:
        self.counter += 1
        live = copy.deepcopy(manifest)
        meta = live["metadata"]
        meta |= {"uid": f"uid-{self.counter}", "generation": 1, "creationTimestamp": stamp(self.now), "namespace": "team"}
        place = (live["kind"], meta["name"])
        assert place not in self.objects
        self.objects[place] = live
        return live

    def edit(self, kind: str, name: str, spec: dict[str, Any]) -> None:
        live = self.objects.get((kind, name))
        if live is None:
            return
        changed = merge(live["spec"], spec)
        if changed != live["spec"]:
            live["spec"] = changed
            live["metadata"]["generation"] += 1

    def delete(self, kind: str, name: str) -> None:
        """At once, with everything that it owns: nothing here has finalizers."""
        gone = self.objects.pop((kind, name), None)
        if gone is None:
            return
        uid = gone["metadata"]["uid"]
        for other_kind, other_name in list(self.objects):
            other = self.objects.get((other_kind, other_name))
            if other is not None and any(owner["uid"] == uid for owner in other["metadata"].get("ownerReferences", ())):
                self.delete(other_kind, other_name)

    def apply(self, manifest: Manifest) -> None:
        place = (manifest["kind"], manifest["metadata"]["name"])
        self.writes += 1
        live = self.objects.get(place)
        if live is None:
            self.create(manifest)
            return
        owners = [owner for owner in live["metadata"].get("ownerReferences", ()) if owner.get("controller")]
        ours = {owner["uid"] for owner in manifest["metadata"].get("ownerReferences", ())}
        assert not owners or {owner["uid"] for owner in owners} <= ours, f"an apply took {place} from its owner"
        if place[0] == "Job":
            fixed = {key: value for key, value in manifest["spec"].items() if key != "suspend"}
            assert fixed == {key: value for key, value in live["spec"].items() if key != "suspend"}, "a Job's fields are immutable"
        for field in ("labels", "annotations"):
            live["metadata"][field] = {**live["metadata"].get(field, {}), **manifest["metadata"].get(field, {})}
        if "ownerReferences" in manifest["metadata"]:
            live["metadata"]["ownerReferences"] = copy.deepcopy(manifest["metadata"]["ownerReferences"])
        for field, value in manifest.items():
            if field not in ("metadata", "apiVersion", "kind") and live.get(field) != value:
                live[field] = copy.deepcopy(value)
                live["metadata"]["generation"] += 1

    # --- the operator's driver ---

    def world(self, resource: Manifest) -> World:
        kind, name = resource["kind"], resource["metadata"]["name"]
        label = "serving.banyan.dev/server" if kind == "InferenceServer" else "serving.banyan.dev/batchjob"
        suffixes = ("", "-server", "-pods", "-cache", "-batch", "-work")
        children = [
            copy.deepcopy(one)
            for (child_kind, child_name), one in self.objects.items()
            if child_kind not in RESOURCES
            and (
                one["metadata"].get("labels", {}).get(label) == name
                or (child_kind in KINDS and any(child_name == name + suffix for suffix in suffixes))
            )
        ]
        missing: set[Ref] = set()
        try:
            missing = {ref for ref in references(api.parse(resource)) if ref not in self.exists}
        except api.SpecError:
            pass
        wanted = (resource["spec"].get("serverRef") or {}).get("name")
        progress = self.random.choice([None, self.progress_of(name)]) if kind == "BatchJob" else None
        return World(
            now=self.now,
            children=tuple(children),
            missing=frozenset(missing),
            server=copy.deepcopy(self.objects.get(("InferenceServer", wanted))) if wanted else None,
            progress=progress,
            readyz={"state": "loading", "percent": 40} if kind == "InferenceServer" else None,
        )

    def progress_of(self, name: str) -> dict[str, Any] | None:
        pod = next((pod for pod in self.pods_of("Job", f"{name}-work") if pod["status"]["phase"] == "Running"), None)
        if pod is None:
            return None
        done = min(100, int(self.now - pod["born"]))
        return {"phase": "running", "total": 100, "completed": done, "failed": 0, "tokensPerSecond": 5.0, "etaSeconds": 100 - done}

    def reconcile(self, kind: str, name: str) -> Plan | None:
        """One turn of the operator, which may die in the middle of carrying out its plan."""
        resource = self.objects.get((kind, name))
        if resource is None:
            return None
        plan = reconcile(copy.deepcopy(resource), self.world(resource), self.settings)
        steps: list[Any] = [*plan.apply, *plan.delete, *([dict(plan.status)] if plan.status is not None else [])]
        if self.faults and self.random.random() < 0.1:
            steps = steps[: self.random.randrange(len(steps) + 1)]
        for step in steps:
            if isinstance(step, Ref):
                self.writes += 1
                self.delete(step.kind, step.name)
            elif "kind" in step:
                self.apply(step)
            else:
                self.writes += 1
                resource["status"] = step
        self.events += [(event.type, event.reason) for event in plan.events]
        return plan

    # --- the controllers ---

    def pods_of(self, kind: str, name: str) -> list[Manifest]:
        owner = self.objects.get((kind, name))
        return [
            pod
            for (pod_kind, _), pod in self.objects.items()
            if pod_kind == "Pod" and owner is not None and pod["metadata"]["ownerReferences"][0]["uid"] == owner["metadata"]["uid"]
        ]

    def controllers(self) -> None:
        for (kind, _), live in list(self.objects.items()):
            if kind == "Deployment":
                self._deployment(live)
            elif kind == "Job":
                self._job(live)
            elif kind == "Pod":
                self._kubelet(live)

    def _pod(self, owner: Manifest) -> None:
        template = owner["spec"]["template"]
        pod = self.create(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": copy.deepcopy(template["metadata"])
                | {
                    "name": f"{owner['metadata']['name']}-{self.counter}",
                    "ownerReferences": [{"kind": owner["kind"], "uid": owner["metadata"]["uid"], "controller": True}],
                },
                "spec": copy.deepcopy(template["spec"]),
                "status": {"phase": "Pending", "conditions": [], "containerStatuses": []},
            }
        )
        pod["born"] = self.now

    def _deployment(self, live: Manifest) -> None:
        revision = live["spec"]["template"]["metadata"]["annotations"][SPEC_HASH]
        pods = self.pods_of("Deployment", live["metadata"]["name"])
        current = [pod for pod in pods if pod["metadata"]["annotations"][SPEC_HASH] == revision]
        old = [pod for pod in pods if pod not in current]
        wanted = live["spec"]["replicas"]
        if len(current) < wanted:
            self._pod(live)
        for pod in current[wanted:]:
            self.delete("Pod", pod["metadata"]["name"])
        if old and (len(current) >= wanted and all(_is_ready(pod) for pod in current[:wanted])):
            self.delete("Pod", old[0]["metadata"]["name"])
        live["status"] = {"observedGeneration": live["metadata"]["generation"], "conditions": []}

    def _job(self, live: Manifest) -> None:
        name = live["metadata"]["name"]
        pods = self.pods_of("Job", name)
        status = live.setdefault("status", {})
        if any(condition["type"] in ("Complete", "Failed") for condition in status.get("conditions", ())):
            return
        if live["spec"]["suspend"]:
            for pod in pods:
                self.delete("Pod", pod["metadata"]["name"])
            status.update(active=0, ready=0)
            return
        ends = [
            pod["status"]["containerStatuses"][-1]["state"]["terminated"]
            for pod in pods
            if pod["status"]["phase"] in ("Succeeded", "Failed")
        ]
        if any(end["exitCode"] == 0 for end in ends):
            status.update(active=0, conditions=[{"type": "Complete", "status": "True", "lastTransitionTime": stamp(self.now)}])
        elif any(end["exitCode"] in (64, 65, 77, 78) for end in ends) or len(ends) > live["spec"]["backoffLimitPerIndex"]:
            status.update(active=0, conditions=[{"type": "Failed", "status": "True", "message": "gave up"}])
        else:
            if all(pod["status"]["phase"] in ("Succeeded", "Failed") for pod in pods):
                self._pod(live)
            status.update(active=1, failed=len(ends))

    def _kubelet(self, pod: Manifest) -> None:
        """Brings a pod on by one step; with faults on, sometimes back."""
        status = pod["status"]
        if status["phase"] in ("Succeeded", "Failed"):
            return
        names = [container["name"] for container in pod["spec"]["containers"]]
        chance = self.random.random()
        previous = status["containerStatuses"][0] if status["containerStatuses"] else {"restartCount": 0, "lastState": {}}
        worker = "worker" in names
        if self.faults and chance < (0.02 if worker else 0.06):
            code = self.random.choice([1, 64, 69, 75, 77, 137, 143])
            end = {"exitCode": code, "reason": "Error", "message": '{"code": "Some", "message": "because"}', "finishedAt": stamp(self.now)}
            if worker:
                status.update(phase="Failed", containerStatuses=[_container(names[-1], {"terminated": end}, previous)])
            else:
                again = {**previous, "restartCount": previous["restartCount"] + 1, "lastState": {"terminated": end}}
                waiting = {"waiting": {"reason": "CrashLoopBackOff"}}
                status.update(phase="Running", conditions=[], containerStatuses=[_container(names[0], waiting, again)])
        elif worker and status["phase"] == "Running" and self.now - pod["born"] >= 100:
            words = '{"code": "Succeeded", "requestCounts": {"total": 100, "completed": 98, "failed": 2}}'
            end = {"exitCode": 0, "reason": "Completed", "message": words, "finishedAt": stamp(self.now)}
            status.update(phase="Succeeded", containerStatuses=[_container("worker", {"terminated": end}, previous)])
        elif chance < 0.6 or not self.faults:
            running = {"running": {"startedAt": stamp(self.now)}}
            began = "running" in (previous.get("state") or {})
            status.update(phase="Running", containerStatuses=[_container(names[-1], previous["state"] if began else running, previous)])
            if began or worker:
                status["conditions"] = [{"type": "Ready", "status": "True"}]
                status["containerStatuses"][0] |= {"ready": True, "started": True}


def _container(name: str, state: Manifest, previous: Manifest) -> Manifest:
    return {
        "name": name,
        "image": "i",
        "ready": False,
        "started": False,
        "restartCount": previous["restartCount"],
        "state": state,
        "lastState": previous.get("lastState", {}),
    }


def _is_ready(pod: Manifest) -> bool:
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in pod["status"]["conditions"])


def resources(cluster: Cluster) -> Iterable[Manifest]:
    return [one for (kind, _), one in cluster.objects.items() if kind in RESOURCES]

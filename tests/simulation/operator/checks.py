"""What has to be true: some of it with each write, the rest when everything has come to rest."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from banyan_operator import api
from banyan_operator.api.status import MADE
from banyan_operator.cluster.store import Store
from banyan_operator.desired.batchjob import partial_of
from banyan_operator.desired.metadata import COMPONENT
from banyan_operator.desired.references import references
from banyan_operator.kube import kinds
from banyan_operator.kube.kinds import Manifest
from banyan_operator.kube.objects import Key, condition, controller_uid, is_true, key_of, uid_of
from banyan_operator.kube.ownership import Owner, whose
from banyan_operator.observed import events
from banyan_operator.observed.batch import COURSE, TERMINAL, deadline
from banyan_operator.plan import Outcome, Ref, World
from banyan_operator.reconcile import decide
from banyan_operator.times import stamp
from tests.simulation.operator.watches import shown_to
from tests.support.kube.controllers import JobTruth

if TYPE_CHECKING:
    from tests.simulation.operator.run import Simulation

PLAN_EVENTS = ("Created", "RolloutStarted", "Scaled")
RACE_S = 2.0
BEGUN_S = 15.0  # lists that a new operator makes may show that a Job has gone before watches show that it had ended
SETTLED_S = 30.0  # after a deadline
PATIENCE_S = 60.0  # for last words that do not come


class Checks:
    def __init__(self, sim: Simulation) -> None:
        self.sim, self.server = sim, sim.server
        self._epochs: dict[str, int] = {}  # uid of a server → how often the user changed what its pods are made of
        self._templates: dict[str, tuple[int, Any]] = {}  # uid of a server → (how often the operator changed it, the last)
        self._expected: dict[tuple[str, str], int] = {}  # (uid, reason) → changes that it tells of
        self._told: dict[str, Manifest] = {}  # Event by name
        self._over: dict[str, str] = {}  # uid of a batch → its terminal phase
        self.spoilt = 0
        self.resumed: set[str] = set()  # uids of Jobs that a vandal resumed or suspended
        sim.server.changes.append(self._changed)

    def pods_may_change(self, uid: str) -> None:
        self._epochs[uid] = self._epochs.get(uid, 0) + 1

    def _changed(self, before: Manifest | None, after: Manifest | None) -> None:
        if after is None and before is not None and before["kind"] in kinds.MADE:
            if before["kind"] == kinds.CONTROLLER_REVISION.kind:
                self.pods_may_change(controller_uid(before) or "")  # what was decided is lost with its record
            self.spoilt += 1  # whoever did it: an operator that has not heard why puts it back

    def spoiled(self) -> None:
        self.spoilt += 1

    def is_over(self, batch: str) -> bool:
        return batch in self._over

    # --- with each write of the operator ---

    def applied(self, before: Manifest | None, after: Manifest) -> None:
        # an apply cannot be made for an object that is absent alone: who comes between the look and the write is taken over
        young = self.server.now() - _seconds(after["metadata"]["creationTimestamp"]) < RACE_S
        if uid_of(after) in self.sim.strangers and before is not after and not young:
            self.sim.fail(f"{key_of(after)} belongs to {whose(after)} and was changed")
        if after["kind"] == "Job" and before is None:
            self._job_made(after)
        if after["kind"] != "Deployment" or before is after:
            return
        uid = controller_uid(after) or ""
        template = _canonical(after["spec"]["template"])
        changes, last = self._templates.get(uid, (-1, None))
        if template != last:
            changes += 1
            if changes > self._epochs.get(uid, 0):
                self.sim.fail(f"{key_of(after)}: its pods are restarted, and the spec asks for the same pods as before")
        self._templates[uid] = (changes, template)
        if before is None:
            self._expect(uid, "Created")
        else:
            if _canonical(before["spec"]["template"]) != template:
                self._expect(uid, "RolloutStarted")
            if before["spec"]["replicas"] != after["spec"]["replicas"]:
                self._expect(uid, "Scaled")

    def _job_made(self, made: Manifest) -> None:
        """A plan before the work, and a merge after it."""
        name, batch, phase = key_of(made), controller_uid(made) or "", made["metadata"]["labels"][COMPONENT]
        works = [(uid, job) for uid, job in self._jobs(batch) if job.phase == "work"]
        if phase == "work" and not any(end.code == 0 for _, job in self._jobs(batch) if job.phase == "plan" for end in job.ends):
            self.sim.fail(f"{name} is made, and nothing was planned")
        done = [job for _, job in self._jobs(batch) if job.phase == phase and job.finished and job.finished_at > BEGUN_S]
        if done and self.sim.attentive and batch in self.server.uids:
            self.sim.fail(f"{name} is made, and that was done already")
        if phase != "merge":
            return
        if partial_of(made) is None and batch not in self.sim.cluster.worked:
            self.sim.fail(f"{name} is made, and the work is not done")
        running = [pod for uid, job in works for pod in self.sim.cluster.working(job) if uid not in self.resumed]
        undecided = [uid for uid, job in works if not (job.finished or job.gone or self._decided(uid) or uid in self.resumed)]
        if running or undecided:
            self.sim.fail(f"{name} is made, and the work goes on: {running} {undecided}")

    def deleted(self, before: Manifest) -> None:
        if uid_of(before) in self.sim.strangers:
            self.sim.fail(f"{key_of(before)} belongs to {whose(before)} and was deleted")
        if before["kind"] == "Deployment" and controller_uid(before) in self.server.uids:
            self.sim.fail(f"{key_of(before)} was deleted, and with it every pod of its server")

    def given_up(self, before: Manifest, after: Manifest) -> None:
        late = self.server.now() - _seconds(before["metadata"].get("deletionTimestamp") or stamp(self.server.now()))
        if before["spec"].get("nodeName") not in self.sim.cluster.cut and late < 30:
            self.sim.fail(f"{key_of(before)} was given up, and its node ends it")
        if before["status"]["phase"] in ("Succeeded", "Failed"):
            self.sim.fail(f"{key_of(before)} had ended, and was given up")
        self.sim.saw("a pod is given up")
        self.sim.cluster.given_up(after)

    def told(self, event: Manifest) -> None:
        self._told[event["metadata"]["name"]] = event

    def status_written(self, before: Manifest, after: Manifest) -> None:
        prior, new, meta = before.get("status") or {}, after["status"], after["metadata"]
        name = str(key_of(after))
        tell = events.of_server if after["kind"] == "InferenceServer" else events.of_batch
        if new.get("phase") == "Terminating" and not prior:
            return  # deleted before anything was told of it
        if not {"observedGeneration", "phase", "conditions"} <= new.keys():
            self.sim.fail(f"{name}: a part of the status of another run: {new}")
            return
        for event in tell(prior, new):
            self._expect(meta["uid"], event.reason)
        if new["observedGeneration"] > meta["generation"] or new["observedGeneration"] < prior.get("observedGeneration", 0):
            self.sim.fail(f"{name}: observedGeneration {new['observedGeneration']} of {meta['generation']}")
        born = _seconds(meta["creationTimestamp"])
        for one in new["conditions"]:
            if _seconds(one["lastTransitionTime"]) < born:
                self.sim.fail(f"{name}: a condition is older than the object: {one}")
        if after["kind"] == "BatchJob":
            self._batch_status(name, before, prior, new)

    def _batch_status(self, name: str, live: Manifest, prior: Mapping[str, Any], new: Mapping[str, Any]) -> None:
        uid, phase = uid_of(live), new["phase"]
        if new.get("runID") and new["runID"] != uid.replace("-", "")[:12]:
            self.sim.fail(f"{name}: the status of another run")
        if new.get("startTime") and _seconds(new["startTime"]) < _seconds(live["metadata"]["creationTimestamp"]):
            self.sim.fail(f"{name}: started before it was made")
        if phase == "Terminating":
            return
        if phase in COURSE and prior.get("phase") in COURSE and COURSE.index(phase) < COURSE.index(prior["phase"]):
            self.sim.fail(f"{name}: was {prior['phase']} and is {phase} again")
        if self._over.get(uid, phase) != phase:
            self.sim.fail(f"{name}: was {self._over[uid]} and is {phase}")
        if phase not in TERMINAL or uid in self._over:
            return
        self._over[uid] = phase
        jobs = [job for job in self.sim.cluster.jobs.values() if job.batch == uid]
        if running := [pod for job in jobs for pod in self.sim.cluster.working(job)]:
            self.sim.fail(f"{name}: {phase}, and its worker runs: {running}")
        if any(not (job.finished or job.gone or self._decided(job_uid)) for job_uid, job in self._jobs(uid)):
            self.sim.fail(f"{name}: {phase}, and its Job may still run")
        match phase:
            case "Succeeded":
                self._succeeded(name, jobs, new)
            case "Failed":
                self._failed(name, jobs, new)
            case "Cancelled":
                self._ended_early(name, jobs, "cancelled")
                if not live["spec"].get("cancel"):
                    self.sim.fail(f"{name}: Cancelled, and nobody asked for it")
            case "Expired":
                self._ended_early(name, jobs, "expired")

    def _jobs(self, batch: str) -> list[tuple[str, JobTruth]]:
        return [(uid, job) for uid, job in self.sim.cluster.jobs.items() if job.batch == batch]

    def _decided(self, uid: str) -> bool:
        """The Job with this uid will start no more workers: it is suspended, or its controller has found an end."""
        live = next((one for one in self.server.of(kinds.JOB) if uid_of(one) == uid), None)
        if live is None:
            return True
        suspended = bool(live["spec"].get("suspend")) and not ((live.get("status") or {}).get("active") or 0)
        return suspended or is_true(live, "SuccessCriteriaMet") or is_true(live, "FailureTarget")

    def _succeeded(self, name: str, jobs: list[JobTruth], new: Mapping[str, Any]) -> None:
        ends = [(job, end) for job in jobs for end in job.ends if end.code == 0 and job.phase == "merge" and job.partial is None]
        if not ends:
            self.sim.fail(f"{name}: Succeeded, and nothing was published")
            return
        counts = new.get("requestCounts") or {}
        if any(dict(end.counts) == dict(counts) for _, end in ends) or not self._words_are_there(ends):
            return
        self.sim.fail(f"{name}: Succeeded with {counts}, and the worker said {[dict(end.counts) for _, end in ends]}")

    def _ended_early(self, name: str, jobs: list[JobTruth], partial: str) -> None:
        """With what was done by then, where anything was."""
        if any(job.phase == "work" for job in jobs) and not any(
            end.code == 0 for job in jobs if job.phase == "merge" and job.partial == partial for end in job.ends
        ):
            self.sim.fail(f"{name}: {partial}, and what was done is not published")

    def _failed(self, name: str, jobs: list[JobTruth], new: Mapping[str, Any]) -> None:
        found = next((one for one in new["conditions"] if one["type"] == "Failed"), {})
        if found["reason"] == "InternalError":
            if not any(sum(job.phase == phase for job in jobs) >= MADE for phase in ("plan", "work", "merge")):
                self.sim.fail(f"{name}: Failed with {found}, and its Jobs were not deleted so often")
            return
        failed = [job for job in jobs if any(end.code != 0 and not end.ignored for end in job.ends)]
        if not failed:
            self.sim.fail(f"{name}: Failed, and no worker did")
            return
        works = [job for job in jobs if job.phase == "work" and job.finished == "Failed"]
        if works and not any(
            end.word in ("failed", "too_many_errors") or end.code for job in jobs if job.phase == "merge" for end in job.ends
        ):
            self.sim.fail(f"{name}: Failed, and what was done is not published")
        ends = [(job, end) for job in failed for end in job.ends if end.code != 0]
        if any(end.text and end.text in found["message"] for _, end in ends):
            return
        if self._words_are_there(ends):
            self.sim.fail(f"{name}: Failed with {found}, and its workers said {[(end.text, end.code) for _, end in ends]}")

    def _words_are_there(self, ends: list[tuple[JobTruth, Any]]) -> bool:
        """Whether the pods still show them, and nobody has waited for them for long."""
        pods = {uid_of(one) for one in self.server.of(kinds.POD)}
        return all(end.uid in pods for _, end in ends) and all(self.sim.loop.now - end.at < PATIENCE_S for _, end in ends)

    def worker_runs(self, job: JobTruth, pod: Manifest) -> None:
        if job.batch in self._over:
            self.sim.fail(f"{key_of(pod)}: a worker of a BatchJob that is {self._over[job.batch]} runs")
        if job.phase != "work":
            return
        others = [other for _, other in self._jobs(job.batch) if other is not job and other.phase == "work"]
        others = [other for other in others if self.sim.cluster.working(other)]
        if others:
            self.sim.fail(f"{key_of(pod)}: workers of two Jobs work on one batch")

    def _expect(self, uid: str, reason: str) -> None:
        self._expected[uid, reason] = self._expected.get((uid, reason), 0) + 1

    # --- at rest ---

    def unrest(self) -> str | None:
        """What is not as it has to be, once everything was seen and done."""
        store = Store()
        for kind in kinds.WATCHED:
            for one in self.server.of(kind):
                if shown_to(kind, one):
                    store.note(one)
        for key in sorted(key_of(one) for kind in kinds.RESOURCES for one in store.all(kind)):
            resource = store.get(key)
            assert resource is not None
            problem = self._resource(store, key, resource)
            if problem:
                return f"{key}: {problem}"
        return self._events() or self._repairs()

    def _resource(self, store: Store, key: Key, resource: Manifest) -> str | None:
        status = resource.get("status") or {}
        if not status:
            return "has no status"
        if "observedGeneration" not in status and not resource["metadata"].get("deletionTimestamp"):
            return f"has a part of the status of another run: {status}"
        if resource["metadata"].get("deletionTimestamp"):
            return None if status["phase"] == "Terminating" else "is being deleted and does not say so"
        finished = resource["kind"] == "BatchJob" and status["phase"] in TERMINAL
        if status["observedGeneration"] != resource["metadata"]["generation"] and not finished:
            return f"observedGeneration {status['observedGeneration']}, generation {resource['metadata']['generation']}"
        server = None
        if resource["kind"] == "BatchJob" and "serverRef" in resource["spec"]:
            server = store.get(Key("InferenceServer", key.namespace, resource["spec"]["serverRef"]["name"]))
        parsed = api.parse(resource, strict=False)
        missing = frozenset(ref for ref in references(parsed) if self.server.get(ref.key(key.namespace)) is None)
        children, remains = store.children(key), self.sim.operator.store.remains(key)  # of what has gone only the operator knows
        world = World(now=self.server.now(), children=children, remains=remains, missing=missing, server=server)
        decision = decide(resource, world, self.sim.operator.settings)
        taken, left = {}, []
        for manifest in decision.plan.apply:
            live = self.server.get(key_of(manifest))
            if live is not None and not Owner.of(resource).may_change(live):
                if uid_of(live) not in self.sim.strangers:
                    return f"{key_of(live)} is in the way, which is of {whose(live)}"
                taken[Ref.of(manifest)] = whose(live)
            else:
                left.append(str(key_of(manifest)))
        failed = {}
        if service := next((ref for ref in taken if ref.kind == "Service"), None):  # pods without an address are not made
            why = f"Service {service.name}, under which its pods are reached, is somebody else's"
            failed = {Ref.of(one): why for one in decision.plan.apply if one["kind"] == "Deployment" and str(key_of(one)) in left}
            left = [one for one in left if not one.startswith("Deployment")]
        if left:
            return f"still to be applied: {left}"
        if decision.plan.status:
            return f"still to be given up: {[str(key_of(one)) for one in decision.plan.status]}"
        if decision.plan.delete:
            return f"still to be deleted: {[str(key_of(one)) for one in decision.plan.delete]}"
        report = decision.report(Outcome(taken=taken, failed=failed))
        if report.status is not None:
            return f"the status says {_different(status, report.status)}"
        if resource["kind"] == "InferenceServer":
            return self._server(resource, status)
        return None if finished else self._batch(resource, status)

    def _server(self, resource: Manifest, status: Mapping[str, Any]) -> str | None:
        """Without the operator's own eyes."""
        spec = resource["spec"]
        if spec.get("paused") or condition(resource, "Accepted")["status"] != "True":
            return None
        found = self.server.controlled(kinds.DEPLOYMENT, uid_of(resource))
        if len(found) != 1:
            return f"has {len(found)} Deployments"
        deployment = found[0]
        if deployment["spec"]["replicas"] != spec["replicas"]:
            return f"{spec['replicas']} replicas are wanted, its Deployment has {deployment['spec']['replicas']}"
        container = deployment["spec"]["template"]["spec"]["containers"][0]
        image, length = spec.get("runtime", {}).get("image"), spec.get("runtime", {}).get("contextLength")
        if (image is not None and container["image"] != image) or (length and str(length) not in " ".join(container["args"])):
            return f"its pods do not run what the spec says: {container['image']} {container['args']}"
        if missing := _ports(spec.get("podTemplate", {}).get("spec", {})) - _ports(deployment["spec"]["template"]["spec"]):
            return f"its pods lack the ports {missing}"
        sets = self.server.controlled(kinds.REPLICA_SET, uid_of(deployment))
        pods = [pod for one in sets for pod in self.server.controlled(kinds.POD, uid_of(one))]
        ready = sum(is_true(pod, "Ready") and not pod["metadata"].get("deletionTimestamp") for pod in pods)
        if ready != spec["replicas"]:
            return f"{ready} of {spec['replicas']} pods are ready"
        if status["readyReplicas"] != ready:
            return f"{ready} pods are ready, the status says {status['readyReplicas']}"
        ports = [one["port"] for service in self._services(resource) for one in service["spec"]["ports"]]
        if spec.get("service", {}).get("port", 80) not in ports:
            return f"its Services have the ports {ports}"
        ingresses = self.server.controlled(kinds.INGRESS, uid_of(resource))
        if bool(ingresses) != bool(spec.get("ingress")):
            return f"has {len(ingresses)} Ingresses"
        phases = (
            "Ready" if spec["replicas"] else "Stopped",
            "Degraded" if condition(resource, "Degraded")["reason"] == "ForeignPods" else "",
        )
        if status["phase"] not in phases or is_true(resource, "Ready") != bool(spec["replicas"]):
            return f"is {status['phase']}, and all its pods are ready"
        if ready and "contextLength" not in status["model"]:
            return "is ready, and does not say what it serves"
        return None

    def _services(self, resource: Manifest) -> list[Manifest]:
        return self.server.controlled(kinds.SERVICE, uid_of(resource))

    def _batch(self, resource: Manifest, status: Mapping[str, Any]) -> str | None:
        if condition(resource, "Running")["status"] == "True":
            return "its worker runs"
        ends = deadline(api.parse(resource, strict=False), status)
        if ends is not None and ends > self.server.now() - SETTLED_S:
            return "its deadline is still to come"
        live = [one for one in self.server.controlled(kinds.JOB, uid_of(resource)) if not one["metadata"].get("deletionTimestamp")]
        if any(not (one["spec"].get("suspend") or self.sim.cluster.jobs[uid_of(one)].finished) for one in live):
            return "one of its Jobs goes on"
        if condition(resource, "Accepted")["status"] != "True":
            return None
        if resource["spec"].get("suspend") and status["phase"] == "Suspended":
            return None
        if any(job.finished for _, job in self._jobs(uid_of(resource)) if not job.gone and job.phase != "plan"):
            return f"one of its Jobs is over, and it is {status['phase']}"
        if condition(resource, "Running")["reason"] == "WaitingForServer":
            return None
        return f"is {status['phase']}, and nothing holds it up: {condition(resource, 'Running')}"

    def at_ease(self) -> bool:
        """Whether no resource gives a reason to look something up."""
        found = [*self.server.of(kinds.INFERENCE_SERVER), *self.server.of(kinds.BATCH_JOB)]
        return all(condition(one, "Accepted").get("status") == "True" and not self._moves(one) for one in found)

    def _moves(self, resource: Manifest) -> bool:
        """Waits for its server, or for its deadline."""
        if resource["kind"] != "BatchJob" or resource["status"]["phase"] in TERMINAL:
            return False
        return "serverRef" in resource["spec"] or "deadlineSeconds" in resource["spec"]

    def _events(self) -> str | None:
        counts: dict[tuple[str, str], int] = {}
        for event in self._told.values():
            place = (event["involvedObject"]["uid"], event["reason"])
            counts[place] = counts.get(place, 0) + event["count"]
        for (uid, reason), count in counts.items():
            expected = self._expected.get((uid, reason), 0)
            if reason in PLAN_EVENTS:  # what was spoilt is put back, and told
                expected += self.spoilt
            if count > expected + self.sim.kills and reason != "ClaimSpecFixed":
                return f"Event {reason} of {uid} was told {count} times, and is true of {expected} changes ({self.sim.kills} kills)"
        return None

    def _repairs(self) -> str | None:
        count = self.sim.repairs()
        if count > self.spoilt + self.sim.kills:
            return f"{count} repairs were counted, and {self.spoilt} children spoiled"
        return None


def _ports(pod: Mapping[str, Any]) -> set[tuple[int, str]]:
    return {(one["containerPort"], one.get("protocol", "TCP")) for container in pod.get("containers", ()) for one in container["ports"]}


def _canonical(value: Any) -> Any:
    """Lists without their order: that of a list's items by key depends on who wrote first."""
    if isinstance(value, dict):
        return {name: _canonical(item) for name, item in value.items()}
    if isinstance(value, list):
        return sorted((_canonical(item) for item in value), key=repr)
    return value


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def _different(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name}: {old.get(name)!r} instead of {new.get(name)!r}" for name in sorted({*old, *new}) if old.get(name) != new.get(name)
    )

"""Who else acts: a user, a vandal, strangers, and what befalls the operator, its watches and its calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from banyan_operator.kube import kinds
from banyan_operator.kube.kinds import Manifest
from banyan_operator.kube.objects import Key, controller_uid, key_of, owner_reference, uid_of
from tests.support.kube.apiserver import merged

if TYPE_CHECKING:
    from tests.simulation.operator.run import Simulation

NAMESPACE: Final = "team"
CACHE: Final = {"type": "PersistentVolumeClaim", "size": "10Gi", "accessMode": "ReadWriteMany"}
POD_EDITS: Final[tuple[dict[str, Any], ...]] = (
    {"runtime": {"contextLength": 4096}},
    {"runtime": {"contextLength": 8192}},
    {"runtime": {"image": "mine:1"}},
    {"runtime": {"image": None}},
    {"cache": CACHE},
    {"cache": None},
    {"scheduling": {"topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"},
        {"maxSkew": 2, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"},
    ]}},
    {"podTemplate": {"spec": {"containers": [{"name": "server", "ports": [
        {"name": "one", "containerPort": 9000}, {"name": "two", "containerPort": 9000, "protocol": "UDP"},
    ]}]}}},
    {"model": {"uri": "pvc://absent/x"}},
    {"model": {"uri": "pvc://models/x"}},
)  # fmt: skip
OTHER_EDITS: Final[tuple[dict[str, Any], ...]] = (
    {"replicas": 0},
    {"replicas": 1},
    {"replicas": 2},
    {"replicas": 3},
    {"service": {"port": 8080}},
    {"service": {"port": 80}},
    {"ingress": {"hosts": ["a.example"]}},
    {"ingress": None},
    {"rollout": {"strategy": "Recreate"}},
    {"paused": True},
    {"paused": False},
)
CHILDREN_OF_A: Final = (
    ("Service", "a"),
    ("Service", "a--pods"),
    ("ServiceAccount", "a--server"),
    ("ServiceAccount", "a--batch"),
    ("Deployment", "a"),
    ("Job", "a--plan"),
    ("Job", "a--work"),
    ("Job", "a--merge"),
)
BATCH_EDITS: Final[tuple[dict[str, Any], ...]] = (
    {"suspend": True},
    {"suspend": False},
    {"cancel": True},
    {"cancel": True},
    {"workers": 1},
    {"workers": 3},
)


class Actors:
    """Each move happens at once; which, the seed says."""

    def __init__(self, sim: Simulation) -> None:
        self.sim, self.rng, self.server = sim, sim.rng, sim.server
        rng = sim.rng
        pairs = [
            (3, self.edits_a_server),
            (3, self.edits_a_batch),
            (2, self.makes_what_is_not_there),
            (1, self.deletes),
            (2, self.deletes_and_makes_again),
            (1, self.spoils_a_child),
            (1, self.deletes_a_child),
            (2, self.strips_labels),
            (0.5, self.deletes_a_pod),
            (0.7, self.puts_a_strange_pod),
            (0.5, self.puts_a_strange_object),
            (2, self.replaces_the_operator),
            (1, self.lets_the_operator_die_in_a_call),
            (1.5, self.stalls_a_watch),
            (1.5, self.loses_a_watch),
            (0.7, self.refuses),
        ]
        moves: list[tuple[float, Callable[[], None]]] = list(pairs)
        # each schedule has its own taste, so that rare moves meet each other
        self._weights = [weight * rng.choice((0, 0.5, 1, 4)) + 0.01 for weight, _ in moves]
        self._moves = [move for _, move in moves]

    def move(self) -> None:
        (move,) = self.rng.choices(self._moves, self._weights)
        self.sim.saw(move.__name__)
        self.sim.trace(f"— {move.__name__}")
        move()

    # --- the user ---

    def populate(self) -> None:
        for _ in range(self.rng.choice((1, 1, 1, 2))):
            self.makes_what_is_not_there()

    def makes_what_is_not_there(self) -> None:
        rng = self.rng
        chosen = rng.choice(self.sim.names)
        if self.server.get(Key(*chosen[:1], NAMESPACE, chosen[1])) is None:
            self._make(*chosen)

    def _make(self, kind: str, name: str) -> None:
        rng = self.rng
        if kind == "InferenceServer":
            spec: dict[str, Any] = {"model": {"uri": "pvc://models/x"}, "replicas": rng.choice((0, 1, 1, 2))}
            if rng.random() < 0.1:
                spec["cache"] = CACHE
        else:
            spec = {
                "input": {"uri": "pvc://batches/in/prompts.jsonl"},
                "output": {"uri": "s3://batches/out/"},
                "workers": rng.choice((1, 1, 2)),
                "suspend": rng.random() < 0.15,
                "workerBackoffLimit": rng.choice((0, 1, 6)),
            }
            if rng.random() < 0.15:
                spec["deadlineSeconds"] = 60
            spec |= (
                {"serverRef": {"name": "a"}}
                if name == "b"
                else {"server": {"model": {"uri": "pvc://models/x"}, "cache": rng.choice(({}, CACHE))}}
            )
        meta = {"name": name, "namespace": NAMESPACE}
        self.server.create({"apiVersion": "serving.banyan.dev/v1alpha1", "kind": kind, "metadata": meta, "spec": spec})
        self._say("makes", kind, name)

    def edits_a_server(self) -> None:
        edit = self.rng.choice(POD_EDITS if self.rng.random() < 0.4 else OTHER_EDITS)
        self._edit(kinds.INFERENCE_SERVER.kind, edit)

    def edits_a_batch(self) -> None:
        self._edit(kinds.BATCH_JOB.kind, self.rng.choice(BATCH_EDITS))

    def _edit(self, kind: str, edit: dict[str, Any]) -> None:
        found = list(self.server.by_kind[kind].values())
        if not found:
            return
        live = self.rng.choice(found)
        spec = merged(live["spec"], edit)
        if kind == kinds.BATCH_JOB.kind and live["spec"].get("cancel"):
            spec["cancel"] = True
        self._say("edits", kind, f"{live['metadata']['name']}: {edit}")
        self.server.edit(key_of(live), lambda one: {**one, "spec": spec})
        if kind == kinds.INFERENCE_SERVER.kind and spec != live["spec"] and edit in POD_EDITS:
            self.sim.checks.pods_may_change(uid_of(live))

    def deletes(self) -> Manifest | None:
        found = [*self.server.of(kinds.INFERENCE_SERVER), *self.server.of(kinds.BATCH_JOB)]
        if not found:
            return None
        chosen = self.rng.choice(found)
        foreground = self.rng.random() < 0.2
        self._say("deletes", chosen["kind"], chosen["metadata"]["name"] + (" in the foreground" if foreground else ""))
        self.server.delete(key_of(chosen), foreground=foreground)
        return chosen

    def deletes_and_makes_again(self) -> None:
        chosen = self.deletes()
        if chosen is not None and self.server.get(key_of(chosen)) is None:
            self._make(chosen["kind"], chosen["metadata"]["name"])

    # --- the vandal ---

    def _child(self) -> Manifest | None:
        found = [one for kind in kinds.CHILDREN for one in self.server.of(kind) if uid_of(one) not in self.sim.strangers]
        found = [one for one in found if one["metadata"].get("ownerReferences")]
        return self.rng.choice(found) if found else None

    def spoils_a_child(self) -> None:
        child = self._child()
        if child is None or (child["kind"] == "Job" and self.sim.checks.is_over(controller_uid(child) or "")):
            return
        self._say("spoils", child["kind"], child["metadata"]["name"])
        self.sim.checks.spoiled()
        spec = child.get("spec")
        match child["kind"]:
            case "Deployment":
                spec = {**spec, "replicas": 5} if self.rng.random() < 0.5 else {**spec, "template": _evil(spec["template"])}
            case "Job":
                spec = {**spec, "suspend": not spec.get("suspend")}
                self.sim.checks.resumed.add(uid_of(child))
            case "Service":
                spec = {**spec, "selector": {"evil": "yes"}}
            case _:
                annotations = {**(child["metadata"].get("annotations") or {}), "serving.banyan.dev/applied-hash": "0"}
                meta = {**child["metadata"], "annotations": annotations}
                self.server.edit(
                    key_of(child), lambda one: {**one, "metadata": {**meta, "resourceVersion": one["metadata"]["resourceVersion"]}}
                )
                return
        self.server.edit(key_of(child), lambda one: {**one, "spec": spec})

    def deletes_a_child(self) -> None:
        child = self._child()
        if child is not None:
            self._say("deletes", child["kind"], child["metadata"]["name"])
            self.server.delete(key_of(child))

    def strips_labels(self) -> None:
        child = self._child()
        if child is None:
            return
        drop = self.rng.choice(("app.kubernetes.io/managed-by", "serving.banyan.dev/", ""))
        self._say("strips", child["kind"], f"{child['metadata']['name']} of {drop or 'all labels'}")
        self.sim.checks.spoiled()
        if child["kind"] == kinds.CONTROLLER_REVISION.kind:
            self.sim.checks.pods_may_change(controller_uid(child) or "")

        def stripped(one: Manifest) -> Manifest:
            labels = {name: value for name, value in (one["metadata"].get("labels") or {}).items() if not name.startswith(drop)}
            return {**one, "metadata": {**one["metadata"], "labels": labels}}

        self.server.edit(key_of(child), stripped)

    def deletes_a_pod(self) -> None:
        pods = [one for one in self.server.of(kinds.POD) if uid_of(one) not in self.sim.strangers]
        if pods:
            pod = self.rng.choice(pods)
            self._say("deletes", "Pod", pod["metadata"]["name"])
            self.server.delete(key_of(pod))

    # --- strangers ---

    def puts_a_strange_pod(self) -> None:
        """Ready, with our labels, and of nobody."""
        deployments = self.server.of(kinds.DEPLOYMENT)
        if not deployments:
            return
        template = self.rng.choice(deployments)["spec"]["template"]
        name = f"stranger-{len(self.sim.strangers)}"
        status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}], "containerStatuses": []}
        meta = {**template["metadata"], "name": name, "namespace": NAMESPACE}
        made = self.server.create({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": template["spec"], "status": status})
        self.sim.strangers.add(uid_of(made))

    def puts_a_strange_object(self) -> None:
        """With the name of a child, of nobody or of somebody else, with or without our labels."""
        rng = self.rng
        kind, name = rng.choice(CHILDREN_OF_A)
        if self.server.get(Key(kind, NAMESPACE, name)) is not None:
            return
        meta: Manifest = {"name": name, "namespace": NAMESPACE, "labels": {"app": "theirs"}}
        if rng.random() < 0.4:
            meta["labels"] = {"app.kubernetes.io/managed-by": "banyan-operator", "serving.banyan.dev/server": "a"}
        if rng.random() < 0.3:
            owner = self.server.get(Key("ConfigMap", NAMESPACE, "theirs"))
            assert owner is not None
            meta["ownerReferences"] = [owner_reference(owner)]
        template = {"metadata": {"labels": {"app": "theirs"}}, "spec": {"containers": [{"name": "their", "image": "their:1"}]}}
        body: Manifest = {"Service": {"spec": {"ports": [{"port": 1}]}}, "ServiceAccount": {}}.get(kind, {})
        if kind == "Deployment":
            body = {"spec": {"replicas": 0, "selector": {}, "strategy": {"type": "RollingUpdate"}, "template": template}}
        elif kind == "Job":
            body = {"spec": {"suspend": True, "completions": 1, "parallelism": 1, "backoffLimitPerIndex": 1, "template": template}}
        version = kinds.TABLE[[one.kind for one in kinds.TABLE].index(kind)].api_version
        made = self.server.create({"apiVersion": version, "kind": kind, "metadata": meta, **body})
        self.sim.strangers.add(uid_of(made))
        self._say("puts a stranger's", kind, name)
        if rng.random() < 0.5:
            self.sim.loop.call_later(rng.random() * 30, self._takes_away, Key(kind, NAMESPACE, name), uid_of(made))

    def _takes_away(self, key: Key, uid: str) -> None:
        live = self.server.get(key)
        if live is not None and uid_of(live) == uid and not self.sim.resting:
            self.server.remove(key)

    # --- the operator and its ways ---

    def replaces_the_operator(self) -> None:
        self.sim.replace(after_s=self.rng.choice((0.0, 0.0, 1.0, 10.0)) * self.rng.random(), other=self.rng.random() < 0.7)

    def lets_the_operator_die_in_a_call(self) -> None:
        self.sim.operator.calls_left = self.rng.randrange(1, 12)

    def stalls_a_watch(self) -> None:
        self.rng.choice(self.sim.operator.watches).stall(self.rng.choice((2.0, 20.0)) * self.rng.random())

    def loses_a_watch(self) -> None:
        for watch in self.sim.operator.watches:
            if self.rng.random() < 0.3:
                watch.lose(self.rng.choice((0.1, 1.0, 10.0)) * self.rng.random())

    def refuses(self) -> None:
        kind = self.rng.choice(("Deployment", "Job", "Service", "ServiceAccount", "ControllerRevision"))
        until = self.sim.loop.now + self.rng.random() * 30
        self.sim.weather.refused[kind] = (until, self.rng.choice(("invalid", "quota", "rbac")))

    def _say(self, does: str, kind: str, what: str) -> None:
        if self.sim.tracing:
            self.sim.trace(f"    {does} {kind} {what}")


def _evil(template: Manifest) -> Manifest:
    containers = [{**one, "image": "evil"} for one in template["spec"]["containers"]]
    return {**template, "spec": {**template["spec"], "containers": containers}}

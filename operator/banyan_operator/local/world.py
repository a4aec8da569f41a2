"""Between the pure reconcile and this machine: builds the World around a resource, and carries a Plan out."""

from __future__ import annotations

import asyncio
import random
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from banyan_operator.api import KINDS, SpecError, parse
from banyan_operator.desired.references import references
from banyan_operator.kube.addresses import PROGRESS_PORT, SERVER_PORT, SERVICE_PORT
from banyan_operator.kube.objects import OWNER_LABELS, Key, is_true, key_of, uid_of
from banyan_operator.kube.ownership import Owner, whose
from banyan_operator.local.asking import Asking
from banyan_operator.local.controllers import actions, deployment, job, replicaset
from banyan_operator.local.kubelet import Kubelet
from banyan_operator.local.objects import Conflict, Objects, Refused
from banyan_operator.local.podlife import ADDRESS, NODE
from banyan_operator.local.ports import Ports
from banyan_operator.local.services import HOST, Proxy
from banyan_operator.local.translate import port_number
from banyan_operator.local.view import label_of
from banyan_operator.plan import Event, Manifest, Outcome, Plan, Ref, Report, Settings, World
from banyan_operator.reconcile import decide

BUG_S: Final = 30.0
REPEAT_S: Final = 600.0
"""The same trouble is not told again for so long; in a cluster it raises the count of an Event."""
ROUNDS = 20
"""A turn goes round until nothing changes any more; a deletion with all its consequences takes about six rounds."""
_NAME_LETTERS = "bcdfghjklmnpqrstvwxz2456789"
"""Of generated names, as Kubernetes picks them: no vowels, so no words."""
CARRIED_OUT = frozenset({"Deployment", "Job", "Service", "PersistentVolumeClaim", "ServiceAccount", "ControllerRevision"})
"""Kinds of children that mean the same here as in a cluster, or nothing in either."""


class LocalWorld:
    """All resources, brought about on this machine. `turn` does whatever is due. `name` keeps the ports of several apart."""

    def __init__(
        self,
        objects: Objects,
        kubelet: Kubelet,
        asking: Asking,
        ports: Ports,
        settings: Settings,
        name: str,
        clock: Callable[[], float],
        say: Callable[[str], None],
    ) -> None:
        self._objects = objects
        self._kubelet = kubelet
        self._asking = asking
        self._ports = ports
        self._settings = settings
        self._name = name
        self._clock = clock
        self._say = say
        self._proxies: dict[tuple[Key, int], Proxy] = {}
        self._not_here: set[str] = set()
        self._troubles: dict[tuple[str, str, str], float] = {}  # uid, reason and message of what was told, and when
        self._bugs: dict[Key, float] = {}  # resources that met one, and when they are tried again

    def resources(self) -> list[Manifest]:
        """Servers first, then what needs them."""
        return [item for kind in KINDS for item in self._objects.of_kind(kind)]

    async def turn(self) -> float | None:
        """Go round until nothing changes; the time of the next thing to do, if one is known."""
        for _ in range(ROUNDS):
            version = self._objects.version
            dues = [self._reconcile(resource) for resource in self.resources()]
            self._control()
            self._objects.collect()
            await self._serve()  # before processes are ended: no new request goes to a pod that is on its way out
            dues.append(self._kubelet.turn())
            if self._objects.version == version:
                break
        return min((due for due in dues if due is not None), default=None)

    async def wind_down(self) -> float | None:
        """A turn while everything stops: nothing is started any more, no new request let in."""
        for proxy in self._proxies.values():
            proxy.stop_listening()
        for pod in self._objects.of_kind("Pod"):
            self._objects.delete(key_of(pod))
        return self._kubelet.turn()

    async def close(self) -> None:
        await asyncio.gather(*(proxy.close() for proxy in self._proxies.values()))

    # --- one resource ---

    def _reconcile(self, resource: Manifest) -> float | None:
        """When to look again."""
        key, now = key_of(resource), self._clock()
        if (again := self._bugs.get(key, 0.0)) > now:
            return again
        try:
            decision = decide(resource, self.observe(resource), self._settings)
            report = decision.report(self._apply(resource, decision.plan))
        except Exception as error:  # of one resource; the others go on
            where = traceback.extract_tb(error.__traceback__)[-1]
            said = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
            self._say(f"{label_of(key)}: a bug of the operator: {said}; again in {BUG_S:.0f} s")
            self._bugs[key] = now + BUG_S
            return self._bugs[key]
        self._bugs.pop(key, None)
        self._tell(key, report)
        return None if report.requeue_after_s is None else self._clock() + report.requeue_after_s

    def observe(self, resource: Manifest) -> World:
        """What reconcile sees of this machine around one resource."""
        key = key_of(resource)
        namespace, kind = key.namespace, key.kind
        server_name = (resource["spec"].get("serverRef") or {}).get("name")
        server = resource if kind == "InferenceServer" else self._objects.get(Key("InferenceServer", namespace, server_name or ""))
        return World(
            now=self._clock(),
            children=tuple(self._children(resource)),
            missing=frozenset(self._missing(resource)),
            server=server if kind == "BatchJob" else None,
            server_url=self.server_url(server) if server is not None else None,
            progress=self._progress(resource) if kind == "BatchJob" else {},
            readyz=self.readyz(resource),
        )

    def readyz(self, resource: Manifest) -> Mapping[str, Any] | None:
        """What the newest server of a resource last said of itself; also of a BatchJob's own server."""
        return self._ask(resource, "server", SERVER_PORT, "/readyz")

    def server_url(self, server: Manifest) -> str:
        """The base URL under which an InferenceServer is reached; it stays the same from the first question on."""
        return f"http://{HOST}:{self._proxy(*self._server_place(server)).port}"

    def _server_place(self, server: Manifest) -> tuple[Key, int]:
        key = key_of(server)
        return Key("Service", key.namespace, key.name), (server["spec"].get("service") or {}).get("port", SERVICE_PORT)

    def _proxy(self, service: Key, port: int) -> Proxy:
        if (service, port) not in self._proxies:
            listener = self._ports.listen(f"{self._name}/{service.namespace}/{service.name}:{port}")
            self._proxies[service, port] = Proxy(service.name, listener)
        return self._proxies[service, port]

    def _children(self, resource: Manifest) -> Iterator[Manifest]:
        key = key_of(resource)
        namespace, name = key.namespace, key.name
        label = OWNER_LABELS[key.kind]
        for item in self._objects:
            metadata = item["metadata"]
            if metadata["namespace"] == namespace and metadata.get("labels", {}).get(label) == name and item["kind"] not in KINDS:
                yield item

    def _missing(self, resource: Manifest) -> Iterator[Ref]:
        """Claims are never missing: a folder is found or made for each."""
        try:
            named = references(parse(resource))
        except SpecError:  # reconcile says so
            return
        for ref in named:
            key = ref.key(resource["metadata"]["namespace"])
            if ref.kind != "PersistentVolumeClaim" and self._objects.get(key) is None:
                yield ref

    def _progress(self, resource: Manifest) -> dict[str, Mapping[str, Any]]:
        """By pod name what each worker last said of itself."""
        asked = ((pod, self._asked(pod, PROGRESS_PORT, "/progress")) for pod in self._running(resource, "worker"))
        return {pod["metadata"]["name"]: body for pod, body in asked if body is not None}

    def _ask(self, resource: Manifest, container: str, port: int, path: str) -> Mapping[str, Any] | None:
        pods = self._running(resource, container)
        newest = max(pods, key=lambda pod: (pod["metadata"]["creationTimestamp"], pod["metadata"]["name"]), default=None)
        return self._asked(newest, port, path) if newest is not None else None

    def _running(self, resource: Manifest, container: str) -> list[Manifest]:
        return [child for child in self._children(resource) if child["kind"] == "Pod" and _runs(child, container)]

    def _asked(self, pod: Manifest, port: int, path: str) -> Mapping[str, Any] | None:
        here = self._kubelet.port(pod, port)
        return self._asking.answer(f"http://{ADDRESS}:{here}{path}") if here is not None else None

    def _apply(self, resource: Manifest, plan: Plan) -> Outcome:
        """The applies, in order, then the deletes. One that fails does not stop the others; all of it is tried again next turn."""
        owner = Owner.of(resource)
        refused: dict[Ref, str] = {}
        taken: dict[Ref, str] = {}
        failed: dict[Ref, str] = {}
        for manifest in plan.apply:
            live = self._objects.get(key_of(manifest))
            if live is not None and not owner.may_change(live):  # another resource's: its label keeps it out of our sight
                taken[Ref.of(manifest)] = whose(live)
                continue
            try:
                self._objects.apply(manifest)
            except Refused as error:
                refused[Ref.of(manifest)] = str(error)
            except Conflict as error:
                failed[Ref.of(manifest)] = str(error)
            else:
                self._tell_what_is_not_here(manifest)
        for gone in plan.delete:
            live = self._objects.get(key_of(gone))
            if live is not None and uid_of(live) == uid_of(gone):
                self._objects.delete(key_of(gone))
        return Outcome(refused=refused, taken=taken, failed=failed)

    def _tell(self, resource: Key, report: Report) -> None:
        if report.status is not None:
            self._objects.set_status(resource, dict(report.status))
        for event in report.events:
            if event.type != "Warning" or self._is_news(resource, event):
                self._say(f"{label_of(resource)}: {event.reason}: {event.message}")

    def _is_news(self, resource: Key, event: Event) -> bool:
        """Whether a trouble was not told lately: what fails over and over does so in the same words."""
        now, live = self._clock(), self._objects.get(resource)
        self._troubles = {what: at for what, at in self._troubles.items() if now - at < REPEAT_S}
        what = (uid_of(live) if live is not None else "", event.reason, event.message)
        return self._troubles.setdefault(what, now) == now

    def _tell_what_is_not_here(self, manifest: Manifest) -> None:
        """Say once of each kind of thing that a cluster would enforce and this machine does not."""
        found = set() if manifest["kind"] in CARRIED_OUT else {f"{manifest['kind']} objects have no effect"}
        pod = manifest.get("spec", {}).get("template", {}).get("spec", {})
        for container in (*pod.get("initContainers", ()), *pod.get("containers", ())):
            if any(name in ("cpu", "memory") for name in container.get("resources", {}).get("limits", {})):
                found.add("resources.limits of cpu and memory are not enforced")
        for field in ("nodeSelector", "affinity"):
            if field in pod:
                found.add(f"{field} has no effect")
        for line in sorted(found - self._not_here):
            self._say(f"local mode: {line}")
        self._not_here |= found

    # --- what a cluster's controllers do ---

    def _control(self) -> None:
        for item in self._objects.of_kind("Deployment"):
            self._act(deployment.decide(item, self._objects.controlled_by(item, "ReplicaSet"), self._clock()))
        for item in self._objects.of_kind("ReplicaSet"):
            self._act(replicaset.decide(item, self._objects.controlled_by(item, "Pod")))
        for item in self._objects.of_kind("Job"):
            self._act(job.decide(item, self._objects.controlled_by(item, "Pod"), self._clock()))
        for item in self._objects.of_kind("PersistentVolumeClaim"):
            self._objects.set_status(key_of(item), {"phase": "Bound"})

    def _act(self, decided: list[actions.Action]) -> None:
        for action in decided:
            match action:
                case actions.Create(manifest):
                    self._objects.apply(_named(manifest))
                case actions.Replace(manifest):
                    self._objects.apply(manifest)
                case actions.Delete(key):
                    self._objects.delete(key)
                case actions.SetStatus(key, status):
                    self._objects.set_status(key, status)

    async def _serve(self) -> None:
        """A proxy for each port of each Service that has an address, pointed at the pods that are ready.

        An InferenceServer has one from the start, so that its URL stands and answers with a reason while it loads.
        """
        wanted: dict[tuple[Key, int], list[int]] = {
            self._server_place(server): [] for server in self.resources() if server["kind"] == "InferenceServer"
        }
        for service in self._objects.of_kind("Service"):
            if service["spec"].get("clusterIP") != "None":
                wanted |= {(key_of(service), port["port"]): list(self._backends(service, port)) for port in service["spec"]["ports"]}
        for place in self._proxies.keys() - wanted.keys():
            proxy = self._proxies.pop(place)
            await proxy.close()
            self._ports.give_back(proxy.port)
        for place, backends in wanted.items():
            proxy = self._proxy(*place)
            await proxy.start()
            proxy.backends = backends

    def _backends(self, service: Manifest, port: Manifest) -> Iterator[int]:
        selector: dict[str, str] = service["spec"].get("selector", {})
        for pod in self._objects.of_kind("Pod"):
            labels = pod["metadata"].get("labels", {})
            if actions.is_deleted(pod) or not is_true(pod, "Ready") or selector.items() - labels.items():
                continue
            target: int | str = port["targetPort"] if "targetPort" in port else port["port"]
            for container in (*pod["spec"]["containers"], *pod["spec"].get("initContainers", ())):
                if isinstance(target, int) or any(one.get("name") == target for one in container.get("ports", ())):
                    here = self._kubelet.port(pod, port_number(container, target))
                    if here is not None:
                        yield here
                    break


def _named(manifest: Manifest) -> Manifest:
    """A generated name in place of generateName, and for a pod the node it is put on."""
    metadata = dict(manifest["metadata"])
    if "generateName" in metadata:
        metadata["name"] = metadata.pop("generateName") + "".join(random.choices(_NAME_LETTERS, k=5))
    named = {**manifest, "metadata": metadata}
    if manifest["kind"] == "Pod":
        named["spec"] = {**manifest["spec"], "nodeName": NODE}
    return named


def _runs(pod: Manifest, container: str) -> bool:
    status = pod.get("status", {})
    statuses = (*status.get("containerStatuses", ()), *status.get("initContainerStatuses", ()))
    return "deletionTimestamp" not in pod["metadata"] and any(one["name"] == container and "running" in one["state"] for one in statuses)

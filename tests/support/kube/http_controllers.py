"""An API server with the controllers that a Deployment needs."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from banyan_operator.kube import kinds
from banyan_operator.kube.objects import owner_reference
from tests.support.kube.http import ApiServer

NOW = "2026-01-01T00:00:00Z"


class Cluster(ApiServer):
    """Makes what Kubernetes' controllers make of a Deployment, in the moment in which it is written."""

    def store(self, place: str, manifest: dict[str, Any], status: int = 200) -> web.Response:
        answer = super().store(place, manifest, status)
        live = self.objects[place]
        if live.get("kind") == "Deployment" and (live.get("status") or {}).get("observedGeneration") != live["metadata"]["generation"]:
            self._run(place, live)
        return answer

    def _run(self, place: str, live: dict[str, Any]) -> None:
        name, namespace, count = live["metadata"]["name"], live["metadata"]["namespace"], live["spec"]["replicas"]
        template = live["spec"]["template"]
        self._child(kinds.REPLICA_SET, f"{name}-rs", live, template, {"replicas": count, "readyReplicas": count}, {"template": template})
        replicas = self.objects[kinds.REPLICA_SET.path(namespace, f"{name}-rs")]
        states = [
            {"name": c["name"], "ready": True, "started": True, "restartCount": 0, "image": "i", "state": {"running": {"startedAt": NOW}}}
            for c in template["spec"]["containers"]
        ]
        conditions = [{"type": kind, "status": "True", "lastTransitionTime": NOW} for kind in ("PodScheduled", "Initialized", "Ready")]
        status = {"phase": "Running", "podIP": "127.0.0.1", "startTime": NOW, "conditions": conditions, "containerStatuses": states}
        for number in range(count):
            self._child(kinds.POD, f"{name}-{number}", replicas, template, status, {**template["spec"], "nodeName": "n"})
        counts = dict.fromkeys(("replicas", "readyReplicas", "availableReplicas", "updatedReplicas"), count)
        available = {"type": "Available", "status": "True", "reason": "MinimumReplicasAvailable"}
        progress = {"type": "Progressing", "status": "True", "reason": "NewReplicaSetAvailable"}
        done = {**counts, "observedGeneration": live["metadata"]["generation"], "conditions": [available, progress]}
        super().store(place, {**live, "status": done})

    def _child(self, kind: kinds.Kind, name: str, owner: dict[str, Any], template: Any, status: Any, spec: Any) -> None:
        meta = {**template["metadata"], "name": name, "creationTimestamp": NOW, "ownerReferences": [owner_reference(owner)]}
        made = {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": meta, "spec": spec, "status": status}
        super().store(kind.path(owner["metadata"]["namespace"], name), made)

"""Fills and reads claims. Where the provisioner makes folders that belong to root, as hostPath ones do, they are opened to everybody."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

from tests.e2e.cluster.kubectl import Kubectl, Manifest


def claim(name: str, size: str = "1Gi") -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": size}}},
    }


class Volumes:
    """A pod as root in a namespace of its own, that sees the folder behind each claim."""

    def __init__(self, workshop: Kubectl, image: str) -> None:
        self._workshop, self._image = workshop, image

    def fill(self, team: Kubectl, name: str, content: Mapping[str, Path]) -> None:
        """Put files and folders, by their path in the claim, into a claim of the team's."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for place, source in content.items():
                archive.add(source, arcname=place)
        pod = self._open(team, name)
        self._workshop("exec", "-i", pod, "--", "tar", "x", "-C", "/volume", "--no-same-owner", stdin=packed.getvalue(), timeout=120)
        self._workshop("exec", pod, "--", "chmod", "-R", "a+rwX", "/volume")
        self._workshop("delete", "pod", pod, "--wait=false")

    def open_to_all(self, team: Kubectl, name: str) -> None:
        """Let everybody write into a claim, where it is a folder that its provisioner gave to root."""
        pod = self._open(team, name)
        self._workshop("exec", pod, "--", "chmod", "a+rwX", "/volume")
        self._workshop("delete", "pod", pod, "--wait=false")

    def read(self, team: Kubectl, name: str, path: str) -> str:
        pod = self._open(team, name)
        text = self._workshop("exec", pod, "--", "cat", f"/volume/{path}")
        self._workshop("delete", "pod", pod, "--wait=false")
        return text

    def _open(self, team: Kubectl, name: str) -> str:
        bound = team.until(f"pvc/{name}", lambda one: one["spec"].get("volumeName") or self._binding_waits(team, name))
        volume = self._workshop.get(f"pv/{bound['spec']['volumeName']}")["spec"]
        path = (volume.get("hostPath") or volume.get("local"))["path"]
        pod = f"volume-{team.namespace}-{name}"[:60]
        self._workshop("delete", "pod", pod, "--ignore-not-found")
        self._workshop.apply(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": pod},
                "spec": {
                    "terminationGracePeriodSeconds": 0,
                    "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": volume["nodeAffinity"]["required"]}}
                    if "nodeAffinity" in volume
                    else {},
                    "containers": [
                        {
                            "name": "files",
                            "image": self._image,
                            "imagePullPolicy": "IfNotPresent",
                            "command": ["sleep", "600"],
                            "securityContext": {"runAsUser": 0},
                            "volumeMounts": [{"name": "volume", "mountPath": "/volume"}],
                        }
                    ],
                    "volumes": [{"name": "volume", "hostPath": {"path": path}}],
                },
            }
        )
        self._workshop("wait", "--for=condition=Ready", f"pod/{pod}", "--timeout=60s", timeout=70)
        return pod

    def _binding_waits(self, team: Kubectl, name: str) -> bool:
        """Some classes bind a claim only when a pod uses it: make one that does nothing."""
        if not any("waiting for first consumer" in event.get("message", "") for event in team.items("events")):
            return False
        if team.find(f"pod/bind-{name}") is None:
            team.apply(
                {
                    "apiVersion": "v1",
                    "kind": "Pod",
                    "metadata": {"name": f"bind-{name}"},
                    "spec": {
                        "restartPolicy": "Never",
                        "securityContext": {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
                        "containers": [
                            {
                                "name": "bind",
                                "image": self._image,
                                "imagePullPolicy": "IfNotPresent",
                                "command": ["true"],
                                "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                                "volumeMounts": [{"name": "volume", "mountPath": "/volume"}],
                            }
                        ],
                        "volumes": [{"name": "volume", "persistentVolumeClaim": {"claimName": name}}],
                    },
                }
            )
        return False

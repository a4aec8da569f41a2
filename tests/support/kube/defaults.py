"""What the API server fills in where a manifest says nothing: enough of it that a comparison with what was applied is a real one."""

from __future__ import annotations

from typing import Any, Final

from banyan_operator.kube.kinds import Manifest

EMPTY: Final[Manifest] = {"metadata": {}, "spec": {}}
"""The template of a test that asks for none."""


def defaulted(manifest: Manifest) -> Manifest:
    """The object with its defaults; itself where it has them all."""
    match manifest["kind"]:
        case "Deployment":
            spec = {"replicas": 1, "progressDeadlineSeconds": 600}
            return _spec(manifest, {**spec, "template": _template(manifest.get("spec", {}).get("template", EMPTY))})
        case "Job":
            uid = manifest["metadata"]["uid"]
            spec = {"backoffLimit": 2147483647, "suspend": False, "selector": {"matchLabels": {"batch.kubernetes.io/controller-uid": uid}}}
            template = _template(manifest.get("spec", {}).get("template", EMPTY))
            marks = {"batch.kubernetes.io/controller-uid": uid, "batch.kubernetes.io/job-name": manifest["metadata"]["name"]}
            labels = template["metadata"].get("labels") or {}
            if any(labels.get(name) != value for name, value in marks.items()):
                template = {**template, "metadata": {**template["metadata"], "labels": {**labels, **marks}}}
            return _spec(manifest, {**spec, "template": template})
        case "Service":
            spec = {"clusterIP": "10.0.0.7", "sessionAffinity": "None", "internalTrafficPolicy": "Cluster", "type": "ClusterIP"}
            ports = [_with(port, {"protocol": "TCP"}) for port in manifest.get("spec", {}).get("ports", ())]
            return _spec(manifest, {**spec, "ports": ports})
        case "PersistentVolumeClaim":
            return _spec(manifest, {"volumeMode": "Filesystem"})
    return manifest


def _spec(manifest: Manifest, found: Manifest) -> Manifest:
    """`found` holds whole values for template and ports, and defaults for the rest."""
    spec = manifest.get("spec", {})
    full = {**found, **spec, **{name: found[name] for name in ("template", "ports") if name in found}}
    return manifest if full == spec else {**manifest, "spec": full}


def _template(template: Manifest) -> Manifest:
    spec = template["spec"]
    containers = [_container(one) for one in spec.get("containers", ())]
    first = [_container(one) for one in spec.get("initContainers", ())]
    full = {"dnsPolicy": "ClusterFirst", "schedulerName": "default-scheduler", **spec, "containers": containers}
    if first:
        full["initContainers"] = first
    return template if full == spec else {**template, "spec": full}


def _container(container: Manifest) -> Manifest:
    full = _with(container, {"terminationMessagePath": "/dev/termination-log", "imagePullPolicy": "IfNotPresent"})
    if "ports" in container:
        full = {**full, "ports": [_with(port, {"protocol": "TCP"}) for port in container["ports"]]}
    return full


def _with(base: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    return {**found, **base}

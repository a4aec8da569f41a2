"""Labels, annotations and owners of child objects, and the hashes that tell revisions apart."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final

from banyan_operator.api import API_VERSION, InferenceServer, Resource
from banyan_operator.kube.kinds import FIELD_MANAGER, GROUP, MANAGED_BY_LABEL, Manifest
from banyan_operator.kube.objects import OWNER_LABELS, owner_reference
from banyan_operator.kube.ownership import APPLIED_HASH, Owner
from banyan_operator.plan import Settings

COMPONENT: Final = "app.kubernetes.io/component"
SPEC_HASH: Final = f"{GROUP}/spec-hash"
"""On a pod template: 10 hex digits over the template; pods carry it, so it tells which revision a pod is of."""
SPEC_DIGEST: Final = f"{GROUP}/spec-digest"
"""On a Deployment and on recorded templates: for which spec the pods are as they are."""
REFRESH: Final = f"{GROUP}/refresh"
"""On a pod template: the text of spec.rollout.refresh, so that another one makes other pods."""
HEADLESS: Final = f"{GROUP}/headless"
"""A label of the Service that has an address for every pod, so that a ServiceMonitor can leave it out."""
RENDERED_BY: Final = f"{GROUP}/rendered-by"
"""On every child: the operator's version that wrote it last. Another version alone is no reason to write."""


def kind_of(resource: Resource) -> str:
    return type(resource).__name__


def owner(resource: Resource) -> Owner:
    return Owner(kind_of(resource), resource.metadata.name, resource.metadata.uid)


def selector(resource: Resource) -> dict[str, str]:
    """The labels that select the resource's pods. They never change: a Deployment's selector cannot."""
    if isinstance(resource, InferenceServer):
        return server_selector(resource.metadata.name)
    return _selector("banyan-batch", resource.metadata.name, "work")


def server_selector(name: str) -> dict[str, str]:
    """Of the InferenceServer of this name."""
    return _selector("banyan-server", name, "server")


def pod_selector(resource: Resource) -> dict[str, str]:
    """The labels that select all the resource's pods, whatever they do."""
    return {name: value for name, value in selector(resource).items() if isinstance(resource, InferenceServer) or name != COMPONENT}


def _selector(name: str, instance: str, component: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": name, "app.kubernetes.io/instance": instance, COMPONENT: component}


def labels(resource: Resource, component: str | None = None) -> dict[str, str]:
    """Of a child. `component`: what it does, where that is not what the selector says."""
    return {
        **selector(resource),
        **({COMPONENT: component} if component is not None else {}),
        "app.kubernetes.io/part-of": "banyan",
        MANAGED_BY_LABEL: FIELD_MANAGER,
        owner_label(resource): resource.metadata.name,
    }


def owner_label(resource: Resource) -> str:
    return OWNER_LABELS[kind_of(resource)]


def owner_references(resource: Resource) -> list[Manifest]:
    """metadata.ownerReferences of the resource's children."""
    named = {"name": resource.metadata.name, "uid": resource.metadata.uid}
    return [owner_reference({"apiVersion": API_VERSION, "kind": kind_of(resource), "metadata": named})]


def child(
    resource: Resource,
    settings: Settings,
    *,
    api_version: str,
    kind: str,
    name: str,
    body: dict[str, Any],
    annotations: dict[str, str] | None = None,
    extra_labels: dict[str, str] | None = None,
    component: str | None = None,
    owned: bool = True,
) -> Manifest:
    """One child object, complete with labels, owner and hashes. `body` holds spec, or whatever the kind has instead."""
    metadata: Manifest = {
        "name": name,
        "namespace": resource.metadata.namespace,
        "labels": {**(extra_labels or {}), **labels(resource, component)},
        "annotations": dict(annotations or {}),
    }
    if owned:
        metadata["ownerReferences"] = owner_references(resource)
    manifest: Manifest = {"apiVersion": api_version, "kind": kind, "metadata": metadata, **body}
    metadata["annotations"] |= {APPLIED_HASH: digest(manifest), RENDERED_BY: settings.operator_version}
    return manifest


def digest(value: Any) -> str:
    """10 hex digits over the canonical JSON of a value."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:10]

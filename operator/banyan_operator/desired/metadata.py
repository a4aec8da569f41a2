"""Names, labels, annotations and owners of child objects, and the hashes that tell revisions apart."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final

from banyan_operator.api import API_VERSION, InferenceServer, Resource
from banyan_operator.kube.kinds import FIELD_MANAGER, GROUP, MANAGED_BY_LABEL, Manifest
from banyan_operator.kube.objects import OWNER_LABELS, owner_reference
from banyan_operator.kube.ownership import Owner
from banyan_operator.plan import Settings

SPEC_HASH: Final = f"{GROUP}/spec-hash"
"""On a pod template: 10 hex digits over the template; pods carry it, so it tells which revision a pod is of."""
APPLIED_HASH: Final = f"{GROUP}/applied-hash"
"""On every child: a hash over all that we apply. It differs when a field is no longer wanted, which no comparison shows."""
RENDERED_BY: Final = f"{GROUP}/rendered-by"
RENDERED_GENERATION: Final = f"{GROUP}/rendered-generation"
RENDERED_TEMPLATE: Final = f"{GROUP}/rendered-template"
DEFAULT_IMAGE: Final = f"{GROUP}/default-image"
UPGRADE: Final = f"{GROUP}/upgrade"

TEMPLATE_LAYOUT: Final = "1"  # raised when an operator would render equal specs differently, so that it need not restart pods


def kind_of(resource: Resource) -> str:
    return type(resource).__name__


def owner(resource: Resource) -> Owner:
    return Owner(kind_of(resource), resource.metadata.name, resource.metadata.uid)


def selector(resource: Resource) -> dict[str, str]:
    """The labels that select the resource's pods. They never change: a Deployment's selector cannot."""
    name, component = ("banyan-server", "server") if isinstance(resource, InferenceServer) else ("banyan-batch", "work")
    return {
        "app.kubernetes.io/name": name,
        "app.kubernetes.io/instance": resource.metadata.name,
        "app.kubernetes.io/component": component,
    }


def labels(resource: Resource) -> dict[str, str]:
    return {
        **selector(resource),
        "app.kubernetes.io/part-of": "banyan",
        MANAGED_BY_LABEL: FIELD_MANAGER,
        owner_label(resource): resource.metadata.name,
    }


def owner_label(resource: Resource) -> str:
    return OWNER_LABELS[kind_of(resource)]


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
    owned: bool = True,
) -> Manifest:
    """One child object, complete with labels, owner and hashes. `body` holds spec, or whatever the kind has instead."""
    metadata: Manifest = {
        "name": name,
        "namespace": resource.metadata.namespace,
        "labels": {**(extra_labels or {}), **labels(resource)},
        "annotations": {**(annotations or {}), RENDERED_BY: settings.operator_version},
    }
    if owned:
        metadata["ownerReferences"] = [
            owner_reference(
                {
                    "apiVersion": API_VERSION,
                    "kind": kind_of(resource),
                    "metadata": {"name": resource.metadata.name, "uid": resource.metadata.uid},
                }
            )
        ]
    manifest: Manifest = {"apiVersion": api_version, "kind": kind, "metadata": metadata, **body}
    metadata["annotations"][APPLIED_HASH] = digest(manifest)
    return manifest


def digest(value: Any) -> str:
    """10 hex digits over the canonical JSON of a value."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def default_image(resource: Resource, live: Manifest | None, settings: Settings) -> str:
    """The image where the spec names none. It sticks until the spec changes: an operator's upgrade must not restart servers."""
    annotations = (live or {}).get("metadata", {}).get("annotations") or {}
    same_spec = annotations.get(RENDERED_GENERATION) == str(resource.metadata.generation)
    if same_spec and DEFAULT_IMAGE in annotations and resource.metadata.annotations.get(UPGRADE) != "now":
        return str(annotations[DEFAULT_IMAGE])
    return settings.runtime_image

"""The child objects that both resources have beside their pods: a ServiceAccount without rights, and a claim for the cache."""

from __future__ import annotations

from banyan_operator.api import Resource
from banyan_operator.api.parts import Cache
from banyan_operator.desired.metadata import child
from banyan_operator.plan import Manifest, Settings


def service_account(resource: Resource, settings: Settings, name: str) -> Manifest:
    body = {"automountServiceAccountToken": False}
    return child(resource, settings, api_version="v1", kind="ServiceAccount", name=name, body=body)


def cache_claim(resource: Resource, settings: Settings, name: str, cache: Cache) -> Manifest:
    """The claim for a cache. With `retain` nobody owns it, so it outlives the resource."""
    spec: Manifest = {"accessModes": [cache.access_mode], "resources": {"requests": {"storage": str(cache.size)}}}
    if cache.storage_class_name is not None:
        spec["storageClassName"] = cache.storage_class_name
    return child(
        resource,
        settings,
        api_version="v1",
        kind="PersistentVolumeClaim",
        name=name,
        body={"spec": spec},
        owned=not cache.retain,
    )

"""Which Secrets, ConfigMaps and claims a resource names, and in which field."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from banyan_operator.api import Resource
from banyan_operator.api.uris import ClaimPath, locate
from banyan_operator.plan import Ref


def references(resource: Resource) -> dict[Ref, str]:
    """Every object that must exist before pods can start, with the path of the (first) field that names it.

    What is marked optional is left out, and what podTemplate adds: the kubelet tells about that.
    """
    found: dict[Ref, str] = {}
    spec = resource.spec.dump()
    spec.pop("podTemplate", None)
    for ref, path in _walk(spec, "spec"):
        found.setdefault(ref, path)
    return found


def _walk(node: Any, path: str) -> Iterator[tuple[Ref, str]]:
    if isinstance(node, list):
        for number, item in enumerate(node):
            yield from _walk(item, f"{path}[{number}]")
    elif isinstance(node, dict):
        for field, value in node.items():
            where = f"{path}.{field}"
            if ref := _reference(field, value):
                yield ref, where
            yield from _walk(value, where)


def _reference(field: str, value: Any) -> Ref | None:
    match field, value:
        case _, {"optional": True}:
            return None
        case (
            ("secretRef" | "secretKeyRef" | "apiKeysSecretRef" | "apiKeySecretRef" | "credentialsSecretRef" | "tokenSecretRef"),
            {"name": name},
        ):
            return Ref("v1", "Secret", name)
        case (("configMapRef" | "configMapKeyRef" | "caConfigMapRef" | "chatTemplate"), {"name": name}):
            return Ref("v1", "ConfigMap", name)
        case "claimName", str(name):
            return Ref("v1", "PersistentVolumeClaim", name)
        case (("uri" | "failedOf"), str(uri)):
            place = locate(uri)
            return Ref("v1", "PersistentVolumeClaim", place.claim) if isinstance(place, ClaimPath) else None
    return None

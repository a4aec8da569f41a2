"""Which Secrets, ConfigMaps and claims a spec names: found by the field names that the API uses for them everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from banyan_operator.plan import Manifest, Ref

_SECRET_FIELDS: Final = ("secretRef", "secretKeyRef")
_CONFIG_MAP_FIELDS: Final = ("configMapRef", "configMapKeyRef")


def references(resource: Manifest) -> frozenset[Ref]:
    """Every object that has to exist before the pods of `resource` can start. What is marked optional is left out."""
    return frozenset(_walk(resource.get("spec") or {}))


def _walk(node: Any) -> Iterator[Ref]:
    if isinstance(node, list):
        for item in node:
            yield from _walk(item)
        return
    if not isinstance(node, dict):
        return
    for field, value in node.items():
        if isinstance(value, dict) and value.get("name") and not value.get("optional"):
            if field in _SECRET_FIELDS or field.endswith("SecretRef"):
                yield Ref("v1", "Secret", value["name"])
            elif field in _CONFIG_MAP_FIELDS or field.endswith("ConfigMapRef") or field == "chatTemplate":
                yield Ref("v1", "ConfigMap", value["name"])
        elif field == "claimName" and isinstance(value, str):
            yield Ref("v1", "PersistentVolumeClaim", value)
        elif field == "uri" and isinstance(value, str) and value.startswith("pvc://"):
            yield Ref("v1", "PersistentVolumeClaim", value.removeprefix("pvc://").partition("/")[0])
        yield from _walk(value)

"""The user's podTemplate over the generated pod: Kubernetes' strategic merge, as far as a partial PodSpec needs it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Final

from banyan_operator.api import Problem, SpecError
from banyan_operator.api.parts import PodTemplate
from banyan_operator.plan import Manifest

MERGE_KEYS: Final[dict[str, tuple[str, ...]]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "ephemeralContainers": ("name",),
    "volumes": ("name",),
    "env": ("name",),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "ports": ("containerPort", "protocol"),
    "imagePullSecrets": ("name",),
    "hostAliases": ("ip",),
    "resourceClaims": ("name",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
}
"""Lists of a pod whose items are merged by keys, as the Kubernetes API declares them; all others are replaced."""

_DEFAULTS: Final = {"protocol": "TCP"}  # of keys that may be left out

_PATH: Final = "spec.podTemplate.spec"


def merged(template: Manifest, user: PodTemplate | None) -> Manifest:
    """`template` with the user's metadata and spec merged in. The operator's own labels and annotations win.

    Raises SpecError for what cannot be merged.
    """
    if user is None:
        return template
    metadata = template["metadata"]
    return {
        "metadata": {
            **metadata,
            "labels": {**user.metadata.labels, **metadata.get("labels", {})},
            "annotations": {**user.metadata.annotations, **metadata.get("annotations", {})},
        },
        "spec": _object(template["spec"], user.spec, _PATH),
    }


def _object(base: dict[str, Any], over: dict[str, Any], path: str) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        where = f"{path}.{key}"
        if key.startswith("$"):
            raise SpecError([Problem(where, "patch directives are not supported; write the fields that you want")])
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = _object(result[key], value, where)
        elif key in MERGE_KEYS and isinstance(result.get(key), list):
            result[key] = _list(result[key], value, MERGE_KEYS[key], where)
        elif isinstance(result.get(key), dict | list) and not isinstance(value, type(result[key])):
            raise SpecError([Problem(where, f"{value!r} must be a {'mapping' if isinstance(result[key], dict) else 'list'}")])
        else:
            result[key] = copy.deepcopy(value)
    return result


def merge_key(item: Any, keys: tuple[str, ...]) -> tuple[Any, ...] | None:
    """By what an item of a list is found again; None where it lacks a key."""
    if not isinstance(item, Mapping):
        return None
    found = tuple(item.get(key, _DEFAULTS.get(key)) for key in keys)
    return None if None in found else found


def _list(base: list[Any], over: Any, keys: tuple[str, ...], path: str) -> list[Any]:
    if not isinstance(over, list):
        raise SpecError([Problem(path, f"{over!r} must be a list")])
    result = list(base)
    for number, item in enumerate(over):
        key = merge_key(item, keys)
        if key is None:
            needed = " and ".join(f"'{key}'" for key in keys if key not in _DEFAULTS)
            raise SpecError([Problem(f"{path}[{number}]", f"must be a mapping with {needed}, by which it is merged")])
        place = next((place for place, old in enumerate(result) if merge_key(old, keys) == key), None)
        if place is None:
            result.append(copy.deepcopy(item))
        else:
            result[place] = _object(result[place], item, f"{path}[{number}]")
    return result

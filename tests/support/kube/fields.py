"""Whose field is whose: server-side apply with one manager, and what is left of its fields when somebody else writes."""

from __future__ import annotations

from typing import Any, Final

MERGE_KEYS: Final[dict[str, tuple[str, ...]]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "volumes": ("name",),
    "env": ("name",),
    "volumeMounts": ("mountPath",),
    "ownerReferences": ("uid",),
    "imagePullSecrets": ("name",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
}
"""Lists that the real server merges item by item. Ports: by number and protocol."""

ATOMIC: Final = frozenset({"selector", "labelSelector", "podSelector", "nodeSelector"})
"""Maps that the real server takes as one value."""


def _keys(name: str, items: list[Any]) -> tuple[str, ...] | None:
    if name == "ports" and items and isinstance(items[0], dict):
        return ("containerPort", "protocol") if "containerPort" in items[0] else ("port", "protocol")
    return MERGE_KEYS.get(name)


def _place(item: dict[str, Any], keys: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(item.get(key, "TCP" if key == "protocol" else None) for key in keys)


def applied(live: Any, owned: Any, wanted: Any, name: str = "") -> Any:
    """`live` with `wanted` in it, and without what was `owned` and is wanted no more."""
    if isinstance(wanted, dict) and isinstance(live, dict) and name not in ATOMIC:
        owned = owned if isinstance(owned, dict) else {}
        result = {}
        for key, value in live.items():
            if key in wanted:
                result[key] = applied(value, owned.get(key), wanted[key], key)
            elif key not in owned:
                result[key] = value
            elif (rest := _without(value, owned[key], key)) is not None:
                result[key] = rest
        for key, value in wanted.items():
            if key not in live:
                result[key] = value
        return live if result == live else result
    if isinstance(wanted, list) and isinstance(live, list):
        keys = _keys(name, wanted or live)
        if keys is not None:
            return _merged_list(live, owned if isinstance(owned, list) else [], wanted, keys)
    return live if live == wanted else wanted


def _merged_list(live: list[Any], owned: list[Any], wanted: list[Any], keys: tuple[str, ...]) -> list[Any]:
    ours = {_place(item, keys): item for item in owned}
    asked = {_place(item, keys): item for item in wanted}
    result = []
    for item in live:
        place = _place(item, keys)
        if place in asked:
            result.append(applied(item, ours.get(place), asked.pop(place)))
        elif place not in ours:
            result.append(item)
    return [*result, *asked.values()]


def _without(live: Any, owned: Any, name: str) -> Any:
    """What others own of a value that is wanted no more, or None."""
    if isinstance(live, dict) and isinstance(owned, dict) and owned:
        return applied(live, owned, {}) or None
    if isinstance(live, list) and isinstance(owned, list) and (keys := _keys(name, live)) is not None:
        return _merged_list(live, owned, [], keys) or None
    return None


def still_owned(owned: Any, live: Any) -> Any:
    """The part of `owned` that somebody else's write has left as it was: what they changed is theirs."""
    if isinstance(owned, dict) and isinstance(live, dict):
        return {
            name: still_owned(value, live[name])
            for name, value in owned.items()
            if name in live and (isinstance(value, dict | list) or value == live[name])
        }
    return owned

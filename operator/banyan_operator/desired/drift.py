"""Whether a live object is already as we want it: field by field over what we own, blind to what the API server adds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from banyan_operator.api.quantity import same
from banyan_operator.desired.podtemplate import MERGE_KEYS


def settled(live: Mapping[str, Any], desired: Mapping[str, Any]) -> bool:
    """Whether applying `desired` would change nothing in `live`.

    Fields that `desired` leaves out belong to others and are not looked at. That one of ours is no longer wanted shows in
    the annotation applied-hash, which is part of every desired object.
    """
    return all(_covers(live.get(key), value, key) for key, value in desired.items())


def _covers(live: Any, desired: Any, key: str) -> bool:
    if isinstance(desired, Mapping):
        if not isinstance(live, Mapping):
            return not desired  # the API server drops some empty objects
        return all(_covers(live.get(name), value, name) for name, value in desired.items())
    if isinstance(desired, list):
        return _covers_list(live or [], desired, key)
    if desired in ("", 0, False) and live is None:
        return True  # zero values of the API's Go structs are left out of JSON
    return live == desired or same(live, desired)


def _covers_list(live: list[Any], desired: list[Any], key: str) -> bool:
    merge_key = MERGE_KEYS.get(key) or ("uid" if key == "ownerReferences" else None)
    if key == "ports" and any("port" in item for item in desired):
        merge_key = "port"  # of a Service
    if merge_key is None:
        return len(live) == len(desired) and all(_covers(a, b, key) for a, b in zip(live, desired, strict=True))
    by_key = {item.get(merge_key): item for item in live}
    return all(item.get(merge_key) in by_key and _covers(by_key[item[merge_key]], item, key) for item in desired)

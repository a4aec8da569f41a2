"""Whether a live object is already as we want it: field by field over what we own, blind to what the API server adds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from banyan_operator.api.quantity import same
from banyan_operator.desired.metadata import RENDERED_BY
from banyan_operator.desired.podtemplate import MERGE_KEYS, merge_key
from banyan_operator.kube.kinds import CONTROLLER_REVISION, DEPLOYMENT, JOB, SERVICE

Keys = Mapping[str, tuple[str, ...]]
"""By the name of a list, the merge keys of its items. Others may have items of their own in such lists, and in no other."""

_EVERYWHERE: Final = {"ownerReferences": ("uid",)}
_AMOUNTS: Final = frozenset(
    {"requests", "limits", "overhead"}
)  # whose values are quantities, which the API server may write in another way
_AMOUNT: Final = frozenset({"sizeLimit", "divisor"})
_ATOMIC: Final = frozenset({"selector", "labelSelector", "podSelector", "namespaceSelector", "matchLabels"})
"""Maps that the API knows as one value each: nobody else may have a key of their own in them, for with it they select something else.
(So is `nodeSelector`, to which admission webhooks add what their cluster wants.)"""
_OF_KIND: Final[dict[str, Keys]] = {
    SERVICE.kind: {"ports": ("port", "protocol")},
    DEPLOYMENT.kind: MERGE_KEYS,
    JOB.kind: MERGE_KEYS,
    CONTROLLER_REVISION.kind: MERGE_KEYS,
}


def settled(live: Mapping[str, Any], desired: Mapping[str, Any]) -> bool:
    """Whether applying `desired`, an object or a part of one, would change nothing in `live`.

    Fields that `desired` leaves out belong to others and are not looked at. That one of ours is no longer wanted shows in
    the annotation applied-hash, which is part of every desired object.
    """
    keys = {**_EVERYWHERE, **_OF_KIND.get(desired.get("kind", ""), {})}
    return _covers(live, desired, "", keys)


def _covers(live: Any, desired: Any, field: str, keys: Keys) -> bool:
    if live == desired:
        return True
    if isinstance(desired, dict):
        if not isinstance(live, dict):
            return not desired  # the API server drops some empty objects
        if field in _AMOUNTS and not any(isinstance(value, dict) for value in desired.values()):
            return all(same(live.get(name), value, rounded=True) for name, value in desired.items())
        if field in _ATOMIC and live.keys() - desired.keys():
            return False
        return all(_covers(live.get(name), value, name, keys) for name, value in desired.items() if name != RENDERED_BY)
    if isinstance(desired, list):
        return _covers_list(live or [], desired, field, keys)
    if desired in ("", 0, False) and live is None:
        return True  # zero values of the API's Go structs are left out of JSON
    return field in _AMOUNT and same(live, desired)


def _covers_list(live: list[Any], desired: list[Any], field: str, keys: Keys) -> bool:
    merged_by = keys.get(field)
    if merged_by is None:
        return len(live) == len(desired) and all(_covers(a, b, field, keys) for a, b in zip(live, desired, strict=True))
    by_key = {merge_key(item, merged_by): item for item in live}
    return all((key := merge_key(item, merged_by)) in by_key and _covers(by_key[key], item, field, keys) for item in desired)

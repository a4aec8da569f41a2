"""Whose an object is. Decided by uid: a resource that was deleted and made again under its name is another one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from banyan_operator.kube.kinds import FIELD_MANAGER, GROUP, MANAGED_BY_LABEL
from banyan_operator.kube.objects import OWNER_LABELS, controller

APPLIED_HASH: Final = f"{GROUP}/applied-hash"
"""On every child: a hash over all that we apply. It differs when a field is no longer wanted, which no comparison shows."""
ADOPT: Final = f"{GROUP}/adopt"
"""Annotation: "true" on somebody else's object lets the resource that wants its name take it over."""


@dataclass(frozen=True, slots=True)
class Owner:
    """One of our resources."""

    kind: str
    name: str
    uid: str

    @staticmethod
    def of(resource: Mapping[str, Any]) -> Owner:
        return Owner(resource["kind"], resource["metadata"]["name"], str(resource["metadata"].get("uid") or ""))

    def controls(self, live: Mapping[str, Any]) -> bool:
        owner = controller(live)
        return owner is not None and owner.get("uid") == self.uid

    def may_change(self, live: Mapping[str, Any]) -> bool:
        """Whether it owns the object, or nobody does and it was made for a resource of this name, or it is told to adopt it.

        What was made to outlive its resource, what lost its owner reference, and what was orphaned on purpose have no owner.
        """
        if controller(live) is not None:
            return self.controls(live)
        metadata = live["metadata"]
        if (metadata.get("annotations") or {}).get(ADOPT) == "true":
            return True
        if APPLIED_HASH not in (metadata.get("annotations") or {}):
            return False  # labels may be anybody's
        labels = metadata.get("labels") or {}
        return bool(labels.get(MANAGED_BY_LABEL) == FIELD_MANAGER and labels.get(OWNER_LABELS[self.kind]) == self.name)

    def outlived_by(self, live: Mapping[str, Any]) -> bool:
        """Whether the object belongs to a deleted resource of this name: garbage that is about to be collected."""
        return any(
            owner.get("kind") == self.kind and owner.get("name") == self.name and owner.get("uid") != self.uid
            for owner in live["metadata"].get("ownerReferences") or ()
        )


def whose(live: Mapping[str, Any]) -> str:
    """Who an object belongs to, for a message."""
    owner = controller(live)
    return f"{owner.get('kind')} {owner.get('name')}" if owner is not None else "nobody that it names"

"""Objects and who they belong to: keys, references, owners, labels, conditions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from banyan_operator.kube.kinds import BATCH_JOB, GROUP, INFERENCE_SERVER, Kind, Manifest, find

OWNER_LABELS: Final = {INFERENCE_SERVER.kind: f"{GROUP}/server", BATCH_JOB.kind: f"{GROUP}/batchjob"}
"""On every child, by the kind of its resource: the label whose value is the resource's name."""


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """Where an object lies. Kinds are unique among the groups used here, so the group is left out."""

    kind: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Ref:
    """Names one object in the resource's own namespace."""

    api_version: str
    kind: str
    name: str

    @staticmethod
    def of(manifest: Mapping[str, Any]) -> Ref:
        return Ref(manifest["apiVersion"], manifest["kind"], manifest["metadata"]["name"])

    @staticmethod
    def to(kind: Kind, name: str) -> Ref:
        return Ref(kind.api_version, kind.kind, name)

    def key(self, namespace: str) -> Key:
        return Key(self.kind, namespace, self.name)

    def found_kind(self) -> Kind:
        return find(self.api_version, self.kind)


def key_of(manifest: Mapping[str, Any]) -> Key:
    meta = manifest["metadata"]
    return Key(manifest["kind"], meta.get("namespace") or "default", meta["name"])


def uid_of(manifest: Mapping[str, Any]) -> str:
    return str(manifest["metadata"].get("uid") or "")


def find_object(objects: Iterable[Manifest], wanted: Ref) -> Manifest | None:
    return next((one for one in objects if Ref.of(one) == wanted), None)


# --- owners ---


def labelled_owner(child: Mapping[str, Any]) -> Key | None:
    """The resource that a child's labels name, whether it exists or not."""
    meta = child["metadata"]
    labels = meta.get("labels") or {}
    for kind, label in OWNER_LABELS.items():
        if label in labels:
            return Key(kind, meta["namespace"], labels[label])
    return None


def controller(child: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The owner reference of whoever manages `child`."""
    return next((owner for owner in child["metadata"].get("ownerReferences") or () if owner.get("controller")), None)


def controller_uid(child: Mapping[str, Any]) -> str | None:
    owner = controller(child)
    return None if owner is None else str(owner["uid"])


def owner_reference(owner: Mapping[str, Any]) -> Manifest:
    """The reference in metadata.ownerReferences of what `owner` manages."""
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


# --- conditions ---


def condition(manifest: Mapping[str, Any] | None, kind: str) -> Mapping[str, Any]:
    """A condition of a live object, or an empty mapping."""
    found = ((manifest or {}).get("status") or {}).get("conditions") or ()
    return next((one for one in found if one["type"] == kind), {})


def is_true(manifest: Mapping[str, Any] | None, kind: str) -> bool:
    return condition(manifest, kind).get("status") == "True"

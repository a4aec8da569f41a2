"""What the operator last saw of the cluster: trimmed copies by kind and name, children by the resource they belong to.

Fed by watches, by the answers to our own writes (so that a reconcile reads what the last one wrote) and by the resync. Resource
versions decide which of two sightings is newer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from banyan_operator.cluster import kinds
from banyan_operator.cluster.kinds import Key, Kind
from banyan_operator.plan import Manifest

_CONTAINER_FIELDS = ("name", "image", "ports", "resources", "restartPolicy")
_REMEMBER_GONE = 4096
_POD_FIELDS = ("nodeName", "terminationGracePeriodSeconds", "restartPolicy")


def trim(manifest: Mapping[str, Any]) -> Manifest:
    """A copy without what nobody here reads: managedFields, and of pods also env, volumes and probes."""
    small: Manifest = dict(manifest)
    small["metadata"] = {name: value for name, value in manifest["metadata"].items() if name != "managedFields"}
    if manifest.get("kind") == kinds.POD.kind:
        spec = manifest.get("spec") or {}
        small["spec"] = {name: spec[name] for name in _POD_FIELDS if name in spec}
        for group in ("containers", "initContainers"):
            if group in spec:
                small["spec"][group] = [{name: c[name] for name in _CONTAINER_FIELDS if name in c} for c in spec[group]]
    return small


def version(manifest: Mapping[str, Any]) -> int:
    """resourceVersion as a number: etcd's revision, which only grows."""
    return int(manifest["metadata"].get("resourceVersion") or 0)


class Store:
    """Not thread-safe: belongs to the event loop that reconciles."""

    def __init__(self) -> None:
        self._objects: dict[tuple[str, str, str], Manifest] = {}
        self._children: dict[Key, set[tuple[str, str, str]]] = {}
        self._gone: dict[str, None] = {}  # uids: the answer to a write of ours may come after the news of the object's end

    def put(self, manifest: Mapping[str, Any]) -> bool:
        """Note a sighting. False if a newer one (or the same) is known already."""
        place = self._place(manifest)
        known = self._objects.get(place)
        uid = manifest["metadata"].get("uid")
        if uid in self._gone:
            return False
        if known is not None and known["metadata"].get("uid") == uid and version(known) >= version(manifest):
            return False
        if known is not None:
            self._unlink(place, known)
        small = trim(manifest)
        self._objects[place] = small
        owner = kinds.owner_of(small) if small["kind"] not in _RESOURCE_KINDS else None
        if owner is not None:
            self._children.setdefault(owner, set()).add(place)
        return True

    def remove(self, manifest: Mapping[str, Any]) -> bool:
        """Note that an object is gone. False if it was not known, or if one of its name lives on under another uid."""
        self._gone[manifest["metadata"].get("uid", "")] = None
        while len(self._gone) > _REMEMBER_GONE:
            del self._gone[next(iter(self._gone))]
        place = self._place(manifest)
        known = self._objects.get(place)
        if known is None or known["metadata"].get("uid") != manifest["metadata"].get("uid"):
            return False
        del self._objects[place]
        self._unlink(place, known)
        return True

    def replace(self, kind: Kind, namespace: str | None, listed: Iterable[Mapping[str, Any]], list_version: int) -> list[Manifest]:
        """Bring everything of a kind (in a namespace, or all) in line with a list; returns what the watches had missed."""
        repaired: list[Manifest] = []
        seen: set[tuple[str, str, str]] = set()
        for manifest in listed:
            place = self._place(manifest)
            seen.add(place)
            if self.put(manifest):
                repaired.append(self._objects[place])
        for place, known in list(self._objects.items()):
            if place[0] != kind.kind or place in seen or (namespace is not None and place[1] != namespace):
                continue
            if version(known) <= list_version:  # a younger one was made after the list
                self.remove(known)
                repaired.append(known)
        return repaired

    def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        return self._objects.get((kind, namespace, name))

    def resource(self, key: Key) -> Manifest | None:
        return self._objects.get((key.kind, key.namespace, key.name))

    def children(self, key: Key) -> tuple[Manifest, ...]:
        """In a stable order: by kind, then name."""
        return tuple(self._objects[place] for place in sorted(self._children.get(key, ())))

    def all(self, kind: Kind) -> list[Manifest]:
        return [manifest for place, manifest in self._objects.items() if place[0] == kind.kind]

    def resources(self) -> list[Key]:
        """Every resource that is known, by name."""
        return [Key(*place) for place in self._objects if place[0] in _RESOURCE_KINDS]

    def users_of_server(self, namespace: str, name: str) -> list[Key]:
        """The BatchJobs whose serverRef names this InferenceServer."""
        return [
            kinds.key_of(job)
            for job in self.all(kinds.BATCH_JOB)
            if job["metadata"]["namespace"] == namespace and (job.get("spec", {}).get("serverRef") or {}).get("name") == name
        ]

    def _place(self, manifest: Mapping[str, Any]) -> tuple[str, str, str]:
        meta = manifest["metadata"]
        return manifest["kind"], meta["namespace"], meta["name"]

    def _unlink(self, place: tuple[str, str, str], manifest: Manifest) -> None:
        owner = kinds.owner_of(manifest) if manifest["kind"] not in _RESOURCE_KINDS else None
        if owner is not None and owner in self._children:
            self._children[owner].discard(place)
            if not self._children[owner]:
                del self._children[owner]


_RESOURCE_KINDS = frozenset(kind.kind for kind in kinds.RESOURCES)

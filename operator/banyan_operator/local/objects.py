"""The store of objects: what the API server and its garbage collector are to a cluster.

Objects are plain dicts; the store gives them uid, generation, resourceVersion and creationTimestamp, and keeps their status
apart from what is applied. Only one writer exists (the operator of this process), so nothing is locked.

All of it is in memory, the ControllerRevisions that record what servers run included. A restart of local mode loses nothing by
that: no process outlives it, so there is none that a newly rendered template could restart.
"""

from __future__ import annotations

import copy
import uuid
from collections.abc import Callable, Iterator

from banyan_operator.kube.kinds import Manifest
from banyan_operator.kube.objects import Key, controller_uid, key_of, uid_of
from banyan_operator.local import admission
from banyan_operator.times import stamp

NAMESPACE = "default"
_GIVEN = ("uid", "generation", "resourceVersion", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds")
"""Fields of metadata that the store owns; what an apply says of them is ignored, but for the uid, which is a precondition."""


def in_namespace(namespace: str) -> str:
    """What stands behind a name outside the usual namespace."""
    return "" if namespace == NAMESPACE else f" ({namespace})"


class Refused(Exception):
    """The object cannot become what was asked for (422)."""


class Conflict(Exception):
    """The object that was meant is not the one that has the name (409)."""


class Objects:
    """All objects by key. Objects handed out are the stored ones: read them, never change them."""

    def __init__(self, clock: Callable[[], float], new_uid: Callable[[], str] = lambda: str(uuid.uuid4())) -> None:
        self._clock = clock
        self._new_uid = new_uid
        self._items: dict[Key, Manifest] = {}
        self.version = 0
        """Grows with every change."""

    def get(self, key: Key) -> Manifest | None:
        return self._items.get(key)

    def of_kind(self, kind: str) -> list[Manifest]:
        """Every object of `kind`, oldest first."""
        return [item for item in self._items.values() if item["kind"] == kind]

    def __iter__(self) -> Iterator[Manifest]:
        return iter(list(self._items.values()))

    def controlled_by(self, owner: Manifest, kind: str) -> list[Manifest]:
        uid = owner["metadata"]["uid"]
        return [item for item in self.of_kind(kind) if controller_uid(item) == uid]

    def apply(self, manifest: Manifest) -> Manifest:
        """Create the object, or make everything but its status and the store's own fields what `manifest` says.

        A change of anything but metadata and status is a new generation. A uid in `manifest` names the object that is meant.
        Raises Conflict when that one is not there, Refused for a change of a field that is fixed.
        """
        key = key_of(manifest)
        old = self._items.get(key)
        new = copy.deepcopy({name: value for name, value in manifest.items() if name != "status"})
        metadata = {name: value for name, value in new["metadata"].items() if name not in _GIVEN}
        metadata["namespace"] = key.namespace
        meant = uid_of(manifest)
        if old is None:
            if meant:
                raise Conflict(f"uid mismatch: the provided object specified uid {meant}, and no existing object was found")
            new |= {"metadata": {**metadata, "uid": self._new_uid(), "generation": 1, "creationTimestamp": stamp(self._clock())}}
            return self._put(key, new)
        if meant and meant != uid_of(old):
            raise Conflict(f"Precondition failed: UID in precondition: {meant}, UID in object meta: {uid_of(old)}")
        if words := admission.refusal(manifest, old):
            raise Refused(words)
        metadata |= {name: old["metadata"][name] for name in _GIVEN if name in old["metadata"]}
        new |= {"metadata": metadata}
        if "status" in old:
            new["status"] = old["status"]
        if new == old:
            return old
        if _body(new) != _body(old):
            metadata["generation"] = old["metadata"]["generation"] + 1
        return self._put(key, new)

    def restore(self, before: Manifest) -> Manifest:
        """Put an object of an earlier run back as it was; the manifest that was last applied to it."""
        self._put(key_of(before), copy.deepcopy(before))
        applied = {name: value for name, value in before.items() if name != "status"}
        return {**applied, "metadata": {name: value for name, value in before["metadata"].items() if name not in _GIVEN}}

    def set_status(self, key: Key, status: Manifest) -> bool:
        """Replace the status; says whether that changed anything. An object that is gone is no error."""
        old = self._items.get(key)
        if old is None or old.get("status") == status:
            return False
        self._put(key, {**old, "status": copy.deepcopy(status)})
        return True

    def delete(self, key: Key, grace_s: float | None = None) -> None:
        """Ask for an object's end. Pods are only marked: their processes must end first, then `remove` takes them out."""
        old = self._items.get(key)
        if old is None:
            return
        if key.kind != "Pod":
            self.remove(key)
            return
        metadata = old["metadata"]
        grace = float(old["spec"].get("terminationGracePeriodSeconds", 30) if grace_s is None else grace_s)
        if "deletionTimestamp" in metadata and metadata["deletionGracePeriodSeconds"] <= grace:
            return
        marked = {**metadata, "deletionTimestamp": stamp(self._clock() + grace), "deletionGracePeriodSeconds": grace}
        self._put(key, {**old, "metadata": marked})

    def remove(self, key: Key) -> None:
        if self._items.pop(key, None) is not None:
            self.version += 1

    def collect(self) -> None:
        """Delete what is owned by something that is gone, as the garbage collector does."""
        uids = {item["metadata"]["uid"] for item in self._items.values()}
        for key, item in list(self._items.items()):
            owners = item["metadata"].get("ownerReferences", ())
            if owners and not any(owner["uid"] in uids for owner in owners):
                self.delete(key)

    def _put(self, key: Key, item: Manifest) -> Manifest:
        self.version += 1
        item["metadata"] = {**item["metadata"], "resourceVersion": str(self.version)}
        self._items[key] = item
        return item


def _body(manifest: Manifest) -> Manifest:
    return {name: value for name, value in manifest.items() if name not in ("metadata", "status")}

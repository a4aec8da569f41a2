"""What the operator last saw of the cluster: trimmed copies by kind and name, children by the resource they belong to.

Fed by watches, by the answers to our own writes (so that a reconcile reads what the last one wrote) and by lists. Each sighting is
noted in one place, `note`, which says what resources it concerns. Watches lag, and those of different kinds by different times; a
sighting is late where its resource version is lower than what is known. (Versions of all objects come from one counter.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from banyan_operator.cluster.remains import Remains, has_ended
from banyan_operator.kube import kinds
from banyan_operator.kube.kinds import Kind, Manifest
from banyan_operator.kube.lru import Lru
from banyan_operator.kube.objects import Key, condition, controller, key_of, labelled_owner, uid_of
from banyan_operator.observed.batch import is_terminal

_CONTAINER_FIELDS: Final = ("name", "image", "ports", "resources", "restartPolicy")
_POD_FIELDS: Final = ("nodeName", "terminationGracePeriodSeconds", "restartPolicy", "tolerations")
_RESOURCES: Final = frozenset(kind.kind for kind in kinds.RESOURCES)
_REMEMBER_GONE: Final = 4096
_ASKED: Final = ("uid", "generation", "labels", "annotations", "deletionTimestamp")

Keys = frozenset[Key]
NOBODY: Final[Keys] = frozenset()


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
    """Not thread-safe: belongs to the event loop that reconciles. What it hands out is never changed."""

    def __init__(self) -> None:
        self._objects: dict[Key, Manifest] = {}
        self._of_kind: dict[str, set[Key]] = {}
        self._children: dict[Key, set[Key]] = {}
        self._users: dict[Key, set[Key]] = {}  # InferenceServer → BatchJobs whose serverRef names it
        self._remains = Remains()
        self._gone = Lru[str, int](_REMEMBER_GONE)  # uid → the version of its end, or of its last sighting under our label

    # --- what is heard ---

    def note(self, manifest: Mapping[str, Any], *, own: bool = False) -> Keys:
        """Note a sighting; returns the resources that it concerns, none if something newer is known already.

        `own`: the answer to our own write of a status, which is no news.
        """
        key, uid = key_of(manifest), uid_of(manifest)
        if self._gone.get(uid, -1) >= version(manifest):
            return NOBODY
        known = self._objects.get(key)
        if known is not None and version(known) >= version(manifest):
            return NOBODY
        small = trim(manifest)
        if known is not None:
            self._unlink(key, known)
        self._objects[key] = small
        self._of_kind.setdefault(key.kind, set()).add(key)
        for owner in owners(small):
            self._children.setdefault(owner, set()).add(key)
        if (server := _server_of(small)) is not None:
            self._users.setdefault(server, set()).add(key)
        if is_terminal(small.get("status") or {}) or (known is not None and uid_of(known) != uid):
            self._remains.forget(key)
        return self._concerned(key, known, small, own)

    def note_gone(self, manifest: Mapping[str, Any]) -> Keys:
        """Note that an object is no longer shown by its watch: deleted, or without our label, which look the same."""
        key, uid = key_of(manifest), uid_of(manifest)
        self._remember_gone(uid, version(manifest))
        told = self._keep(manifest)  # it tells how the object was last, which may be newer than what is known
        known = self._objects.get(key)
        if known is None or uid_of(known) != uid or version(known) > version(manifest):
            return told  # a list may have shown before that it is gone, and not how it ended
        return self.forget(key)

    def note_list(self, kind: Kind, namespace: str | None, listed: Iterable[Mapping[str, Any]], list_version: int) -> tuple[Keys, int]:
        """Bring everything of a kind (in a namespace, or all) in line with a list: whom that concerns, and in how many objects."""
        concerned: set[Key] = set()
        shown: set[Key] = set()
        repaired = 0
        for manifest in listed:
            key = key_of(manifest)
            shown.add(key)
            before = self._objects.get(key)
            concerned |= self.note(manifest)
            repaired += self._objects.get(key) is not before
        for key in self._of_kind.get(kind.kind, set()) - shown:
            if namespace is not None and key.namespace != namespace:
                continue
            known = self._objects[key]
            if version(known) <= list_version:  # a younger one was made after the list
                self._remember_gone(uid_of(known), list_version)
                self._keep(known)
                concerned |= self.forget(key)
                repaired += 1
        return frozenset(concerned), repaired

    def forget(self, key: Key) -> Keys:
        """Drop what is known of an object; returns whom that concerns."""
        known = self._objects.pop(key, None)
        if known is None:
            return NOBODY
        self._of_kind[key.kind].discard(key)
        self._remains.forget(key)
        self._unlink(key, known)
        return self._concerned(key, known, None, own=False)

    # --- what is asked ---

    def get(self, key: Key) -> Manifest | None:
        return self._objects.get(key)

    def children(self, key: Key) -> tuple[Manifest, ...]:
        """What names the resource as its owner, by label or by reference; in a stable order: by kind, then name."""
        return tuple(self._objects[child] for child in sorted(self._children.get(key, ())))

    def remains(self, key: Key) -> tuple[Manifest, ...]:
        """Of a BatchJob that is not over: see `World`."""
        return self._remains.of(key)

    def all(self, kind: Kind) -> list[Manifest]:
        return [self._objects[key] for key in self._of_kind.get(kind.kind, ())]

    # --- inside ---

    def _remember_gone(self, uid: str, until: int) -> None:
        self._gone[uid] = max(self._gone.get(uid, -1), until)

    def _keep(self, gone: Mapping[str, Any]) -> Keys:
        """Remember how it ended; returns the resources for which that is kept."""
        if not has_ended(gone):
            return NOBODY
        told = set()
        for owner in owners(gone):
            known = self._objects.get(owner)
            if owner.kind != kinds.BATCH_JOB.kind or known is None or is_terminal(known.get("status") or {}):
                continue
            self._remains.keep(known, trim(gone))
            told.add(owner)
        return frozenset(told)

    def _concerned(self, key: Key, before: Manifest | None, after: Manifest | None, own: bool) -> Keys:
        if key.kind not in _RESOURCES:
            return frozenset().union(*(owners(one) for one in (before, after) if one is not None))
        found: set[Key] = set()
        if before is None or after is None or _asked(before, own) != _asked(after, own):
            found.add(key)
        if key in self._users and (before is None or after is None or _served(before) != _served(after)):
            found |= self._users[key]
        return frozenset(found)

    def _unlink(self, key: Key, manifest: Manifest) -> None:
        for owner in owners(manifest):
            _discard(self._children, owner, key)
        if (server := _server_of(manifest)) is not None:
            _discard(self._users, server, key)


def owners(child: Mapping[str, Any]) -> Keys:
    """The resources that a child belongs to: by its label, and by its owner reference, which ought to say the same."""
    if child["kind"] in _RESOURCES:
        return NOBODY
    found = set()
    if (labelled := labelled_owner(child)) is not None:
        found.add(labelled)
    owner = controller(child)
    if owner is not None and owner.get("kind") in _RESOURCES:
        found.add(Key(owner["kind"], child["metadata"]["namespace"], owner["name"]))
    return frozenset(found)


def _asked(resource: Manifest, own: bool) -> tuple[Any, ...]:
    """What of a resource its reconcile depends on; the status too, since somebody else may have written it."""
    meta = resource["metadata"]
    return (*(meta.get(name) for name in _ASKED), None if own else resource.get("status"))


def _served(server: Manifest) -> tuple[Any, ...]:
    """What of a server the jobs that use it depend on."""
    found = [{**condition(server, kind), "lastTransitionTime": None} for kind in ("Accepted", "Available")]
    return (uid_of(server), server["metadata"].get("deletionTimestamp"), (server.get("spec") or {}).get("service"), *found)


def _server_of(resource: Mapping[str, Any]) -> Key | None:
    if resource["kind"] != kinds.BATCH_JOB.kind:
        return None
    name = ((resource.get("spec") or {}).get("serverRef") or {}).get("name")
    return Key(kinds.INFERENCE_SERVER.kind, resource["metadata"]["namespace"], name) if name else None


def _discard(index: dict[Key, set[Key]], key: Key, member: Key) -> None:
    members = index.get(key)
    if members is not None:
        members.discard(member)
        if not members:
            del index[key]

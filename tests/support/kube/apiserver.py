"""An API server in memory: one counter of versions, server-side apply, preconditions, defaults, fixed fields, garbage collection.

Objects are never changed in place: each write makes new ones, so that answers, watches and histories share them. A write happens at
once, or is refused with the ApiError that the real server would cause. The simulation calls it in virtual time (`calls.py` there says
when), `http.py` serves it over HTTP.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Protocol

from banyan_operator.cluster.client import ApiError
from banyan_operator.kube import kinds
from banyan_operator.kube.kinds import Kind, Manifest
from banyan_operator.kube.objects import Key, controller_uid, is_true, key_of, uid_of
from banyan_operator.times import stamp
from tests.support.kube.defaults import defaulted
from tests.support.kube.fields import applied, still_owned

EPOCH: Final = 1_700_000_000.0
GENERATIONS: Final = frozenset(
    {"InferenceServer", "BatchJob", "Deployment", "ReplicaSet", "Job", "PodDisruptionBudget", "NetworkPolicy", "Ingress"}
)
OF_THE_SERVER: Final = ("namespace", "uid", "creationTimestamp", "generation", "resourceVersion", "deletionTimestamp")
NOT_SPEC: Final = ("metadata", "status", "apiVersion", "kind")
MUTABLE_OF_A_JOB: Final = ("suspend", "parallelism", "activeDeadlineSeconds", "backoffLimit", "ttlSecondsAfterFinished", "maxFailedIndexes")

Change = Callable[[Manifest | None, Manifest | None], None]
"""Told of each commit: the object before (None: created) and after (None: deleted; the version of its end is `Server.version`)."""


class Loop(Protocol):
    """What tells the time and runs the garbage collector later."""

    @property
    def now(self) -> float:
        """Seconds since EPOCH."""

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any) -> Any: ...


def refusal(status: int, reason: str, message: str, retry_after_s: float | None = None) -> ApiError:
    return ApiError(status, reason, message, (), retry_after_s)


class Server:
    """All objects of a cluster."""

    def __init__(self, loop: Loop, rng: random.Random) -> None:
        self.loop, self.rng = loop, rng
        self.version = 100
        self.objects: dict[Key, Manifest] = {}
        self.by_kind: dict[str, dict[Key, Manifest]] = {kind.kind: {} for kind in kinds.TABLE}
        self.uids: set[str] = set()
        self.changes: list[Change] = []
        self._owned: dict[str, Manifest] = {}  # uid → what the operator's apply owns of it
        self._dependents: dict[str, dict[Key, None]] = {}
        self._made = 0

    def now(self) -> float:
        return EPOCH + self.loop.now

    # --- reading ---

    def get(self, key: Key) -> Manifest | None:
        return self.objects.get(key)

    def of(self, kind: Kind) -> list[Manifest]:
        return list(self.by_kind[kind.kind].values())

    def controlled(self, kind: Kind, uid: str) -> list[Manifest]:
        """What is managed by the object with this uid."""
        found = [self.objects[key] for key in self._dependents.get(uid, ()) if key.kind == kind.kind]
        return [one for one in found if controller_uid(one) == uid]

    # --- writing ---

    def create(self, manifest: Manifest) -> Manifest:
        key = key_of(manifest)
        if key in self.objects:
            raise refusal(409, "AlreadyExists", f'{key.kind} "{key.name}" already exists')
        self._made += 1
        meta = {
            "uid": f"{self._made:08x}-0000-4000-8000-{self.rng.getrandbits(48):012x}",
            "creationTimestamp": stamp(self.now()),
            **manifest["metadata"],  # a test may say what these are
            "namespace": key.namespace,
        }
        if key.kind in GENERATIONS:
            meta["generation"] = 1
        return self._commit(None, defaulted({**manifest, "metadata": meta}))

    def apply(self, manifest: Manifest) -> Manifest:
        """Server-side apply with force, by the operator."""
        key, uid = key_of(manifest), uid_of(manifest)
        live = self.objects.get(key)
        if live is None:
            if uid:
                raise refusal(409, "Conflict", f'uid mismatch: {key.kind} "{key.name}" with uid {uid} does not exist')
            made = self.create(manifest)
            self._owned[uid_of(made)] = manifest
            return made
        if uid and uid != uid_of(live):  # servers of different versions say it differently
            if self.rng.random() < 0.5:
                raise refusal(409, "Conflict", f"Precondition failed: UID in precondition: {uid}, UID in object meta: {uid_of(live)}")
            raise ApiError(
                422, "Invalid", f'{key.kind} "{key.name}" is invalid', [f"metadata.uid: Invalid value: {uid}: field is immutable"]
            )
        self._owned.setdefault(uid_of(live), {})
        wanted = {**manifest, "metadata": {name: value for name, value in manifest["metadata"].items() if name != "uid"}}
        changed = applied(live, self._owned[uid_of(live)], wanted)
        result = self._update(live, defaulted(changed))
        self._owned[uid_of(live)] = wanted
        return result

    def edit(self, key: Key, change: Callable[[Manifest], Manifest]) -> Manifest | None:
        """An update by anybody else; None where there is no such object."""
        live = self.objects.get(key)
        if live is None:
            return None
        result = self._update(live, defaulted(change(live)))
        if result is not live and uid_of(live) in self._owned:
            self._owned[uid_of(live)] = still_owned(self._owned[uid_of(live)], result)
        return result

    def put(self, manifest: Manifest) -> Manifest:
        """The whole object is written by anybody else, its status too; what the server itself decides on stays."""
        key = key_of(manifest)
        if key not in self.objects:
            return self.create(manifest)

        def replaced(live: Manifest) -> Manifest:
            ours = {name: live["metadata"][name] for name in OF_THE_SERVER if name in live["metadata"]}
            return {**manifest, "metadata": {**manifest["metadata"], **ours}}

        return self.edit(key, replaced)  # type: ignore[return-value]

    def set_status(self, key: Key, status: Manifest) -> Manifest | None:
        """By a controller of Kubernetes."""
        live = self.objects.get(key)
        if live is None or live.get("status") == status:
            return live
        return self._commit(live, {**live, "status": status})

    def patch_status(self, key: Key, patch: Mapping[str, Any], version: str) -> Manifest:
        live = self.objects.get(key)
        if live is None:
            raise refusal(404, "NotFound", f'{key.kind} "{key.name}" not found')
        if version and version != live["metadata"]["resourceVersion"]:
            raise refusal(409, "Conflict", f'Operation cannot be fulfilled on {key.kind} "{key.name}": the object has been modified')
        status = merged(live.get("status") or {}, patch)
        return live if status == live.get("status") else self._commit(live, {**live, "status": status})

    def delete(self, key: Key, uid: str | None = None, *, foreground: bool = False) -> None:
        live = self.objects.get(key)
        if live is None:
            raise refusal(404, "NotFound", f'{key.kind} "{key.name}" not found')
        if uid and uid != uid_of(live):
            raise refusal(409, "Conflict", f"Precondition failed: UID in precondition: {uid}, UID in object meta: {uid_of(live)}")
        if live["metadata"].get("deletionTimestamp"):
            return
        waits = key.kind == "Pod" and bool((live.get("spec") or {}).get("nodeName")) and live["status"]["phase"] in ("Pending", "Running")
        if waits or (foreground and self._dependents.get(uid_of(live))):
            grace = live["spec"].get("terminationGracePeriodSeconds", 30) if waits else 0
            meta = {**live["metadata"], "deletionTimestamp": stamp(self.now() + grace)}
            if not waits:
                meta["finalizers"] = ["foregroundDeletion"]
            self._commit(live, {**live, "metadata": meta})
            if not waits:
                self._collect(uid_of(live))
            return
        self.remove(key)

    def remove(self, key: Key) -> None:
        """The end of an object: its watches show the state before it, with the version of its end."""
        live = self.objects.pop(key, None)
        if live is None:
            return
        del self.by_kind[key.kind][key]
        uid = uid_of(live)
        self.uids.discard(uid)
        self._owned.pop(uid, None)
        self._unlink(key, live)
        self.version += 1
        for change in self.changes:
            change(live, None)
        self._collect(uid)
        for owner in live["metadata"].get("ownerReferences") or ():
            self._finish(owner["uid"])

    # --- inside ---

    def _update(self, live: Manifest, changed: Manifest) -> Manifest:
        _check_fixed(live, changed)
        if changed == live:
            return live
        kind = live["kind"]
        if kind in GENERATIONS and any(live.get(name) != changed.get(name) for name in {*live, *changed} if name not in NOT_SPEC):
            meta = {**changed["metadata"], "generation": live["metadata"]["generation"] + 1}
            changed = {**changed, "metadata": meta}
        return self._commit(live, changed)

    def _commit(self, before: Manifest | None, after: Manifest) -> Manifest:
        self.version += 1
        after = {**after, "metadata": {**after["metadata"], "resourceVersion": str(self.version)}}
        key = key_of(after)
        if before is not None:
            self._unlink(key, before)
        self.objects[key] = after
        self.by_kind[key.kind][key] = after
        self.uids.add(uid_of(after))
        for owner in after["metadata"].get("ownerReferences") or ():
            self._dependents.setdefault(owner["uid"], {})[key] = None
            if owner["uid"] not in self.uids:
                self._collect(owner["uid"])
        for change in self.changes:
            change(before, after)
        return after

    def _unlink(self, key: Key, manifest: Manifest) -> None:
        for owner in manifest["metadata"].get("ownerReferences") or ():
            of = self._dependents.get(owner["uid"])
            if of is not None:
                of.pop(key, None)

    def _collect(self, uid: str) -> None:
        """Some time later the garbage collector deletes what belonged to it."""
        if self._dependents.get(uid):
            self.loop.call_later(self.rng.choice((0.01, 0.3, 2.0, 8.0)) * self.rng.random(), self._collected, uid)

    def _collected(self, uid: str) -> None:
        for key in list(self._dependents.get(uid, ())):
            live = self.objects.get(key)
            if live is None:
                continue
            owners = [owner["uid"] for owner in live["metadata"]["ownerReferences"]]
            if all(owner not in self.uids or self._leaves(owner) for owner in owners) and not live["metadata"].get("deletionTimestamp"):
                self.delete(key)
        self._finish(uid)

    def _leaves(self, uid: str) -> bool:
        return any(uid_of(one) == uid and one["metadata"].get("finalizers") for one in self._resources())

    def _finish(self, uid: str) -> None:
        """Of a resource that is deleted in the foreground nothing is left: it goes."""
        for one in self._resources():
            if uid_of(one) == uid and one["metadata"].get("finalizers") and not self._dependents.get(uid):
                self.remove(key_of(one))

    def _resources(self) -> Iterable[Manifest]:
        return [one for kind in (*kinds.RESOURCES, kinds.JOB) for one in self.by_kind[kind.kind].values()]


def merged(base: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, Mapping):
        return patch
    result = dict(base) if isinstance(base, Mapping) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merged(result.get(name), value)
    return result


def _check_fixed(live: Manifest, changed: Manifest) -> None:
    """What cannot change once it is there."""
    kind, before, after = live["kind"], live.get("spec") or {}, changed.get("spec") or {}
    fixed: list[str] = []
    if kind == "Job":
        fixed = [name for name in {**before, **after} if name not in MUTABLE_OF_A_JOB]
        over = any(is_true(live, one) for one in ("Complete", "Failed"))
        if not over and before.get("completions") == before.get("parallelism") and after.get("completions") == after.get("parallelism"):
            fixed = [name for name in fixed if name != "completions"]  # an elastic Indexed Job's, in one write with its parallelism
    elif kind == "Deployment":
        fixed = ["selector"]
    elif kind == "Service":
        fixed = ["clusterIP"]
    elif kind == "PersistentVolumeClaim":
        fixed = [name for name in {**before, **after} if name != "resources"]
    elif kind == "ControllerRevision" and live.get("data") != changed.get("data"):
        raise refusal(422, "Invalid", f'ControllerRevision "{live["metadata"]["name"]}" is invalid: data: field is immutable')
    for name in fixed:
        if before.get(name) != after.get(name):
            raise refusal(422, "Invalid", f'{kind} "{live["metadata"]["name"]}" is invalid: spec.{name}: field is immutable')

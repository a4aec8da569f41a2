"""Writes what a reconcile has to tell: the status, then the Events of what it newly tells."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from banyan_operator.cluster.client import Api, ApiError
from banyan_operator.cluster.metrics import Metrics
from banyan_operator.cluster.recorder import Recorder
from banyan_operator.cluster.store import Store
from banyan_operator.kube import kinds
from banyan_operator.kube.kinds import Manifest
from banyan_operator.kube.objects import Key, key_of, uid_of
from banyan_operator.observed.batch import TERMINAL
from banyan_operator.plan import Report


class Reporter:
    """The only writer of our resources' status."""

    def __init__(self, store: Store, api: Api, recorder: Recorder, metrics: Metrics, concerns: Callable[[frozenset[Key]], None]) -> None:
        self._store, self._api, self._recorder, self._metrics, self._concerns = store, api, recorder, metrics, concerns

    async def write(self, resource: Manifest, report: Report) -> None:
        """Raises ApiError when the status could not be written; its Events are posted after it, so that none is told twice."""
        if await self._status(resource, report.status):
            for event in report.events:
                await self._recorder.post(resource, event)

    async def _status(self, resource: Manifest, status: Mapping[str, Any] | None) -> bool:
        """One merge patch of what differs, if anything does. False: the resource is gone, or another one has its name."""
        old = resource.get("status") or {}
        patch = {} if status is None else merge_patch(old, status)
        if not patch or status is None:
            return True
        kind, meta = kinds.of(resource), resource["metadata"]
        try:
            written = await self._api.patch_status(kind, meta["namespace"], meta["name"], patch, meta["resourceVersion"])
        except ApiError as error:
            self._metrics.status_errors.labels(resource["kind"], str(error.status)).inc()
            if error.status == 404:
                self._forget(resource)
                return False
            if error.status == 409:  # changed, or made anew, since we read it: the watch is behind
                await self._read_again(resource)
            raise
        self._concerns(self._store.note(written, own=True))
        if status.get("phase") in TERMINAL and old.get("phase") not in TERMINAL and resource["kind"] == kinds.BATCH_JOB.kind:
            seconds = _between(status.get("startTime"), status.get("completionTime"))
            if seconds is not None:
                self._metrics.job_seconds.labels(str(status["phase"]).lower()).observe(seconds)
        return True

    async def _read_again(self, resource: Manifest) -> None:
        meta = resource["metadata"]
        live = await self._api.get(kinds.of(resource), meta["namespace"], meta["name"])
        if live is None:
            self._forget(resource)
        else:
            self._concerns(self._store.note(live))

    def _forget(self, resource: Manifest) -> None:
        """It is gone. Another of its name may have been made and seen while the answer was on its way: that one stays."""
        known = self._store.get(key_of(resource))
        if known is not None and uid_of(known) == uid_of(resource):
            self._concerns(self._store.forget(key_of(resource)))


def _between(start: Any, end: Any) -> float | None:
    try:
        return (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds()
    except (TypeError, ValueError):
        return None


def merge_patch(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The smallest JSON merge patch (RFC 7386) that makes `new` of `old`: a field that is gone becomes null, and a list is replaced as a
    whole. Empty if nothing differs."""
    patch: dict[str, Any] = {name: None for name in old if name not in new}
    for name, value in new.items():
        before = old.get(name)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            inner = merge_patch(before, value)
            if inner:
                patch[name] = inner
        elif name not in old or before != value:
            patch[name] = value
    return patch

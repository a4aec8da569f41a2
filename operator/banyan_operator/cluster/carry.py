"""Carries one Plan out: applies, deletes, the status, Events. Every part may fail and be repeated by the next reconcile."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from banyan_operator.cluster import kinds
from banyan_operator.cluster.client import Api, ApiError
from banyan_operator.cluster.drift import LIMIT, WINDOW_S, Repairs
from banyan_operator.cluster.events import Recorder
from banyan_operator.cluster.merge import merge_patch
from banyan_operator.cluster.metrics import Metrics
from banyan_operator.cluster.store import Store
from banyan_operator.observed.batch import TERMINAL
from banyan_operator.plan import Event, Manifest, Plan, Ref

log = logging.getLogger(__name__)


@dataclass
class Outcome:
    """What did not work. `refused` is what the API server will not take as it is."""

    refused: dict[Ref, str] = field(default_factory=dict)
    failed: list[ApiError] = field(default_factory=list)
    wait_s: float | None = None  # an object is left alone for so long, because another controller fights for it


class Carrier:
    """Writes to the cluster, and notes each answer in the store at once, so that the next reconcile sees it."""

    def __init__(self, store: Store, api: Api, recorder: Recorder, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._api, self._recorder, self._metrics, self._clock = store, api, recorder, metrics, clock
        self._repairs = Repairs()

    async def objects(self, resource: Manifest, plan: Plan, *, repairing: bool) -> Outcome:
        """The applies, in order, then the deletes. `repairing`: the resource has not changed since everything was applied."""
        outcome = Outcome()
        for manifest in plan.apply:
            place = (manifest["kind"], manifest["metadata"]["namespace"], manifest["metadata"]["name"])
            # A Job's turn comes long after its resource's last change; that is no drift.
            drifted = repairing and manifest["kind"] != kinds.JOB.kind
            if drifted and (wait := self._repairs.wait_s(place, self._clock())):
                outcome.wait_s = min(wait, outcome.wait_s or wait)
                await self._drift_loop(resource, manifest)
                continue
            try:
                self._store.put(await self._api.apply(manifest))
            except ApiError as error:
                self._note(outcome, manifest, error)
                continue
            if drifted:
                self._repairs.note(place, self._clock())
                self._metrics.drift.labels(manifest["kind"]).inc()
                log.info("put back %s %s/%s", *place)
            else:
                log.info("applied %s %s/%s", *place)
        for ref in plan.delete:
            kind = kinds.find(ref.api_version, ref.kind)
            namespace = resource["metadata"]["namespace"]
            live = self._store.get(ref.kind, namespace, ref.name)
            try:
                await self._api.delete(kind, namespace, ref.name, (live or {}).get("metadata", {}).get("uid"))
                log.info("deleted %s %s/%s", ref.kind, namespace, ref.name)
            except ApiError as error:
                outcome.failed.append(error)
        return outcome

    async def status(self, resource: Manifest, status: Mapping[str, Any] | None) -> None:
        """One merge patch of what differs, if anything does."""
        old = resource.get("status") or {}
        patch = {} if status is None else merge_patch(old, status)
        if not patch or status is None:
            return
        meta = resource["metadata"]
        try:
            written = await self._api.patch_status(kinds.of(resource), meta["namespace"], meta["name"], patch)
        except ApiError as error:
            self._metrics.status_errors.labels(resource["kind"], str(error.status)).inc()
            if error.status == 404:
                return  # deleted meanwhile
            raise
        self._store.put(written)
        if status.get("phase") in TERMINAL and old.get("phase") not in TERMINAL and resource["kind"] == kinds.BATCH_JOB.kind:
            seconds = _between(status.get("startTime"), status.get("completionTime"))
            if seconds is not None:
                self._metrics.job_seconds.labels(str(status["phase"]).lower()).observe(seconds)

    async def events(self, resource: Manifest, events: Iterable[Event]) -> None:
        for event in events:
            await self._recorder.post(resource, event)

    def _note(self, outcome: Outcome, manifest: Manifest, error: ApiError) -> None:
        what = f"{manifest['kind']} {manifest['metadata']['namespace']}/{manifest['metadata']['name']}"
        outcome.failed.append(error)
        if error.refused:
            outcome.refused[Ref(manifest["apiVersion"], manifest["kind"], manifest["metadata"]["name"])] = error.message
            log.warning("the API server refuses %s: %s", what, error)
        else:
            log.warning("%s could not be applied: %s", what, error)

    async def _drift_loop(self, resource: Manifest, manifest: Manifest) -> None:
        message = (
            f"{manifest['kind']} {manifest['metadata']['name']} was put back {LIMIT} times in {WINDOW_S / 60:.0f} minutes: another "
            "controller or person changes it. Find out who by 'kubectl get ... --show-managed-fields' and stop it; until then "
            "it is put back once a minute."
        )
        await self._recorder.post(resource, Event("Warning", "DriftLoop", message))


def _between(start: Any, end: Any) -> float | None:
    try:
        return (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds()
    except (TypeError, ValueError):
        return None

"""The operator's metric series. Counters are counted where things happen; what depends on resources is read from the store at
scrape time, so that a resource's series end with it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Final, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from banyan_operator.api.status import BatchPhase
from banyan_operator.cluster.queue import WorkQueue
from banyan_operator.cluster.store import Store
from banyan_operator.kube import kinds
from banyan_operator.observed.batch import TERMINAL
from banyan_operator.plan import Manifest

_SECONDS: Final = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.25, 1.5, 1.75, 2),
    *(2.5, 3, 3.5, 4, 4.5, 5, 6, 7, 8, 9, 10, 15, 20, 25, 30, 40, 50, 60),
)  # controller-runtime's own buckets
_QUEUE_SECONDS: Final = (0.001, 0.01, 0.1, 1, 10, 100, 1000)
_JOB_SECONDS: Final = (10, 30, 60, 300, 900, 1800, 3600, 7200, 14400, 43200, 86400, 172800)
PHASES: Final = get_args(BatchPhase)


class Metrics:
    """Every series but those of the store. One instance a process."""

    def __init__(self, operator_version: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # twice the series, and nobody reads them
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        controller = ["controller"]
        self.reconciles = Counter("controller_runtime_reconcile", "Reconciles by result.", ["controller", "result"], registry=registry)
        self.errors = Counter("controller_runtime_reconcile_errors", "Reconciles that failed.", controller, registry=registry)
        self.terminal_errors = Counter(
            "controller_runtime_terminal_reconcile_errors", "Writes that the API server refused for good.", controller, registry=registry
        )
        self.panics = Counter(
            "controller_runtime_reconcile_panics", "Reconciles that raised what nobody expected.", controller, registry=registry
        )
        self.seconds = Histogram(
            "controller_runtime_reconcile_time_seconds", "Time of a reconcile.", controller, buckets=_SECONDS, registry=registry
        )
        self.active = Gauge("controller_runtime_active_workers", "Reconciles at work.", controller, registry=registry)
        self.most = Gauge("controller_runtime_max_concurrent_reconciles", "Workers.", controller, registry=registry)
        self.waited = Histogram(
            "workqueue_queue_duration_seconds", "Time a key waited.", ["name", "controller"], buckets=_QUEUE_SECONDS, registry=registry
        )
        self.worked = Histogram(
            "workqueue_work_duration_seconds",
            "Time a key was worked on.",
            ["name", "controller"],
            buckets=_QUEUE_SECONDS,
            registry=registry,
        )
        self.requests = Counter("rest_client_requests", "Calls of the API server.", ["code", "method", "host"], registry=registry)
        self.request_seconds = Histogram(
            "rest_client_request_duration_seconds", "Time of a call of the API server.", ["verb", "host"], registry=registry
        )
        info = Gauge("banyan_operator_build_info", "Always 1.", ["version", "kopf", "kubernetes"], registry=registry)
        info.labels(operator_version, version("kopf"), version("kubernetes")).set(1)
        self.absent = Gauge("banyan_operator_absent_namespaces", "Namespaces that can not be looked after just now.", registry=registry)
        self.leader = Gauge("banyan_operator_leader", "1 where this process leads.", registry=registry)
        self.last_event = Gauge(
            "banyan_operator_watch_last_event_timestamp_seconds",
            "When a kind was last heard of, by watch or list.",
            ["kind"],
            registry=registry,
        )
        self.status_errors = Counter(
            "banyan_operator_status_patch_errors", "Status writes that failed.", ["kind", "code"], registry=registry
        )
        self.drift = Counter("banyan_operator_drift", "Objects put back after somebody else changed them.", ["kind"], registry=registry)
        self.repairs = Counter(
            "banyan_operator_resync_repairs", "Objects that a list showed and the watches had missed.", ["kind"], registry=registry
        )
        self.job_seconds = Histogram(
            "banyan_batchjob_duration_seconds", "From start to end of a BatchJob.", ["result"], buckets=_JOB_SECONDS, registry=registry
        )
        for phase in TERMINAL:
            self.job_seconds.labels(phase.lower())
        for kind in kinds.RESOURCES:
            name = kind.kind.lower()
            for result in ("success", "error", "requeue_after"):
                self.reconciles.labels(name, result)
            for counter in (self.errors, self.terminal_errors, self.panics, self.seconds, self.active):
                counter.labels(name)

    def observe_call(self, host: str, method: str, status: int, seconds: float) -> None:
        """Count one call of the API server; status 0 is one that got no answer."""
        self.requests.labels(str(status) if status else "<error>", method, host).inc()
        self.request_seconds.labels(method, host).observe(seconds)

    @contextmanager
    def working(self, kind: str, waited_s: float) -> Iterator[None]:
        """Around the work on one key of a kind of resource."""
        name, began = kind.lower(), time.monotonic()
        self.waited.labels(name, name).observe(waited_s)
        self.active.labels(name).inc()
        try:
            yield
        finally:
            seconds = time.monotonic() - began
            self.active.labels(name).dec()
            self.seconds.labels(name).observe(seconds)
            self.worked.labels(name, name).observe(seconds)

    def succeeded(self, kind: str, *, again: bool) -> None:
        self.reconciles.labels(kind.lower(), "requeue_after" if again else "success").inc()

    def failed(self, kind: str, *, refused: bool = False, bug: bool = False) -> None:
        name = kind.lower()
        self.reconciles.labels(name, "error").inc()
        (self.panics if bug else self.errors).labels(name).inc()
        if refused:
            self.terminal_errors.labels(name).inc()

    def refused(self, kind: str, writes: int) -> None:
        """So many writes of one reconcile were refused for good."""
        self.terminal_errors.labels(kind.lower()).inc(writes)

    def render(self) -> bytes:
        return generate_latest(self.registry)


class QueueCollector(Collector):
    """The queue's own numbers, read when asked."""

    def __init__(self, queue: WorkQueue) -> None:
        self._queue = queue

    def collect(self) -> Iterator[Metric]:
        backlog, now = self._queue.backlog, time.monotonic()
        labels = ["name", "controller"]
        ages = {
            kind.kind.lower(): [now - since for key, since in backlog.working.items() if key.kind == kind.kind] for kind in kinds.RESOURCES
        }
        depth = GaugeMetricFamily("workqueue_depth", "Keys that wait.", labels=labels)
        unfinished = GaugeMetricFamily("workqueue_unfinished_work_seconds", "Sum of the ages of work in progress.", labels=labels)
        longest = GaugeMetricFamily("workqueue_longest_running_processor_seconds", "Age of the oldest work in progress.", labels=labels)
        for name, running in ages.items():
            depth.add_metric([name, name], sum(key.kind.lower() == name for key in backlog.ready))
            unfinished.add_metric([name, name], sum(running))
            longest.add_metric([name, name], max(running, default=0.0))
        yield from (depth, unfinished, longest)
        for metric, value in (("workqueue_adds", self._queue.adds), ("workqueue_retries", self._queue.retries)):
            family = Metric(metric, "Keys added." if metric.endswith("adds") else "Keys added again after a failure.", "counter")
            family.add_sample(f"{metric}_total", {}, value)
            yield family


class StoreCollector(Collector):
    """The resources' numbers, read from the store when asked: a deleted resource has none."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def collect(self) -> Iterator[Metric]:
        servers, jobs = self._store.all(kinds.INFERENCE_SERVER), self._store.all(kinds.BATCH_JOB)
        yield self._conditions(servers, jobs)
        named = ["namespace", "name"]
        replicas = GaugeMetricFamily("banyan_inferenceserver_replicas", "Replicas by state.", labels=[*named, "state"])
        condition = GaugeMetricFamily(
            "banyan_inferenceserver_status_condition", "1 for the status that a condition has.", labels=[*named, "condition", "status"]
        )
        for server in servers:
            who, status = _who(server), server.get("status") or {}
            for state, field in (
                ("desired", "desiredReplicas"),
                ("current", "replicas"),
                ("ready", "readyReplicas"),
                ("updated", "updatedReplicas"),
            ):
                replicas.add_metric([*who, state], status.get(field) or 0)
            for entry in status.get("conditions") or ():
                for value in ("True", "False", "Unknown"):
                    condition.add_metric([*who, entry["type"], value], entry["status"] == value)
        yield from (replicas, condition)
        lines = GaugeMetricFamily("banyan_batchjob_lines", "Lines of a BatchJob by state.", labels=[*named, "state"])
        phases = GaugeMetricFamily("banyan_batchjob_phase", "1 for the phase that a BatchJob is in.", labels=[*named, "phase"])
        for job in jobs:
            who, status = _who(job), job.get("status") or {}
            counts = status.get("requestCounts") or {}
            for state in ("total", "completed", "failed"):
                if not counts or state in counts:  # else that was never heard, and is not 0
                    lines.add_metric([*who, state], counts.get(state) or 0)
            for phase in PHASES:
                phases.add_metric([*who, phase], status.get("phase") == phase)
        yield from (lines, phases)

    def _conditions(self, servers: list[Manifest], jobs: list[Manifest]) -> Metric:
        family = GaugeMetricFamily(
            "banyan_operator_resources", "Resources by condition and its status.", labels=["kind", "condition", "status"]
        )
        counts: dict[tuple[str, str, str], int] = {}
        for resource in (*servers, *jobs):
            for entry in (resource.get("status") or {}).get("conditions") or ():
                place = (resource["kind"], entry["type"], entry["status"])
                counts[place] = counts.get(place, 0) + 1
        for place, count in sorted(counts.items()):
            family.add_metric(list(place), count)
        return family


def _who(resource: Manifest) -> list[str]:
    return [resource["metadata"]["namespace"], resource["metadata"]["name"]]

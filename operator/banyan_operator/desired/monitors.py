"""PodMonitors and ServiceMonitors: how a Prometheus of the Prometheus operator finds our metrics."""

from __future__ import annotations

from collections.abc import Iterator

from banyan_operator.api import InferenceServer, Resource
from banyan_operator.api.traffic import Monitor
from banyan_operator.desired.metadata import HEADLESS, child, pod_selector
from banyan_operator.desired.names import derived
from banyan_operator.kube.addresses import PROGRESS_PORT_NAME, SERVER_PORT_NAME
from banyan_operator.kube.kinds import POD_MONITOR, SERVICE_MONITOR, Kind
from banyan_operator.kube.objects import Ref
from banyan_operator.plan import Manifest, Settings


def wanted_optional(resource: Resource) -> tuple[Ref, ...]:
    """The objects that `resource` wants of kinds whose API a cluster may not have."""
    return tuple(Ref.to(kind, name) for kind, name, _ in _wanted(resource))


def monitors(resource: Resource, settings: Settings, absent: frozenset[str]) -> list[Manifest]:
    """The monitors that `resource` asks for, without those of kinds in `absent`."""
    return [_monitor(resource, settings, kind, name, how) for kind, name, how in _wanted(resource) if kind.kind not in absent]


def _wanted(resource: Resource) -> Iterator[tuple[Kind, str, Monitor]]:
    metrics = resource.spec.metrics
    name = resource.metadata.name if isinstance(resource, InferenceServer) else derived(resource.metadata.name, "batch")
    if metrics.pod_monitor.enabled:
        yield POD_MONITOR, name, metrics.pod_monitor
    if isinstance(resource, InferenceServer) and resource.spec.metrics.service_monitor.enabled:
        yield SERVICE_MONITOR, name, resource.spec.metrics.service_monitor


def _monitor(resource: Resource, settings: Settings, kind: Kind, name: str, how: Monitor) -> Manifest:
    port = SERVER_PORT_NAME if isinstance(resource, InferenceServer) else PROGRESS_PORT_NAME
    chosen: Manifest = {"matchLabels": pod_selector(resource)}
    points = "podMetricsEndpoints"
    if kind is SERVICE_MONITOR:
        points = "endpoints"
        chosen["matchExpressions"] = [{"key": HEADLESS, "operator": "DoesNotExist"}]  # or every pod is scraped twice
    spec: Manifest = {
        "selector": chosen,
        points: [{"port": port, "path": "/metrics", "interval": how.interval, "relabelings": [_named(resource)]}],
    }
    return child(
        resource,
        settings,
        api_version=kind.api_version,
        kind=kind.kind,
        name=name,
        extra_labels=dict(how.additional_labels),
        body={"spec": spec},
    )


def _named(resource: Resource) -> Manifest:
    """Whose the series are, by the label that the chart's dashboards and rules know it by."""
    label = "inferenceserver" if isinstance(resource, InferenceServer) else "batchjob"
    return {"action": "replace", "targetLabel": label, "replacement": resource.metadata.name}

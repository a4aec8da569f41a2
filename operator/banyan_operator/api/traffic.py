"""How requests reach a server: Service, Ingress, network policy, API keys, and the metrics side."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from banyan_operator.api.base import Annotations, Labels, ListType, Model, ObjectName, PortNumber, RawObject
from banyan_operator.api.parts import ApiKeysRef

HostName = Annotated[
    str, Field(pattern=r"^(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$", min_length=1, max_length=253)
]
UrlPath = Annotated[str, Field(pattern="^/", max_length=256)]


class Auth(Model):
    api_keys_secret_ref: ApiKeysRef | None = Field(
        default=None,
        description="Secret whose key holds one API key per line, with a name or without (`name: key`); re-read when it changes, without "
        "restart.",
    )


class Service(Model):
    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = Field(default="ClusterIP", description="Service type.")
    port: PortNumber = Field(default=80, description="Port of the Service.")
    annotations: Annotations = Field(default={}, description="Service annotations.")
    labels: Labels = Field(default={}, description="Service labels.")


class Ingress(Model):
    class_name: Annotated[str, Field(max_length=253)] | None = Field(
        default=None, description="IngressClass. Default: the cluster's default class."
    )
    hosts: Annotated[tuple[HostName, ...], Field(min_length=1, max_length=16), ListType("set")] = Field(
        description="Host names that lead to the server."
    )
    path: UrlPath = Field(default="/", description="Prefix of the paths that lead to the server.")
    tls_secret_name: ObjectName | None = Field(default=None, description="TLS Secret for all hosts.")
    annotations: Annotations = Field(default={}, description="Ingress annotations.")


class NetworkPolicy(Model):
    enabled: bool = Field(default=False, description="Let only the traffic through that is named here, and what the resource itself needs.")
    from_: Annotated[tuple[RawObject, ...], Field(max_length=16), ListType("atomic")] = Field(
        default=(),
        description="NetworkPolicyPeer items allowed to reach the pods' port, an ingress controller's among them. Empty: same namespace.",
    )
    metrics_from: Annotated[tuple[RawObject, ...], Field(max_length=16), ListType("atomic")] = Field(
        default=(), description="NetworkPolicyPeer items of Prometheus, beside those in from."
    )
    egress: Annotated[tuple[RawObject, ...], Field(max_length=16), ListType("atomic")] = Field(
        default=(),
        description="NetworkPolicyEgressRule items beside DNS, storage and where the model comes from: proxies, mirrors on other ports.",
    )


class Monitor(Model):
    """A PodMonitor or ServiceMonitor of the Prometheus operator."""

    enabled: bool = Field(default=False, description="Make one.")
    interval: Annotated[str, Field(pattern=r"^[1-9][0-9]{0,4}(ms|s|m)$", min_length=2, max_length=8)] = Field(
        default="15s", description="How often it is scraped."
    )
    additional_labels: Labels = Field(default={}, description="Labels by which a Prometheus chooses its monitors.")


class Monitoring(Model):
    """Objects of the Prometheus operator; made where its API exists, also when it appears later."""

    pod_monitor: Monitor = Field(default=Monitor(), description="A PodMonitor: every pod is scraped.")
    service_monitor: Monitor = Field(default=Monitor(), description="A ServiceMonitor: every pod behind the Service is scraped.")


class BatchMonitoring(Model):
    """The same for a BatchJob, which has no Service."""

    pod_monitor: Monitor = Field(default=Monitor(), description="A PodMonitor: every worker is scraped.")

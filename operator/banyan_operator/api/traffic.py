"""How requests reach a server: Service, Ingress, Gateway, network policy, API keys, and the metrics side."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from banyan_operator.api.base import Annotations, Format, Int32, Labels, ListType, Model, ObjectName, PortNumber, RawObject
from banyan_operator.api.parts import ApiKeysRef

HostName = Annotated[
    str, Field(pattern=r"^(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$", min_length=1, max_length=253)
]
UrlPath = Annotated[str, Field(pattern="^/", max_length=256)]


class Auth(Model):
    api_keys_secret_ref: ApiKeysRef | None = Field(
        default=None, description="Secret whose key holds one API key per line; re-read when it changes, without restart."
    )


class Service(Model):
    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    port: PortNumber = 80
    annotations: Annotations = Field(default={}, description="Service annotations.")
    labels: Labels = Field(default={}, description="Service labels.")


class Ingress(Model):
    class_name: Annotated[str, Field(max_length=253)] | None = None
    hosts: Annotated[tuple[HostName, ...], Field(min_length=1, max_length=16), ListType("set")]
    path: UrlPath = "/"
    tls_secret_name: ObjectName | None = Field(default=None, description="TLS Secret for all hosts.")
    annotations: Annotations = Field(default={}, description="Ingress annotations.")


class ParentRef(Model):
    group: Annotated[str, Field(max_length=253)] = "gateway.networking.k8s.io"
    kind: Annotated[str, Field(max_length=63)] = "Gateway"
    namespace: Annotated[str, Field(max_length=63)] | None = None
    name: ObjectName
    section_name: Annotated[str, Field(max_length=253)] | None = None
    port: PortNumber | None = None


class EndpointPicker(Model):
    name: ObjectName = Field(description="Service of the endpoint picker.")
    port: PortNumber = 9002
    failure_mode: Literal["FailOpen", "FailClose"] = "FailOpen"


class InferencePool(Model):
    endpoint_picker: EndpointPicker


class Gateway(Model):
    parent_refs: Annotated[tuple[ParentRef, ...], Field(min_length=1, max_length=8), ListType("atomic")] = Field(description="Gateways.")
    hostnames: Annotated[tuple[Annotated[str, Field(min_length=1, max_length=253)], ...], Field(max_length=16), ListType("set")] = ()
    path: UrlPath = "/"
    request_timeout_seconds: Annotated[int, Format("int32"), Field(ge=0, le=86400)] = Field(
        default=0, description="HTTPRoute request timeout; 0 means none."
    )
    inference_pool: InferencePool | None = Field(default=None, description="Create an InferencePool and route to it.")


class NetworkPolicy(Model):
    enabled: bool = False
    from_: Annotated[tuple[RawObject, ...], Field(max_length=16), ListType("atomic")] = Field(
        default=(), description="NetworkPolicyPeer items allowed to reach the HTTP port. Empty: same namespace."
    )


class Monitoring(Model):
    pod_monitor: bool = Field(default=False, description="Create a PodMonitor when its CRD is present.")
    interval_seconds: Annotated[Int32, Field(ge=5, le=300)] = 15
    labels: Labels = Field(default={}, description="Labels of the PodMonitor.")

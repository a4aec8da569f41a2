"""The kinds of objects that the operator reads and writes: one table, from which watches, differences and RBAC derive.

A new kind is one line here (and what renders it, in `desired`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final
from urllib.parse import quote

Manifest = dict[str, Any]
"""A Kubernetes object. Live ones have metadata.uid, generation and status as the API server (or local mode) gives them."""

GROUP: Final = "serving.banyan.dev"
FIELD_MANAGER: Final = "banyan-operator"
MANAGED_BY_LABEL: Final = "app.kubernetes.io/managed-by"
CHILD_SELECTOR: Final = f"{MANAGED_BY_LABEL}={FIELD_MANAGER}"


class Role(Enum):
    """What an object of a kind is to the operator."""

    RESOURCE = "resource"  # ours; watched whole
    CHILD = "child"  # made, changed and deleted by us; watched by label
    GRANDCHILD = "grandchild"  # made by Kubernetes' controllers for our children; watched by label
    OTHER = "other"  # read or written by name, never watched


@dataclass(frozen=True, slots=True)
class Kind:
    """One namespaced kind of the API."""

    group: str  # "" is the core group
    version: str
    plural: str
    kind: str
    role: Role = Role.OTHER
    optional: bool = False
    """Its API comes with something that a cluster may not have, or have later."""

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        """The URL path of one object, of all in a namespace, or (namespace None) of all in the cluster."""
        parts = ["", "apis", self.group, self.version] if self.group else ["", "api", self.version]
        if namespace is not None:
            parts += ["namespaces", quote(namespace, safe="")]
        parts.append(self.plural)
        if name is not None:
            parts.append(quote(name, safe=""))
        if subresource is not None:
            parts.append(subresource)
        return "/".join(parts)


INFERENCE_SERVER: Final = Kind(GROUP, "v1alpha1", "inferenceservers", "InferenceServer", Role.RESOURCE)
BATCH_JOB: Final = Kind(GROUP, "v1alpha1", "batchjobs", "BatchJob", Role.RESOURCE)

SERVICE_ACCOUNT: Final = Kind("", "v1", "serviceaccounts", "ServiceAccount", Role.CHILD)
CLAIM: Final = Kind("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim", Role.CHILD)
SERVICE: Final = Kind("", "v1", "services", "Service", Role.CHILD)
CONTROLLER_REVISION: Final = Kind("apps", "v1", "controllerrevisions", "ControllerRevision", Role.CHILD)
DEPLOYMENT: Final = Kind("apps", "v1", "deployments", "Deployment", Role.CHILD)
JOB: Final = Kind("batch", "v1", "jobs", "Job", Role.CHILD)
DISRUPTION_BUDGET: Final = Kind("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget", Role.CHILD)
NETWORK_POLICY: Final = Kind("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy", Role.CHILD)
INGRESS: Final = Kind("networking.k8s.io", "v1", "ingresses", "Ingress", Role.CHILD)
POD_MONITOR: Final = Kind("monitoring.coreos.com", "v1", "podmonitors", "PodMonitor", Role.CHILD, optional=True)
SERVICE_MONITOR: Final = Kind("monitoring.coreos.com", "v1", "servicemonitors", "ServiceMonitor", Role.CHILD, optional=True)

REPLICA_SET: Final = Kind("apps", "v1", "replicasets", "ReplicaSet", Role.GRANDCHILD)
POD: Final = Kind("", "v1", "pods", "Pod", Role.GRANDCHILD)
ENDPOINT_SLICE: Final = Kind("discovery.k8s.io", "v1", "endpointslices", "EndpointSlice", Role.GRANDCHILD)

CONFIG_MAP: Final = Kind("", "v1", "configmaps", "ConfigMap")
SECRET: Final = Kind("", "v1", "secrets", "Secret")
EVENT: Final = Kind("", "v1", "events", "Event")
LEASE: Final = Kind("coordination.k8s.io", "v1", "leases", "Lease")

TABLE: Final = (
    INFERENCE_SERVER,
    BATCH_JOB,
    SERVICE_ACCOUNT,
    CLAIM,
    SERVICE,
    CONTROLLER_REVISION,
    DEPLOYMENT,
    JOB,
    DISRUPTION_BUDGET,
    NETWORK_POLICY,
    INGRESS,
    POD_MONITOR,
    SERVICE_MONITOR,
    REPLICA_SET,
    POD,
    ENDPOINT_SLICE,
    CONFIG_MAP,
    SECRET,
    EVENT,
    LEASE,
)
"""Children in the order in which they are applied."""

RESOURCES: Final = tuple(kind for kind in TABLE if kind.role is Role.RESOURCE)
CHILDREN: Final = tuple(kind for kind in TABLE if kind.role is Role.CHILD)
WATCHED: Final = tuple(kind for kind in TABLE if kind.role is not Role.OTHER)
MADE: Final = frozenset(kind.kind for kind in CHILDREN)
"""Names of the kinds that we make. Others among the children (Pods, ReplicaSets) belong to controllers of Kubernetes."""
OPTIONAL: Final = frozenset(kind.kind for kind in CHILDREN if kind.optional)
"""Names of those that nothing else waits for."""

_BY_NAME: Final = {(kind.api_version, kind.kind): kind for kind in TABLE}


def find(api_version: str, kind: str) -> Kind:
    """The Kind of these names. A plan that asks for another one is a bug of ours, hence KeyError."""
    return _BY_NAME[api_version, kind]


def of(manifest: Mapping[str, Any]) -> Kind:
    return find(manifest["apiVersion"], manifest["kind"])

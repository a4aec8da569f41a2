"""The kinds of objects the operator reads and writes, and how an object tells which resource it belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from banyan_operator.plan import Manifest

FIELD_MANAGER: Final = "banyan-operator"
CHILD_SELECTOR: Final = "app.kubernetes.io/managed-by=banyan-operator"


@dataclass(frozen=True, slots=True)
class Kind:
    """One namespaced kind of the API."""

    group: str  # "" is the core group
    version: str
    plural: str
    kind: str

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


GROUP: Final = "serving.banyan.dev"
INFERENCE_SERVER: Final = Kind(GROUP, "v1alpha1", "inferenceservers", "InferenceServer")
BATCH_JOB: Final = Kind(GROUP, "v1alpha1", "batchjobs", "BatchJob")
RESOURCES: Final = (INFERENCE_SERVER, BATCH_JOB)

DEPLOYMENT: Final = Kind("apps", "v1", "deployments", "Deployment")
REPLICA_SET: Final = Kind("apps", "v1", "replicasets", "ReplicaSet")
JOB: Final = Kind("batch", "v1", "jobs", "Job")
POD: Final = Kind("", "v1", "pods", "Pod")
SERVICE: Final = Kind("", "v1", "services", "Service")
SERVICE_ACCOUNT: Final = Kind("", "v1", "serviceaccounts", "ServiceAccount")
CLAIM: Final = Kind("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")
INGRESS: Final = Kind("networking.k8s.io", "v1", "ingresses", "Ingress")
CHILDREN: Final = (DEPLOYMENT, REPLICA_SET, JOB, POD, SERVICE, SERVICE_ACCOUNT, CLAIM, INGRESS)

CONFIG_MAP: Final = Kind("", "v1", "configmaps", "ConfigMap")
SECRET: Final = Kind("", "v1", "secrets", "Secret")
EVENT: Final = Kind("", "v1", "events", "Event")
LEASE: Final = Kind("coordination.k8s.io", "v1", "leases", "Lease")

_KINDS: Final = {(kind.api_version, kind.kind): kind for kind in (*RESOURCES, *CHILDREN, CONFIG_MAP, SECRET, EVENT, LEASE)}


def find(api_version: str, kind: str) -> Kind:
    """The Kind of these names. A plan that asks for another one is a bug of ours, hence KeyError."""
    return _KINDS[api_version, kind]


def of(manifest: Manifest) -> Kind:
    return find(manifest["apiVersion"], manifest["kind"])


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """Names one resource: the unit of work."""

    kind: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}"

    @property
    def controller(self) -> str:
        """The value of the metrics' label `controller`."""
        return self.kind.lower()


def key_of(resource: Manifest) -> Key:
    meta = resource["metadata"]
    return Key(resource["kind"], meta["namespace"], meta["name"])


OWNER_LABELS: Final = {f"{GROUP}/server": INFERENCE_SERVER.kind, f"{GROUP}/batchjob": BATCH_JOB.kind}


def owner_of(child: Manifest) -> Key | None:
    """The resource that a child's labels name, whether it exists or not."""
    meta = child["metadata"]
    labels = meta.get("labels") or {}
    for label, kind in OWNER_LABELS.items():
        if label in labels:
            return Key(kind, meta["namespace"], labels[label])
    return None

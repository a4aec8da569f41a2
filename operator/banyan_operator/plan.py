"""The seam between deciding and acting: a `World` in, a `Plan` out.

`reconcile` is a pure function of a resource, the world as seen around it, and the operator's settings. Two drivers build
the `World` and carry the `Plan` out: `cluster` on Kubernetes, `local` as processes on this machine. Objects are plain
dicts in the form of the Kubernetes API, because that is what both drivers read and write.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Manifest = dict[str, Any]
"""A Kubernetes object. Live ones have metadata.uid, generation and status as the API server (or local mode) gives them."""


@dataclass(frozen=True, slots=True)
class Ref:
    """Names one object in the resource's own namespace."""

    api_version: str
    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class World:
    """What was seen around one resource. A snapshot; may be some seconds old."""

    now: float  # unix seconds
    children: tuple[Manifest, ...] = ()
    """Live objects with our owner label, of every kind: Deployment, ReplicaSet, Pod, Service, ServiceAccount, Ingress, Job …
    ReplicaSets and Pods carry status; objects of the same name as a desired child but with a foreign owner are included."""
    missing: frozenset[Ref] = frozenset()
    """Referenced Secrets, ConfigMaps and claims that do not exist. Only filled in where the driver could look."""
    server: Manifest | None = None
    """For a BatchJob with serverRef: that InferenceServer as stored, or None if there is none."""
    server_url: str | None = None
    """For an InferenceServer its own base URL, for a BatchJob with serverRef that server's, as this driver resolves Services.
    None: as the cluster's DNS does."""
    progress: Mapping[str, Any] | None = None
    """For a running BatchJob: the body of the worker's GET /progress, if it answered."""
    readyz: Mapping[str, Any] | None = None
    """For an InferenceServer: the body of GET /readyz of its newest pod (200 or 503), if it answered."""
    events: tuple[Manifest, ...] = ()
    """Recent Warning events of the children (FailedMount and the like), newest first, where the driver could look."""
    refused: Mapping[Ref, str] = field(default_factory=dict)
    """What the API server said when it refused (400, 403, 422) an object of this very generation of the resource, by object."""


@dataclass(frozen=True, slots=True)
class Event:
    """One line of `kubectl describe`. Reasons are the same words as in conditions."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do now. Carrying a plan out twice, late, or half must do no harm: the next reconcile continues."""

    apply: tuple[Manifest, ...] = ()  # in this order, by server-side apply with our field manager
    delete: tuple[Ref, ...] = ()  # after the applies; may name the BatchJob itself (ttlSecondsAfterFinished)
    status: Mapping[str, Any] | None = None  # the whole new status, or None when it would not change
    events: tuple[Event, ...] = ()
    requeue_after_s: float | None = None  # look again after so long even if nothing is heard


@dataclass(frozen=True, slots=True)
class Settings:
    """The operator's own configuration, as far as it decides what objects look like."""

    runtime_image: str
    operator_version: str
    image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()
    default_storage: Mapping[str, str] = field(default_factory=dict)
    """Environment of batch workers for what spec.s3 leaves open: AWS_ENDPOINT_URL_S3, AWS_REGION and the like."""
    platform: Literal["cluster", "local"] = "cluster"
    """Only decides which model sources exist: file:// is for local mode alone."""

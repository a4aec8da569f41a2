"""The seams between deciding and acting.

    gather: World → decide: Plan → apply: Outcome → report: Report

`reconcile.decide` and `reconcile.report` are pure functions. `cluster` builds the `World`, carries the `Plan` out and writes the
`Report`. Objects are plain dicts in the form of the Kubernetes API, because that is what it reads and writes. Local mode takes only pod
templates and diagnoses from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from banyan_operator.kube.kinds import Manifest
from banyan_operator.kube.objects import Ref

__all__ = ["Event", "Manifest", "Outcome", "Plan", "Ref", "Report", "Settings", "World"]


@dataclass(frozen=True, slots=True)
class World:
    """What was seen around one resource. A snapshot; may be some seconds old, and of each kind of a different moment."""

    now: float  # unix seconds
    children: tuple[Manifest, ...] = ()
    """Live objects with our owner label, of every kind: Deployment, ReplicaSet, Pod, Service, ServiceAccount, Ingress, Job …
    Whether they are really ours, their owner references tell. ReplicaSets, Jobs and Pods carry status."""
    remains: tuple[Manifest, ...] = ()
    """For a BatchJob that is not over: its Jobs that had ended when they went, and pods of them likewise, as they were last; of Jobs of one
    name the last one last. No more than tells how they ended; of those that went while no operator looked nothing is known."""
    missing: frozenset[Ref] = frozenset()
    """Referenced Secrets, ConfigMaps and claims that do not exist. Only filled in where the driver could look."""
    absent: frozenset[str] = frozenset()
    """Optional kinds (PodMonitor …) whose API this cluster does not have."""
    server: Manifest | None = None
    """For a BatchJob with serverRef: that InferenceServer as stored, or None if there is none."""
    progress: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """For a running BatchJob: by the names of its pods, the body of GET /progress of each that answered."""
    readyz: Mapping[str, Any] | None = None
    """For an InferenceServer: the body of GET /readyz of its newest pod (200 or 503), if it answered."""
    events: tuple[Manifest, ...] = ()
    """Recent Warning events of the children (FailedMount and the like), newest first, where the driver could look."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do now. Carrying a plan out twice, late, or half must do no harm: the next reconcile continues.

    Each manifest that changes a live object names its uid, so that an object of the same name that came in between is not
    taken for it.
    """

    apply: tuple[Manifest, ...] = ()  # in this order, by server-side apply with our field manager
    delete: tuple[Manifest, ...] = ()  # live objects, after the applies; may be the BatchJob itself (ttlSecondsAfterFinished)
    drifted: frozenset[Ref] = frozenset()  # of those to apply: objects that somebody else changed or deleted
    status: tuple[Manifest, ...] = ()  # of live objects that Kubernetes' controllers made, the part of their status that is to change


@dataclass
class Outcome:
    """What did not work of a plan. Empty: everything was carried out."""

    refused: dict[Ref, str] = field(default_factory=dict)
    """What the API server will not take as it is (400, 422; 403 for a quota or an admission policy), with its words."""
    forbidden: dict[Ref, str] = field(default_factory=dict)
    """What the operator itself is not allowed to do (403 by RBAC)."""
    taken: dict[Ref, str] = field(default_factory=dict)
    """Objects that were to be made but exist and belong to somebody else, with who that is."""
    failed: dict[Ref, str] = field(default_factory=dict)
    """What did not work for now (409, 429, 5xx, no answer): it is tried again soon."""
    contested: set[Ref] = field(default_factory=set)
    """Objects that were left alone for a while, because another controller keeps changing them."""

    def wrote(self, ref: Ref) -> bool:
        """Whether nothing stood in the way of this object's writes."""
        return not any(ref in group for group in (self.refused, self.forbidden, self.taken, self.failed, self.contested))

    @property
    def complete(self) -> bool:
        return not (self.refused or self.forbidden or self.taken or self.failed or self.contested)


@dataclass(frozen=True, slots=True)
class Event:
    """One line of `kubectl describe`. Reasons are the same words as in conditions."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Report:
    """What to tell about it, and when to look again."""

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
    platform: Literal["cluster", "local"] = "cluster"
    """Which model sources exist (file:// is for local mode alone), and how to give what is missing."""
    namespace: str = ""
    """Where the operator itself runs: NetworkPolicies let it in. Empty in local mode."""
    listen: str = "0.0.0.0"
    """The address on which pods listen: every one of the family that the cluster's pods are reached by."""

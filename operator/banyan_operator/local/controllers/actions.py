"""What a controller may ask for, and small helpers that all controllers read objects with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from banyan_operator.kube.objects import Key, key_of
from banyan_operator.plan import Manifest
from banyan_operator.times import stamp


@dataclass(frozen=True, slots=True)
class Create:
    """A new object; metadata.generateName instead of a name gets five random characters."""

    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Replace:
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Delete:
    key: Key


@dataclass(frozen=True, slots=True)
class SetStatus:
    key: Key
    status: Manifest


Action = Create | Replace | Delete | SetStatus


def delete(manifest: Manifest) -> Delete:
    return Delete(key_of(manifest))


def is_deleted(manifest: Manifest) -> bool:
    return "deletionTimestamp" in manifest["metadata"]


def is_finished(pod: Manifest) -> bool:
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def is_active(pod: Manifest) -> bool:
    """Neither finished nor on its way out."""
    return not is_deleted(pod) and not is_finished(pod)


def is_ready(pod: Manifest) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod.get("status", {}).get("conditions", ()))


def first_to_go(pods: Iterable[Manifest]) -> list[Manifest]:
    """Pods in the order in which they are given up: not running before running, not ready before ready, young before old."""

    def rank(pod: Manifest) -> tuple[bool, bool]:
        return pod.get("status", {}).get("phase") == "Running", is_ready(pod)

    youngest_first = sorted(pods, key=lambda pod: str(pod["metadata"]["creationTimestamp"]), reverse=True)
    return sorted(youngest_first, key=rank)


def template_hash(template: Manifest) -> str:
    """The pod-template-hash of a template: equal templates, equal hash."""
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:10]


def condition(old: Iterable[Manifest], kind: str, status: str, reason: str, message: str, now: float, **more: Any) -> Manifest:
    """A condition whose lastTransitionTime is that of the old one, unless its status changes now."""
    before = next((c for c in old if c["type"] == kind), None)
    since = before["lastTransitionTime"] if before is not None and before["status"] == status else stamp(now)
    return {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": since, **more}

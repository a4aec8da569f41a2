"""What a controller may ask for, and small helpers that all controllers read objects with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from banyan_operator.kube.objects import Key, condition, is_true, key_of
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


def knows(what: str, spec: Mapping[str, Any], *fields: str, needs: Iterable[str] = ()) -> None:
    """Assert that a spec asks for nothing that a controller would pass over in silence, and leaves out nothing that it needs."""
    unknown = sorted(spec.keys() - set(fields))
    assert not unknown, f"local mode does not carry this out: {', '.join(f'{what}.{name}' for name in unknown)}"
    missing = sorted(set(needs) - spec.keys())
    assert not missing, f"local mode needs {', '.join(f'{what}.{name}' for name in missing)}"


def is_deleted(manifest: Manifest) -> bool:
    return "deletionTimestamp" in manifest["metadata"]


def is_finished(pod: Manifest) -> bool:
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def is_active(pod: Manifest) -> bool:
    """Neither finished nor on its way out."""
    return not is_deleted(pod) and not is_finished(pod)


def first_to_go(pods: Iterable[Manifest]) -> list[Manifest]:
    """Pods in the order in which they are given up: not running before running, not ready before ready, young before old."""

    def rank(pod: Manifest) -> tuple[bool, bool]:
        return pod.get("status", {}).get("phase") == "Running", is_true(pod, "Ready")

    youngest_first = sorted(pods, key=lambda pod: str(pod["metadata"]["creationTimestamp"]), reverse=True)
    return sorted(youngest_first, key=rank)


def template_hash(template: Manifest) -> str:
    """The pod-template-hash of a template: equal templates, equal hash."""
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:10]


def new_condition(of: Manifest, kind: str, status: str, reason: str, message: str, now: float, **more: Any) -> Manifest:
    """A condition for `of`, whose lastTransitionTime is that of the one it has, unless its status changes now."""
    before = condition(of, kind)
    since = before["lastTransitionTime"] if before.get("status") == status else stamp(now)
    return {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": since, **more}

"""What the API server would not take: changes of fields that are fixed once an object exists.

What works here is to work in a cluster too, so the same changes are refused, in the same words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from banyan_operator.api.quantity import amount
from banyan_operator.kube import kinds
from banyan_operator.plan import Manifest

FIXED_OF_JOBS = ("template", "completionMode", "backoffLimitPerIndex", "podFailurePolicy", "successPolicy")
"""Its other fields may change: suspend, parallelism and (with it) completions, podReplacementPolicy."""


def refusal(new: Manifest, old: Manifest) -> str | None:
    """Why `old` cannot become `new`, or None when it can."""
    problem = _problem(new, old)
    if problem is None:
        return None
    kind = kinds.of(new)
    return f'{kind.kind}{f".{kind.group}" if kind.group else ""} "{new["metadata"]["name"]}" is invalid: {problem}'


def _problem(new: Manifest, old: Manifest) -> str | None:
    match new["kind"]:
        case kinds.DEPLOYMENT.kind:
            return _fixed(new["spec"], old["spec"], "selector")
        case kinds.JOB.kind:
            return _job(new["spec"], old["spec"])
        case kinds.SERVICE.kind if new["spec"].get("clusterIP") != old["spec"].get("clusterIP"):
            return f"spec.clusterIPs[0]: Invalid value: {new['spec'].get('clusterIP')!r}: may not change once set"
        case kinds.CLAIM.kind:
            return _claim(new["spec"], old["spec"])
        case kinds.CONTROLLER_REVISION.kind if new["data"] != old["data"]:
            return "data: field is immutable"
    return None


def _fixed(new: Mapping[str, Any], old: Mapping[str, Any], *fields: str) -> str | None:
    return next((f"spec.{name}: field is immutable" for name in fields if new.get(name) != old.get(name)), None)


def _job(new: Mapping[str, Any], old: Mapping[str, Any]) -> str | None:
    if new["completions"] != old["completions"] and new["completions"] != new["parallelism"]:
        return f"spec.completions: Invalid value: {new['completions']}: can only be modified in tandem with spec.parallelism"
    return _fixed(new, old, *FIXED_OF_JOBS)


def _claim(new: Mapping[str, Any], old: Mapping[str, Any]) -> str | None:
    wants, has = ({**spec, "resources": None} for spec in (new, old))
    if wants != has:
        return "spec: Forbidden: spec is immutable after creation except resources.requests and volumeAttributesClassName for bound claims"
    if amount(new["resources"]["requests"]["storage"]) < amount(old["resources"]["requests"]["storage"]):
        return "spec.resources.requests.storage: Forbidden: field can not be less than status.capacity"
    return None

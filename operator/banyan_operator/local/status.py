"""What is read from a resource and its status: what it is called, its phase, and why it is not as it should be."""

from __future__ import annotations

from typing import Final

from banyan_operator.kube.kinds import Manifest
from banyan_operator.kube.objects import Key, condition, key_of
from banyan_operator.observed.batch import TERMINAL

NAMESPACE: Final = "default"
_WORST_FIRST: Final = {
    "InferenceServer": ("Accepted=False", "Ready=False", "Ready=Unknown"),
    "BatchJob": ("Failed=True", "Accepted=False", "Complete=True", "Cancelled=True", "Expired=True", "Running=False"),
}


def in_namespace(namespace: str) -> str:
    """What stands behind a name outside the usual namespace."""
    return "" if namespace == NAMESPACE else f" ({namespace})"


def label(resource: Manifest) -> str:
    return label_of(key_of(resource))


def label_of(key: Key) -> str:
    """What one resource is called: two of one name are told apart by their namespaces."""
    return f"{key.kind.lower()}/{key.name}{in_namespace(key.namespace)}"


def phase(resource: Manifest) -> str:
    return str(resource.get("status", {}).get("phase", "Pending"))


def has_ended(resource: Manifest) -> bool:
    """Whether a BatchJob is over."""
    return phase(resource) in TERMINAL


def reason(resource: Manifest) -> str:
    """Why a resource is not as it should be, in the words of its conditions."""
    for kind, _, status in (words.partition("=") for words in _WORST_FIRST[resource["kind"]]):
        found = condition(resource, kind)
        if found.get("status") == status:
            return f"{found['reason']}: {found['message']}" if found["message"] else str(found["reason"])
    return ""

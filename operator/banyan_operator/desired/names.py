"""What the children of a resource are called.

A resource's own name holds no `--`, so what is made here is never the name of another resource, nor of another one's child.
An object keeps the name under which it was made: releases before this one wrote one `-`, and a claim with another name would be
another claim.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from banyan_operator.api import BatchJob, InferenceServer, Resource
from banyan_operator.desired.metadata import owner
from banyan_operator.kube.kinds import CLAIM, JOB, SERVICE, SERVICE_ACCOUNT, Kind, Manifest
from banyan_operator.kube.objects import Ref

SEPARATOR: Final = "--"


@dataclass(frozen=True, slots=True)
class _Role:
    """One child, and the ends of its name: now, and in releases before."""

    kind: Kind
    now: str
    before: str


_PODS: Final = _Role(SERVICE, "pods", "pods")
_JOBS: Final = {end: _Role(JOB, end, end) for end in ("plan", "work", "merge")}
_ACCOUNT: Final = {InferenceServer: _Role(SERVICE_ACCOUNT, "server", "server"), BatchJob: _Role(SERVICE_ACCOUNT, "batch", "batch")}
_CACHE: Final = {InferenceServer: _Role(CLAIM, "cache", "cache"), BatchJob: _Role(CLAIM, "batch-cache", "cache")}


@dataclass(frozen=True, slots=True)
class Names:
    """The names of what has to be called otherwise than the resource."""

    service_account: str
    cache_claim: str
    pods_service: str
    jobs: Mapping[str, str]  # phase → name

    @staticmethod
    def of(resource: Resource, children: Iterable[Manifest] = (), template: Manifest | None = None) -> Names:
        """`children`: live ones. `template`: of the pods, where one is decided already; what it names is named so."""
        known, kind = tuple(children), type(resource)
        used = set(_named_in(template)) if template is not None else set[Ref]()
        return Names(
            service_account=_name(resource, _ACCOUNT[kind], known, used),
            cache_claim=_name(resource, _CACHE[kind], known, used),
            pods_service=_name(resource, _PODS, known, used),
            jobs={phase: _name(resource, role, known, used) for phase, role in _JOBS.items()},
        )

    def job(self, phase: str) -> str:
        """Of the Job that does one phase of a BatchJob."""
        return self.jobs[phase]


def jobs_of(batch_job: str) -> frozenset[str]:
    """What the Jobs of the BatchJob of this name may be called, whichever release made them."""
    return frozenset(f"{batch_job}{between}" for role in _JOBS.values() for between in (f"{SEPARATOR}{role.now}", f"-{role.before}"))


def derived(resource: Resource, end: str) -> str:
    return f"{resource.metadata.name}{SEPARATOR}{end}"


def _name(resource: Resource, role: _Role, children: Iterable[Manifest], used: set[Ref]) -> str:
    now, before = derived(resource, role.now), f"{resource.metadata.name}-{role.before}"
    ours = {Ref.of(one) for one in children if one["kind"] == role.kind.kind and owner(resource).may_change(one)}
    for taken in (used, ours):
        if Ref.to(role.kind, before) in taken and Ref.to(role.kind, now) not in taken:
            return before
    return now


def _named_in(template: Manifest) -> Iterator[Ref]:
    pod = template["spec"]
    yield Ref.to(SERVICE_ACCOUNT, pod.get("serviceAccountName") or "")
    for volume in pod.get("volumes") or ():
        if claim := volume.get("persistentVolumeClaim"):
            yield Ref.to(CLAIM, claim["claimName"])

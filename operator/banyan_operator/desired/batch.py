"""The child objects of a BatchJob."""

from __future__ import annotations

from collections.abc import Iterable

from banyan_operator.api import BatchJob
from banyan_operator.desired import batchjob
from banyan_operator.desired.batchjob import Order
from banyan_operator.desired.companions import cache_claim, service_account
from banyan_operator.desired.monitors import monitors
from banyan_operator.desired.names import Names, derived
from banyan_operator.desired.network import network_policy
from banyan_operator.kube.kinds import JOB
from banyan_operator.kube.objects import Ref, find_object
from banyan_operator.plan import Manifest, Settings


def children(
    job: BatchJob,
    settings: Settings,
    orders: Iterable[Order],
    *,
    server_url: str | None,
    live: Iterable[Manifest] = (),
    absent: frozenset[str] = frozenset(),
) -> tuple[Manifest, ...]:
    """All objects that `job` wants while it goes on, in the order in which they are applied.

    `orders`: its Jobs. `server_url`: base URL of the InferenceServer of serverRef. `live`: its children as they are; a Job among
    them keeps what it was made with, for that cannot change. `absent`: optional kinds that the cluster does not have, which are
    left out. Raises SpecError when spec.podTemplate cannot be merged.
    """
    live, names = tuple(live), Names.of(job)
    found: list[Manifest] = []
    if job.spec.service_account_name is None:
        found.append(service_account(job, settings, names.service_account))
    own = job.spec.server
    if own is not None and own.cache.type == "PersistentVolumeClaim" and own.cache.claim_name is None:
        found.append(cache_claim(job, settings, names.cache_claim, own.cache))
    for order in orders:
        there = find_object(live, Ref.to(JOB, derived(job.metadata.name, order.phase)))
        found.append(batchjob.as_made(job, there, order) if there else batchjob.make(job, settings, order, server_url=server_url))
    if job.spec.network_policy.enabled:
        found.append(network_policy(job, settings))
    return (*found, *monitors(job, settings, absent))

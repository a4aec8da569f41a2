"""Whether what somebody waits for is there, is still to come, or cannot come however long one waits.

Local mode has nobody but the files and this machine: what the manifests do not hold, no other team will add.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from banyan_operator.kube.kinds import Manifest
from banyan_operator.kube.objects import Key, condition, key_of
from banyan_operator.local.status import has_ended, in_namespace, phase, reason
from banyan_operator.observed.server import serves_as_wanted

FINAL: Final = frozenset(
    {"ModelInvalid", "ModelAccessDenied", "CacheNotWritable", "RuntimeConfigInvalid", "ContainerStartFailed", "ConfigMissing"}
)
"""Reasons that a new try of the same does not mend: only another spec, another file or another Secret would."""
NO_DEVICE: Final = "InsufficientAccelerators"
"""Mended when a batch with a server of its own ends; an InferenceServer keeps what it holds."""


@dataclass(frozen=True, slots=True)
class Prospect:
    """`over`: nothing more is to be waited for. `problems`: what failed or cannot come, a line each."""

    over: bool
    problems: tuple[str, ...] = ()


def servers_ready(resources: Sequence[Manifest]) -> Prospect:
    """Over when every InferenceServer serves, or one never will."""
    lost = _lost(resources)
    servers = [one for one in resources if one["kind"] == "InferenceServer"]
    problems = tuple(_line(one, lost[key_of(one)]) for one in servers if key_of(one) in lost)
    return Prospect(bool(problems) or all(map(serves_as_wanted, servers)), problems)


def all_done(resources: Sequence[Manifest]) -> Prospect:
    """Over when every InferenceServer serves and every BatchJob has ended, except those that never will: others may go on."""
    lost = _lost(resources)
    problems = {key_of(one): _line(one, lost[key_of(one)]) for one in resources if key_of(one) in lost}
    problems |= {key_of(one): _line(one, reason(one)) for one in resources if has_ended(one) and phase(one) != "Succeeded"}
    return Prospect(all(_is_there(one) or key_of(one) in lost for one in resources), tuple(problems.values()))


def _is_there(resource: Manifest) -> bool:
    return serves_as_wanted(resource) if resource["kind"] == "InferenceServer" else has_ended(resource)


def _lost(resources: Sequence[Manifest]) -> dict[Key, str]:
    """What will never be there, and why."""
    known = {key_of(one): one for one in resources}
    lost: dict[Key, str] = {}

    def note(why: Callable[[Manifest], str | None]) -> None:
        found = {key: why(one) for key, one in known.items() if key not in lost and not _is_there(one)}
        lost.update((key, words) for key, words in found.items() if words is not None)

    def waits_in_vain(job: Manifest) -> str | None:
        """For a server that never takes requests."""
        if condition(job, "Running").get("reason") != "WaitingForServer":
            return None
        server = Key("InferenceServer", key_of(job).namespace, job["spec"]["serverRef"]["name"])
        return reason(job) if server not in known or server in lost or phase(known[server]) == "Stopped" else None

    note(_never)
    note(waits_in_vain)
    holders = [one for key, one in known.items() if one["spec"].get("server") and not _is_there(one) and key not in lost]
    if all(_waits_for(one) == NO_DEVICE for one in holders):
        note(lambda one: reason(one) if _waits_for(one) == NO_DEVICE else None)
        note(waits_in_vain)
    return lost


def _never(resource: Manifest) -> str | None:
    """Why a resource cannot come to anything, if that shows in its own conditions."""
    for field in ("paused", "suspend"):
        if resource["spec"].get(field):
            return f"spec.{field} is true"
    refused = condition(resource, "Accepted").get("status") == "False"
    failed = resource["kind"] == "InferenceServer" and phase(resource) == "Failed"
    return reason(resource) if refused or failed or _waits_for(resource) in FINAL else None


def _waits_for(resource: Manifest) -> str:
    """The reason of the condition that is waited for."""
    found = condition(resource, "Ready" if resource["kind"] == "InferenceServer" else "Running")
    return str(found.get("reason")) if found.get("status") == "False" else ""


def _line(resource: Manifest, words: str) -> str:
    key = key_of(resource)
    return f"{key.name}{in_namespace(key.namespace)}: {words}"

"""Whether what somebody waits for is there, is still to come, or cannot come however long one waits.

Local mode has nobody but the files and this machine: what the manifests do not hold, no other team will add.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from banyan_operator.kube.objects import Key, condition, key_of
from banyan_operator.local.objects import in_namespace
from banyan_operator.local.snapshot import FINISHED, phase, reason
from banyan_operator.observed.server import serves_as_wanted
from banyan_operator.plan import Manifest

FINAL = frozenset(
    {"ModelInvalid", "ModelAccessDenied", "CacheNotWritable", "RuntimeConfigInvalid", "ContainerStartFailed", "ConfigMissing"}
)
"""Reasons that a new try of the same does not mend: only another spec, another file or another Secret would."""
NO_DEVICE = "InsufficientAccelerators"
"""Mended when a batch with a server of its own ends; an InferenceServer keeps what it holds."""


@dataclass(frozen=True, slots=True)
class Prospect:
    """`over`: nothing more is to be waited for. `problems`: what failed or cannot come, a line each."""

    over: bool
    problems: tuple[str, ...] = ()


def servers_ready(resources: Sequence[Manifest]) -> Prospect:
    """Over when every InferenceServer serves, or one never will."""
    servers = [one for one in resources if one["kind"] == "InferenceServer"]
    lost = _hopeless(resources)
    problems = tuple(lost[key_of(one)] for one in servers if key_of(one) in lost)
    return Prospect(bool(problems) or all(map(serves_as_wanted, servers)), problems)


def all_done(resources: Sequence[Manifest]) -> Prospect:
    """Over when every InferenceServer serves and every BatchJob has ended, except those that never will: others may go on."""
    lost = _hopeless(resources)
    failed = {
        key_of(one): _line(one, reason(one))
        for one in resources
        if one["kind"] == "BatchJob" and phase(one) in FINISHED and phase(one) != "Succeeded"
    }
    over = all(_is_there(one) or key_of(one) in lost for one in resources)
    return Prospect(over, tuple((lost | failed).values()))


def _is_there(resource: Manifest) -> bool:
    return serves_as_wanted(resource) if resource["kind"] == "InferenceServer" else phase(resource) in FINISHED


def _hopeless(resources: Sequence[Manifest]) -> dict[Key, str]:
    """What will never be there, with the line that says why."""
    known = {key_of(one): one for one in resources}
    lost: dict[Key, str] = {}

    def sort(why: Callable[[Manifest], str | None]) -> None:
        for key, one in known.items():
            if key not in lost and not _is_there(one) and (words := why(one)) is not None:
                lost[key] = _line(one, words)

    def waits_in_vain(job: Manifest) -> str | None:
        """For a server that never takes requests."""
        if condition(job, "Running").get("reason") != "WaitingForServer":
            return None
        server = Key("InferenceServer", key_of(job).namespace, job["spec"]["serverRef"]["name"])
        vain = server not in known or server in lost or phase(known[server]) == "Stopped"
        return reason(job) if vain else None

    sort(_never)
    sort(waits_in_vain)
    holders = [one for key, one in known.items() if one["spec"].get("server") and not _is_there(one) and key not in lost]
    if all(map(_waits_for_device, holders)):
        sort(lambda one: reason(one) if _waits_for_device(one) else None)
        sort(waits_in_vain)
    return lost


def _never(resource: Manifest) -> str | None:
    """Why a resource cannot come to anything, if that shows in its own conditions."""
    if resource["spec"].get("paused"):
        return "spec.paused is true"
    if resource["spec"].get("suspend"):
        return "spec.suspend is true"
    refused = condition(resource, "Accepted").get("status") == "False"
    failed = resource["kind"] == "InferenceServer" and phase(resource) == "Failed"
    return reason(resource) if refused or failed or _why(resource) in FINAL else None


def _waits_for_device(resource: Manifest) -> bool:
    return _why(resource) == NO_DEVICE


def _why(resource: Manifest) -> str:
    """The reason of the condition that is waited for."""
    found = condition(resource, "Ready" if resource["kind"] == "InferenceServer" else "Running")
    return str(found.get("reason")) if found.get("status") == "False" else ""


def _line(resource: Manifest, words: str) -> str:
    key = key_of(resource)
    return f"{key.name}{in_namespace(key.namespace)}: {words}"

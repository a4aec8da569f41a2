"""Conditions: what was found, with the time since when it is so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from banyan_operator.api.status import Condition, Truth
from banyan_operator.times import stamp

MAX_MESSAGE = 2048
SHORT: Final = 80  # characters of what several conditions may say
FORBIDDEN = "OperatorForbidden"
"""Reason where the operator lacks a right: a fault of its installation, not of the spec."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One condition's content."""

    status: Truth
    reason: str
    message: str


def yes(reason: str, message: str) -> Finding:
    return Finding("True", reason, message)


def no(reason: str, message: str) -> Finding:
    return Finding("False", reason, message)


def unknown(reason: str, message: str) -> Finding:
    return Finding("Unknown", reason, message)


def pointer(reason: str, kind: str) -> str:
    """Stands for what the condition of type `kind` says."""
    return f"{reason}: see condition {kind}."


def whole(status: Mapping[str, Any], text: str) -> str:
    """`text` of this status, with what it points to in its place."""
    for one in status.get("conditions") or ():
        text = text.replace(pointer(str(one.get("reason")), str(one.get("type"))), str(one.get("message") or ""))
    return text


def said_once(found: Mapping[str, Finding], first: Sequence[str]) -> dict[str, Finding]:
    """The same findings; what several say at length, one says: of equals the one whose type comes first in `first`, then in `found`."""
    known = sorted(found, key=lambda kind: (len(found[kind].message), first.index(kind) if kind in first else len(first)))
    said = dict(found)
    holders: list[str] = []  # they say all of it themselves; the shortest first
    for kind in known:
        text = found[kind].message
        for holder in holders:
            text = text.replace(found[holder].message, pointer(found[holder].reason, holder))
        said[kind] = replace(found[kind], message=text)
        if text == found[kind].message and len(text) > SHORT:
            holders.append(kind)
    return said


def conditions(prior: Mapping[str, Any], found: Mapping[str, Finding], generation: int, now: float) -> tuple[Condition, ...]:
    """Findings as conditions; lastTransitionTime moves only when a status changes. `prior` is the status as it was."""
    before = {condition["type"]: condition for condition in prior.get("conditions") or ()}
    result = []
    for kind, finding in found.items():
        old = before.get(kind)
        since = old["lastTransitionTime"] if old is not None and old.get("status") == finding.status else stamp(now)
        result.append(
            Condition(
                type=kind,
                status=finding.status,
                observed_generation=generation,
                last_transition_time=since,
                reason=finding.reason,
                message=finding.message[:MAX_MESSAGE],
            )
        )
    return tuple(result)


def messages(prior: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(condition.get("message") or "") for condition in prior.get("conditions") or ())


def refused(prior: Mapping[str, Any], found: Mapping[str, Finding], phase: str, generation: int, now: float) -> dict[str, Any]:
    """The status where the spec cannot even be read: as it was, but for the phase and what is found now."""
    now_known = [condition.dump() for condition in conditions(prior, found, generation, now)]
    kept = [_with_whole(prior, condition) for condition in prior.get("conditions") or () if condition["type"] not in found]
    failed = {"lastFailure": _with_whole(prior, prior["lastFailure"])} if prior.get("lastFailure") else {}
    return {**prior, **failed, "observedGeneration": generation, "phase": phase, "conditions": [*now_known, *kept]}


def _with_whole(prior: Mapping[str, Any], one: Mapping[str, Any]) -> dict[str, Any]:
    """A condition or failure of `prior`, for where what it points to is replaced."""
    return {**one, "message": whole(prior, str(one.get("message") or ""))[:MAX_MESSAGE]}

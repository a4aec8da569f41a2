"""Events: one for each change of state, with the same reasons as the conditions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from banyan_operator.observed.conditions import whole
from banyan_operator.observed.diagnosis import EARLY
from banyan_operator.plan import Event

_QUIET: Final = EARLY | {
    "Reconciling",
    "RollingOut",
    "InProgress",
    "WaitingForServer",
    "WaitingForReport",
    "Suspending",
    "Suspended",
    "Cancelling",
    "Planning",
    "Merging",
    "Finished",
    "ScaledToZero",
    "EndpointsPending",
    "Cancelled",
    "Expired",
}
"""Reasons that are no failure."""

_ENDINGS: Final = {
    "Succeeded": ("Normal", "Completed"),
    "Failed": ("Warning", "Failed"),
    "Cancelled": ("Normal", "Cancelled"),
    "Expired": ("Warning", "Expired"),
}


def of_server(prior: Mapping[str, Any], new: Mapping[str, Any]) -> list[Event]:
    """What happened to an InferenceServer between two statuses."""
    events = _troubles(prior, new, ("Ready", "Accepted"), ("Degraded", "Contested"))
    if _reason(new, "Ready") == "Ready" and _condition(prior, "Ready").get("status") != "True":
        events.append(Event("Normal", "Ready", f"{new.get('ready')} replicas are ready at {new.get('url')}"))
    before, after = prior.get("currentRevision"), new.get("currentRevision")
    if before and after and before != after:
        events.append(Event("Normal", "RolloutFinished", f"Revision {after} has replaced {before}"))
    return events + _failure(prior, new, events)


def of_batch(prior: Mapping[str, Any], new: Mapping[str, Any]) -> list[Event]:
    """What happened to a BatchJob between two statuses."""
    before, after = prior.get("phase"), new.get("phase")
    events = _troubles(prior, new, ("Running",), ("Stalled", "Contested"))
    if new.get("startTime") and not prior.get("startTime"):
        events.append(Event("Normal", "Started", "The work has begun"))
    if _condition(new, "Planned").get("status") == "True" != _condition(prior, "Planned").get("status"):
        events.append(Event("Normal", "Planned", str(_condition(new, "Planned").get("message") or "")))
    if after == "Suspended" != before:
        events.append(Event("Normal", "Suspended", "spec.suspend is true: nothing of it runs, what was done is kept"))
    if before == "Suspended" and after in ("Pending", "Planning", "Running", "Merging"):
        events.append(Event("Normal", "Resumed", "The work goes on"))
    if before != after and after in _ENDINGS:
        kind, reason = _ENDINGS[after]
        counts = new.get("requestCounts") or {}
        text = f"{counts.get('completed', 0)} completed, {counts.get('failed', 0)} failed of {counts.get('total', 'unknown')}"
        if after == "Failed":
            text = _message(new, _condition(new, "Failed"))
        elif after == "Succeeded" and "completed" not in counts:  # nobody knows how many
            text = _message(new, _condition(new, "Complete"))
        events.append(Event("Warning" if kind == "Warning" else "Normal", reason, text))
        return events
    return events + _failure(prior, new, events)


def _troubles(prior: Mapping[str, Any], new: Mapping[str, Any], good: Sequence[str], bad_ones: Sequence[str]) -> list[Event]:
    """A warning when one of the good conditions is no longer true, or one of the bad has become true, for another reason than
    before; what one has told the next does not repeat."""
    found: list[Event] = []
    for kind in (*good, *bad_ones):
        now, before = _condition(new, kind), _condition(prior, kind)
        bad = now.get("status", "True") != "True" if kind in good else now.get("status") == "True"
        message = _message(new, now)
        known = now.get("reason") in _QUIET or now.get("reason") == before.get("reason")
        if bad and not known and not any(event.message in message for event in found):
            found.append(Event("Warning", now["reason"], message))
    return found


def _failure(prior: Mapping[str, Any], new: Mapping[str, Any], said: list[Event]) -> list[Event]:
    """A container failed again, or another one did, and nothing above has told it."""
    before, after = prior.get("lastFailure") or {}, new.get("lastFailure") or {}
    if not after or all(before.get(key) == after.get(key) for key in ("pod", "container", "time")):
        return []
    reason, message = str(after.get("reason") or "CrashLoop"), _message(new, after)
    if any(event.reason == reason or message in event.message for event in said):
        return []
    return [Event("Warning", reason, message)]


def _condition(status: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    return next((one for one in status.get("conditions") or () if one["type"] == kind), {})


def _message(status: Mapping[str, Any], one: Mapping[str, Any]) -> str:
    """What a condition or the last failure of this status says, with what it points to in its place."""
    return whole(status, str(one.get("message") or ""))


def _reason(status: Mapping[str, Any], kind: str) -> str:
    return str(_condition(status, kind).get("reason") or "")

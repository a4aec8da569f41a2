"""The most recent failure of a set of pods, as the status keeps it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from banyan_operator.api.status import LastFailure
from banyan_operator.observed.conditions import SHORT, Finding, pointer, whole
from banyan_operator.observed.diagnosis import View, crash
from banyan_operator.observed.pods import Container, End, Pod

MAX_MESSAGE = 4096


def last_failure(pods: Iterable[Pod], view: View) -> LastFailure | None:
    """The container that failed last, whether or not it runs again; None where none has."""
    found: list[tuple[str, Pod, Container, End]] = []
    for pod in pods:
        for container in pod.containers:
            ends = [
                end for end in (container.ended, container.last_end) if end is not None and end.exit_code != 0 and not _told_to_end(end)
            ]
            found += [(end.finished or "", pod, container, end) for end in ends]
    if not found:
        return None
    finished, pod, container, end = max(found, key=lambda one: (one[0], one[1].name))
    known = crash(pod, container, end, view)
    return LastFailure(
        time=finished or None,
        pod=pod.name,
        container=container.name,
        reason=known.reason,
        message=known.message[:MAX_MESSAGE],
        exit_code=end.exit_code,
        count=max(container.restarts, 1),
    )


def _told_to_end(end: End) -> bool:
    """A batch's worker that ended in good order because somebody wanted it to: suspension, fewer workers, a drained node."""
    return end.exit_code == 143 and end.message.code == "interrupted"


def recorded(failure: LastFailure | None, prior: Mapping[str, Any], found: Mapping[str, Finding]) -> LastFailure | None:
    """`failure`, or the one that the status already tells of: its pod may be gone by now. What a condition says it does not repeat."""
    known = failure or _kept(prior)
    holder = next((kind for kind, one in found.items() if known and one.message == known.message and len(one.message) > SHORT), None)
    return known.model_copy(update={"message": pointer(found[holder].reason, holder)}) if known and holder else known


def _kept(prior: Mapping[str, Any]) -> LastFailure | None:
    try:
        known = LastFailure.model_validate_json(json.dumps(prior["lastFailure"]), by_alias=True, by_name=False)
    except (KeyError, ValidationError):
        return None
    return known.model_copy(update={"message": whole(prior, known.message or "")})

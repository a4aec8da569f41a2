"""Kopf's watches: one stream a kind, each with a lag of its own. They stall, resend, end with 410 and list again.

What kopf does is done here: events of one object come in order, of which some are passed over for a newer one; those of different
objects overtake each other a little; a list shows what is there (with type None) and says nothing of what has gone meanwhile.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from banyan_operator.kube.kinds import CHILD_SELECTOR, FIELD_MANAGER, MANAGED_BY_LABEL, TABLE, Kind, Manifest, Role
from banyan_operator.kube.objects import uid_of
from tests.support.kube.apiserver import Server

assert f"{MANAGED_BY_LABEL}={FIELD_MANAGER}" == CHILD_SELECTOR

Seen = Callable[[Kind, str | None, Manifest], None]
_KINDS = {kind.kind: kind for kind in TABLE}


def shown_to(kind: Kind, manifest: Mapping[str, Any]) -> bool:
    """Whether a list or watch with our selector shows the object."""
    return kind.role is Role.RESOURCE or (manifest["metadata"].get("labels") or {}).get(MANAGED_BY_LABEL) == FIELD_MANAGER


@dataclass(frozen=True, slots=True)
class Sighting:
    type: str | None
    object: Manifest


class Hub:
    """Turns commits into what watches show."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.watches: dict[str, list[Watch]] = {}
        server.changes.append(self._changed)

    def _changed(self, before: Manifest | None, after: Manifest | None) -> None:
        one = after or before
        assert one is not None
        watches = self.watches.get(one["kind"])
        if not watches:
            return
        kind = _KINDS[one["kind"]]
        was, is_ = before is not None and shown_to(kind, before), after is not None and shown_to(kind, after)
        if is_:
            assert after is not None
            sighting = Sighting("MODIFIED" if was else "ADDED", after)
        elif was:
            assert before is not None
            meta = {**before["metadata"], "resourceVersion": str(self._server.version)}
            sighting = Sighting("DELETED", {**before, "metadata": meta})
        else:
            return
        for watch in watches:
            watch.push(sighting)


class Watch:
    """One operator's stream of one kind."""

    def __init__(self, hub: Hub, server: Server, rng: random.Random, kind: Kind, lag_s: float, trouble: float, seen: Seen) -> None:
        self.kind, self.lag_s, self.trouble = kind, lag_s, trouble
        self._server, self._rng, self._seen = server, rng, seen
        self._last = 0.0
        self._of: dict[str, tuple[float, Sighting]] = {}
        self._stream = 0  # raised when what is under way is lost
        self._listening = False
        self.closed = False
        hub.watches.setdefault(kind.kind, []).append(self)
        self._hub = hub

    def start(self) -> None:
        self._server.loop.call_later(self.lag_s * self._rng.random(), self._list, self._stream)

    def close(self) -> None:
        self.closed = True
        self._hub.watches[self.kind.kind].remove(self)

    def stall(self, seconds: float) -> None:
        self._last = max(self._last, self._server.loop.now + seconds)

    def lose(self, seconds: float) -> None:
        """The stream ends, and when it is taken up again its place has been compacted: 410, list anew."""
        self._stream += 1
        self._listening = False
        self._server.loop.call_later(seconds, self._list, self._stream)

    def push(self, sighting: Sighting) -> None:
        if not self._listening:
            return
        rng, uid = self._rng, uid_of(sighting.object)
        self._last = max(self._last, self._server.loop.now + self.lag_s * rng.random())
        before = self._of.get(uid)
        when = max(self._last + 0.1 * rng.random() * min(1.0, self.lag_s), before[0] + 1e-6 if before else 0.0)
        self._of[uid] = (when, sighting)
        self._server.loop.call_at(when, self._deliver, self._stream, sighting)
        if self.trouble and rng.random() < self.trouble:  # a reconnect from a place that it had passed
            self._server.loop.call_at(when + rng.random() * 2, self._deliver, self._stream, sighting)

    def _list(self, stream: int) -> None:
        if self.closed or stream != self._stream:
            return
        self._listening = True
        for one in self._server.of(self.kind):
            if shown_to(self.kind, one):
                self.push(Sighting(None, one))

    def _deliver(self, stream: int, sighting: Sighting) -> None:
        if self.closed or stream != self._stream:
            return
        newest = self._of[uid_of(sighting.object)][1]
        if newest is not sighting and self._rng.random() < 0.3:
            return  # kopf takes the newest of several that wait
        self._seen(self.kind, sighting.type, sighting.object)

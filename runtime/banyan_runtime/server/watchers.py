"""Who hears of the end of a client (`transport.WATCH`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class _Watcher:
    gone: Callable[[], None]
    half_closed: Callable[[], None]


class Watchers:
    """Those of the request that a connection answers. They are told from the event loop; none of them after it was forgotten."""

    def __init__(self) -> None:
        self._each: set[_Watcher] = set()

    def __bool__(self) -> bool:
        return bool(self._each)

    def add(self, gone: Callable[[], None], half_closed: Callable[[], None]) -> tuple[Callable[[], None], Callable[[], None]]:
        """What forgets it, and what tells it that the client had ended its side before it came."""
        watcher = _Watcher(gone, half_closed)
        self._each.add(watcher)
        return functools.partial(self._each.discard, watcher), functools.partial(self._tell_half_closed, watcher)

    def half_closed(self) -> None:
        """The client has ended its side."""
        for watcher in tuple(self._each):
            self._tell_half_closed(watcher)

    def gone(self) -> None:
        """The client is gone; that is all that there is to hear."""
        told = tuple(self._each)
        self.forget()
        for watcher in told:
            watcher.gone()

    def forget(self) -> None:
        """The request has its answer: who has not forgotten the client yet is not to take the next request for it."""
        self._each.clear()

    def _tell_half_closed(self, watcher: _Watcher) -> None:
        if watcher in self._each:
            watcher.half_closed()

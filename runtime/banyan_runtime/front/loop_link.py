"""A link on the event loop: what cannot be sent at once leaves when there is room, and who listens is called when something has come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from banyan_runtime.link import Link


class LoopLink:
    """One end. Needs the running event loop."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._waiting = False  # for room for what is unsent

    @property
    def ended(self) -> bool:
        """Nobody is at the other end any more, and all it said has been read."""
        return self._link.ended

    def send(self, message: bytes, descriptor: int | None = None) -> bool:
        """As `Link.send`. Never waits, never raises."""
        taken = self._link.send(message, descriptor)
        if self._link.unsent and not self._waiting:
            self._waiting = True
            self._loop.add_writer(self._link.fileno(), self._flush)
        return taken

    def received(self) -> Iterator[bytes]:
        """As `Link.received`."""
        return self._link.received()

    def descriptor(self) -> int | None:
        """As `Link.descriptor`."""
        return self._link.descriptor()

    def listen(self, heard: Callable[[], None]) -> None:
        """Call `heard` whenever something has come, until `rest`."""
        self._loop.add_reader(self._link.fileno(), heard)

    def rest(self) -> None:
        """Hear nothing."""
        self._loop.remove_reader(self._link.fileno())

    def leave(self) -> None:
        """Hear and say nothing any more."""
        self.rest()
        self._loop.remove_writer(self._link.fileno())
        self._waiting = False

    def close(self) -> None:
        self.leave()
        self._link.close()

    def _flush(self) -> None:
        """There is room for what is unsent."""
        self._link.flush()
        if not self._link.unsent:
            self._waiting = False
            self._loop.remove_writer(self._link.fileno())

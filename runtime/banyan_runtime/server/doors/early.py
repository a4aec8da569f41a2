"""The beginning of a door, before there are the libraries of a front."""

from __future__ import annotations

import socket

from banyan_runtime.child import Child


class Early:
    """A door's process before it knows what to do: it gets on with its imports."""

    def __init__(self) -> None:
        """On the main thread. Raises OSError, UnavailableError."""
        self.control, theirs = socket.socketpair()
        with theirs:
            try:
                self.process = Child("banyan_runtime.server.doors.process", stdin=theirs.fileno())
            except BaseException:
                self.control.close()
                raise

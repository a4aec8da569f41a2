"""The beginning of an API process, before there are the libraries of a front."""

from __future__ import annotations

import socket

from banyan_runtime.child import Child


class Early:
    """An API process before it knows what to do: it gets on with its imports."""

    def __init__(self) -> None:
        """On the main thread. Raises OSError, UnavailableError."""
        self.control, theirs = socket.socketpair()
        with theirs:
            try:
                self.process = Child("banyan_runtime.server.api_processes.process", stdin=theirs.fileno())
            except BaseException:
                self.control.close()
                raise

"""When a connection reads and when it waits."""

from __future__ import annotations

from uvicorn.protocols.http.flow_control import FlowControl


class Flow(FlowControl):
    """uvicorn's, which stops reading while the application has enough; it also stops while the connection has enough itself."""

    _held = False

    def hold(self) -> None:
        self._held = True
        self._transport.pause_reading()

    def release(self) -> None:
        self._held = False
        if not self.read_paused:
            self._transport.resume_reading()

    def resume_reading(self) -> None:
        if self._held:
            self.read_paused = False
        else:
            super().resume_reading()

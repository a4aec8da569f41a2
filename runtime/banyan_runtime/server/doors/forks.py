"""Where a door has the processes from that prepare its requests: the front has them forked."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Final

from banyan_runtime.front.prepare.channel import Channel, ChannelError

HELLO_S: Final = 30.0


class DistantForks:
    """What a `PreparerPool` asks for workers (`pool.Forks`)."""

    def __init__(self, ask: Callable[[int], None]) -> None:
        """`ask`: sends a worker's end of its socket to the front."""
        self._ask = ask
        self.trouble = ""

    async def fork(self) -> Channel:
        """A fresh worker. Raises ChannelError."""
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:  # no file descriptor is left
            raise ChannelError(str(error)) from error
        channel = Channel(ours)
        self._ask(theirs.detach())
        try:
            async with asyncio.timeout(HELLO_S):
                await channel.greeting()
        except TimeoutError:
            raise ChannelError("the process that forks does not answer") from None
        return channel

    def close(self) -> None:
        """Workers end with their channels."""

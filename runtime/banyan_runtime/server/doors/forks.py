"""Where a door has the processes from that prepare its requests: the front has them forked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from banyan_runtime.front.prepare.worker_client import WorkerClient, WorkerGone

HELLO_S: Final = 10.0  # a fork takes milliseconds


class DistantForks:
    """What a `WorkerPool` asks for workers (`worker_pool.Forks`)."""

    def __init__(self, ask: Callable[[int], bool], on_lack: Callable[[], None]) -> None:
        """`ask`: sends a worker's end of its socket to the front. False: that is gone. `on_lack`: called when no worker came."""
        self._ask = ask
        self._on_lack = on_lack
        self.trouble = ""

    async def fork(self) -> WorkerClient:
        """A fresh worker. Raises WorkerGone."""
        channel, theirs = WorkerClient.pair()
        with theirs:
            if self._ask(theirs.fileno()):
                theirs.detach()  # which went there
        try:
            async with asyncio.timeout(HELLO_S):
                await channel.connect()
        except (TimeoutError, WorkerGone):
            self.trouble = "the process that forks does not answer"
            self._on_lack()
            raise WorkerGone(self.trouble) from None
        self.trouble = ""
        return channel

    def close(self) -> None:
        """Workers end with their channels."""

"""One request with one worker: sent, watched, and its plan taken in."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import msgspec

from banyan_runtime.front.errors import ApiError, internal
from banyan_runtime.front.plan import Endpoint, Plan
from banyan_runtime.front.prepare.channel import Channel, ChannelError
from banyan_runtime.front.prepare.frames import PLAN, RENDERING, TOKENIZING, request_head, unpack, unpack_head

log = logging.getLogger("banyan")

LOOK_EVERY_S: Final = 1.0
STALLED_LOOKS: Final = 5  # one after another at which a worker has computed nothing at all
RENDER_CPU_S: Final = 4.0  # of a template that does not end by itself after its 2 s of computing time


class Exchange:
    """One request, with one worker after another until one has planned it."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self.rendering = False  # the chat template is at work, and to blame for what happens
        self.stalled = False  # the last worker was ended because it did nothing

    async def run(self, channel: Channel, body: bytes | bytearray, request_id: str) -> tuple[Plan, bool]:
        """The plan, and whether the worker ends with it. Raises ChannelError when the worker ends or has to be ended, ApiError for
        a bug or an endless template."""
        self.rendering = self.stalled = False
        watch = _Watch(self, channel)
        try:
            await channel.send(request_head(self._endpoint, request_id.encode(), len(body)), body)
            while True:
                kind, content = await channel.frame()
                if kind == PLAN:
                    packed = unpack_head(content)
                    parts = [bytes(await channel.read(size)) for size in packed.sizes]
                    return unpack(packed, parts), packed.last
                if kind in (RENDERING, TOKENIZING):
                    self.rendering = kind == RENDERING
                    continue
                log.error("a request could not be planned:\n%s", msgspec.msgpack.decode(content))
                raise internal()
        except ChannelError:
            if watch.endless:
                raise template_failed("it did not end.") from None
            raise
        finally:
            watch.end()


class _Watch:
    """Ends a worker that does nothing, or does nothing but render. What counts is its computing time: on a busy machine, or one
    that was stopped for a while, time passes without anybody being to blame."""

    def __init__(self, exchange: Exchange, channel: Channel) -> None:
        self._exchange = exchange
        self._channel = channel
        self._cpu_s = -1.0  # at the last look
        self._idle_looks = 0
        self._render_from: float | None = None  # computing time when it was first seen to render
        self.endless = False
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(LOOK_EVERY_S, self._look)

    def end(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        cpu_s = self._channel.cpu_s
        self._idle_looks = self._idle_looks + 1 if cpu_s == self._cpu_s else 0
        self._cpu_s = cpu_s
        if not self._exchange.rendering:
            self._render_from = None
        elif self._render_from is None:
            self._render_from = cpu_s
        self.endless = self._render_from is not None and cpu_s - self._render_from > RENDER_CPU_S
        self._exchange.stalled = self._idle_looks >= STALLED_LOOKS
        if self.endless or self._exchange.stalled:
            self._channel.kill()  # whoever reads from it hears so
        self._timer = self._loop.call_later(LOOK_EVERY_S, self._look)


def template_failed(reason: str) -> ApiError:
    return ApiError(400, f"The chat template failed: {reason}", param="messages")

"""/health_generate: does the engine generate? However many ask, one token is being generated for them all, because nobody who
asks needs a key."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from banyan_runtime import wire
from banyan_runtime.front.engine_client import EngineClient
from banyan_runtime.front.submission import EngineError

GENERATE_LIMIT_S: Final = 20.0


class _Asking:
    """One request to the engine, and how many wait for its outcome."""

    def __init__(self, task: asyncio.Task[bool]) -> None:
        self.task = task
        self.callers = 0


class GenerationProbe:
    """Asks the engine for one token, by at most one request at a time."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._asking: _Asking | None = None

    async def generates(self) -> bool:
        """Whether the engine produces anything within 20 s of being asked; a busy one need not get to ours. Who comes while it is
        being asked gets the same answer; when the last who waits has left, the request is ended."""
        if self._asking is None or self._asking.task.done():
            self._asking = _Asking(asyncio.create_task(self._ask()))
        asking = self._asking
        asking.callers += 1
        try:
            return await asyncio.shield(asking.task)
        finally:
            asking.callers -= 1
            if not asking.callers:
                asking.task.cancel()
                if self._asking is asking:
                    self._asking = None

    async def _ask(self) -> bool:
        client = self._client
        asked = time.monotonic()
        try:
            sampling = wire.Sampling(max_new_tokens=1, temperature=0.0)
            async with asyncio.timeout(GENERATE_LIMIT_S), client.generate([0], sampling) as stream:
                async for _ in stream:
                    return True
        except EngineError as error:
            return error.code == "queue_full"  # the engine is alive enough to refuse
        except TimeoutError:
            return client.last_step > asked
        return False

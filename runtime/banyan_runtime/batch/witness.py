"""A line that was answered, sent once more: whether a server that refuses lines still serves what it has served.

Where other lines pass, they tell. At the end of a file there may be none left but those that are refused, and a gateway that has
lost its route looks the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from banyan_runtime.batch.asker import Asker
from banyan_runtime.batch.client import Answer, Client

MOST_BYTES: Final = 64 << 10  # of its request


class Witness(Asker):
    """Keeps the line that cost the server least, and asks with it whether it is served."""

    def __init__(self, client: Client, heard: Callable[[bytes, Answer, float], None], *, every_s: float) -> None:
        """`heard` is told of each answer: the request, the answer, and when it was sent. `every_s`: between two that failed."""
        super().__init__(every_s, after_yes_s=0.0)
        self._client = client
        self._heard = heard
        self._body: bytes | None = None
        self._cost = 0

    @property
    def known(self) -> bool:
        """Whether there is such a line."""
        return self._body is not None

    def offer(self, body: bytes, answer: Answer) -> None:
        """A line was answered."""
        if answer.status >= 300 or len(body) > MOST_BYTES:
            return
        cost = answer.usage.total_tokens if answer.usage is not None else len(body) + len(answer.body)
        if self._body is None or cost < self._cost:
            self._body, self._cost = body, cost

    async def _answer(self, now: float) -> bool:
        assert self._body is not None
        body = self._body
        reply = await self._client.post(body, await self._client.choose())
        if not isinstance(reply, Answer) or reply.status >= 300:
            return False
        self._heard(body, reply, now)
        return True

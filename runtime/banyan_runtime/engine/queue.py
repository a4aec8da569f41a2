"""The requests that wait: newcomers in the order of arrival, and before them the victims of retraction.

Finding, adding and removing cost O(1) however long the queue is, and no turn walks it further than it admits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from banyan_runtime.engine.request import Request


class WaitingQueue:
    """`victims` and `newcomers` are by request id, each in its order; only this class changes them."""

    def __init__(self) -> None:
        self.victims: dict[int, Request] = {}
        self.newcomers: OrderedDict[int, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self.victims) + len(self.newcomers)

    def append(self, request: Request) -> None:
        self.newcomers[request.id] = request

    def put_first(self, requests: Iterable[Request]) -> None:
        """Before everybody else; among themselves victims stand by arrival, so that none is passed over again and again."""
        waiting = [*self.victims.values(), *requests]
        self.victims = {request.id: request for request in sorted(waiting, key=lambda request: request.arrival)}

    def remove(self, request: Request) -> None:
        if self.victims.pop(request.id, None) is None:
            del self.newcomers[request.id]

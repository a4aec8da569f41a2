"""Plans made at once, in the caller's own time: for requests that take well under a millisecond, and for tests."""

from __future__ import annotations

from banyan_runtime.front.plan import Endpoint, Plan, Preparer
from banyan_runtime.front.prepare.planner import Planner


class InlinePreparer(Preparer):
    def __init__(self, planner: Planner) -> None:
        self._planner = planner

    async def plan(self, endpoint: Endpoint, body: bytes | bytearray, request_id: str) -> Plan:
        return self._planner.plan(endpoint, body, request_id)

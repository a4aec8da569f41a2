"""Plans that are made at once, on the event loop: of small requests that hold nothing which could take long, while few are served.

The way to a process beside the loop and back wakes two processes, which takes a lone request longer than its plan does. Where many are
served others' tokens wait behind each plan, so then all of them are made beside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from banyan_runtime.front.body import decode_object
from banyan_runtime.front.plan import Endpoint, Plan, Preparer
from banyan_runtime.front.prepare.planner import Planner

SMALL_BYTES: Final = 8192  # of a body: some 1,600 token ids, which are planned in a fifth of a millisecond
FEW: Final = 4  # requests that are planned or served: from so many on all are planned beside the loop, and nobody overtakes who waits there
QUICK_FIELDS: Final = frozenset({
    "model", "prompt", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos",
    "min_tokens", "frequency_penalty", "presence_penalty", "repetition_penalty", "logprobs", "stream", "stream_options",
    "skip_special_tokens", "user", "priority", "service_tier",
})  # fmt: skip
"""Of a completion: what costs no more than it is long. A grammar, a pattern, choices and a text that is to be tokenized may."""


class AtOnce(Preparer):
    """Plans such requests itself, and has all others planned by another."""

    def __init__(self, beside: Preparer, planner: Planner, served: Callable[[], int]) -> None:
        """`planner` needs no chat template. `served`: how many requests the engine has."""
        self._beside = beside
        self._planner = planner
        self._served = served
        self._planned_beside = 0

    async def plan(self, endpoint: Endpoint, body: bytes | bytearray, request_id: str) -> Plan:
        few = self._planned_beside + self._served() < FEW
        if few and endpoint == "completions" and len(body) <= SMALL_BYTES and _is_quick(asked := decode_object(body)):
            return self._planner.plan_of(endpoint, asked, request_id)
        self._planned_beside += 1
        try:
            return await self._beside.plan(endpoint, body, request_id)
        finally:
            self._planned_beside -= 1


def _is_quick(asked: Mapping[str, Any]) -> bool:
    prompt = asked.get("prompt")
    return isinstance(prompt, list) and bool(prompt) and type(prompt[0]) is int and asked.keys() <= QUICK_FIELDS

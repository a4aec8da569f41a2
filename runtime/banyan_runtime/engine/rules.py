"""The rules of scheduling that differ from SGLang 0.4.7's. A test replays that one's schedules with its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from banyan_runtime.engine.queue import WaitingQueue
from banyan_runtime.engine.request import Request
from banyan_runtime.engine.retraction import CLIP_MAX_NEW

GATHERING_STEPS: Final = 4  # decode steps that prompts wait since the last prefill step, at most, for others to share the next one with


class SchedulingRules:
    """Victims of retraction go first, and nobody overtakes them. Decode steps run between prefill steps, so neither a long prompt nor a
    stream of arrivals stops who runs. Short prompts do not wait until a long one is computed."""

    def put_back(self, queue: WaitingQueue, victims: Sequence[Request]) -> None:
        queue.put_first(victims)

    def charge(self, request: Request) -> int:
        """Output tokens that admission reckons `request` with."""
        return min(request.remaining, CLIP_MAX_NEW)

    def decodes_between(self, worth: bool) -> int:
        """Decode steps between two prefill steps, at least, while something runs. `worth`: as `Prefill.worth_a_step`."""
        return 1 if worth else GATHERING_STEPS

    def left_to_others(self, piece: int) -> int:
        """Tokens of a step that a piece of a longer prompt would fill, and that those behind it may have who need no more."""
        return piece // 2

"""The rules of scheduling that are a choice: ours, which are fair, and SGLang 0.4.7's, which replay its schedules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from banyan_runtime.engine.queue import WaitingQueue
from banyan_runtime.engine.request import Request
from banyan_runtime.engine.retraction import CLIP_MAX_NEW

GATHERING_STEPS: Final = 4  # decode steps that prompts wait since the last prefill step, at most, for others to share the next one with


class SchedulingRules(Protocol):
    """Where victims of retraction wait, what admission charges for output, how prefills and decodes alternate, and what a prompt in pieces
    leaves to others."""

    def put_back(self, queue: WaitingQueue, victims: Sequence[Request]) -> None: ...

    def charge(self, request: Request) -> int:
        """Output tokens that admission reckons `request` with."""

    def decodes_between(self, worth: bool) -> int:
        """Decode steps between two prefill steps, at least, while something runs. `worth`: as `Prefill.worth_a_step`."""

    def left_to_others(self, piece: int) -> int:
        """Tokens of a step that a piece of a longer prompt would fill, and that those behind it may have who need no more."""


class FairRules:
    """Victims go first and nobody overtakes them; a victim is charged what it may still generate. Running requests get their turn after
    each prefill step, so neither a long prompt nor a stream of arrivals stops them. Who arrives meanwhile shares the next prefill step, and
    waits a little for others to share it with where so few tokens are hardly worth one. Short prompts do not wait until a long one is
    computed."""

    def put_back(self, queue: WaitingQueue, victims: Sequence[Request]) -> None:
        queue.put_first(victims)

    def charge(self, request: Request) -> int:
        return min(request.remaining, CLIP_MAX_NEW)

    def decodes_between(self, worth: bool) -> int:
        return 1 if worth else GATHERING_STEPS

    def left_to_others(self, piece: int) -> int:
        return piece // 2


class SglangRules:
    """SGLang 0.4.7's rules to the letter: victims go last and are charged their full max_new_tokens; prefills always come
    before decodes."""

    def put_back(self, queue: WaitingQueue, victims: Sequence[Request]) -> None:
        for victim in victims:
            queue.append(victim)

    def charge(self, request: Request) -> int:
        return min(request.max_new, CLIP_MAX_NEW)

    def decodes_between(self, worth: bool) -> int:
        return 0

    def left_to_others(self, piece: int) -> int:
        return 0


RULES: Final[dict[str, type[SchedulingRules]]] = {"fair": FairRules, "sglang": SglangRules}

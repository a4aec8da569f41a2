"""What happens when the pool is full: how much output admission expects, who leaves, and where the victims wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from banyan_runtime.engine.queue import WaitingQueue
from banyan_runtime.engine.request import Request

INITIAL_RATIO: Final = 0.7
MINIMUM_FACTOR: Final = 0.14  # of the initial ratio
DECAY_STEPS: Final = 600  # decode steps from the initial ratio to the minimum
RETRACT_DECODE_STEPS: Final = 20  # decode steps that the survivors of a retraction must have room for
CLIP_MAX_NEW: Final = 4096  # tokens of output, at most, that admission reckons with
MAX_CONSECUTIVE_PREFILLS: Final = 4  # prefill steps that running requests wait for, at most, between two of their tokens


class NewTokenRatio:
    """The part of its max_new_tokens that a running request is expected to use.

    Starts at 0.7 * conservativeness, falls with each decode step that finds room, jumps after a retraction to what the
    survivors showed, and starts anew when the engine is idle.
    """

    def __init__(self, conservativeness: float) -> None:
        self._initial = min(INITIAL_RATIO * conservativeness, 1.0)
        self._minimum = self._initial * MINIMUM_FACTOR
        self._decay = (self._initial - self._minimum) / DECAY_STEPS
        self.value = self._initial

    def decay(self) -> None:
        self.value = max(self.value - self._decay, self._minimum)

    def reset(self) -> None:
        self.value = self._initial

    def learn(self, outputs: int, survivors: int, max_new: int) -> None:
        """`outputs` and `max_new` are sums over the `survivors` of a retraction."""
        self.value = min(1.0, (outputs + RETRACT_DECODE_STEPS * survivors) / max_new)


def keep_order(outputs: Sequence[int], prompts: Sequence[int]) -> list[int]:
    """Indices of the running requests, those to keep longest first: most outputs, then shortest prompt, then oldest.
    Victims come off the end, so what is thrown away is the least work done."""
    return sorted(range(len(outputs)), key=lambda index: (-outputs[index], prompts[index]))


class Requeue(Protocol):
    """Where victims wait, and what that asks of admission."""

    def put_back(self, queue: WaitingQueue, victims: Sequence[Request]) -> None: ...

    def charge(self, request: Request) -> int:
        """Output tokens that admission reckons `request` with."""

    def prefills_in_a_row(self, chunk_pending: bool) -> int | None:
        """Prefill steps that may follow one another while something decodes; None: without bound."""


class Front:
    """Victims go first and nobody overtakes them; a victim is charged what it may still generate. Running requests get
    their turn between prefills, so neither a long prompt nor a stream of arrivals stops them."""

    def put_back(self, queue: WaitingQueue, victims: Sequence[Request]) -> None:
        queue.put_first(victims)

    def charge(self, request: Request) -> int:
        return min(request.remaining, CLIP_MAX_NEW)

    def prefills_in_a_row(self, chunk_pending: bool) -> int | None:
        return 1 if chunk_pending else MAX_CONSECUTIVE_PREFILLS


class Tail:
    """SGLang 0.4.7's rules to the letter: victims go last and are charged their full max_new_tokens; prefills always come
    before decodes."""

    def put_back(self, queue: WaitingQueue, victims: Sequence[Request]) -> None:
        for victim in victims:
            queue.append(victim)

    def charge(self, request: Request) -> int:
        return min(request.max_new, CLIP_MAX_NEW)

    def prefills_in_a_row(self, chunk_pending: bool) -> int | None:
        return None


REQUEUES: Final[dict[str, type[Requeue]]] = {"front": Front, "tail": Tail}

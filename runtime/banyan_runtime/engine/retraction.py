"""What happens when the pool is full: how much output admission expects, and who leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

INITIAL_RATIO: Final = 0.7
MINIMUM_FACTOR: Final = 0.14  # of the initial ratio
DECAY_STEPS: Final = 600  # decode steps from the initial ratio to the minimum
RETRACT_DECODE_STEPS: Final = 20  # decode steps that the survivors of a retraction must have room for
CLIP_MAX_NEW: Final = 4096  # tokens of output, at most, that admission reckons with


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


def keep_order(levels: Sequence[int], outputs: Sequence[int], prompts: Sequence[int]) -> list[int]:
    """Indices of the running requests, those to keep longest first: highest level, then most outputs, shortest prompt, oldest.
    Victims come off the end, so what is thrown away is the least work done."""
    return sorted(range(len(outputs)), key=lambda index: (-levels[index], -outputs[index], prompts[index]))

"""What a step costs by the tokens computed in it: something for the weights and the launches, and as much more for each token.
Learnt from the steps."""

from __future__ import annotations

from typing import Final

WEIGHTS_WORTH: Final = 16.0  # tokens that take as long as reading the weights, where nothing is known
STEPS_REMEMBERED: Final = 0.98  # of what earlier steps count for, with each other one
COST_WEIGHT: Final = 1.0  # tokens², of the variance that what is expected of costs counts for, at least
MOST_TIMES: Final = 8  # the mean, that a step counts as


class StepCost:
    """Of steps of one kind. `spread`: how far steps must differ in their tokens, as a part of the mean, for what they say of tokens to
    count as much as what is expected of them. Steps of nearly the same size tell nothing but how much times differ."""

    def __init__(self, spread: float = 0.0) -> None:
        self._spread = spread
        self._weight = 0.0
        self._tokens = 0.0  # means over the steps
        self._seconds = 0.0
        self._variance = 0.0  # of tokens
        self._covariance = 0.0  # of tokens and seconds

    def learn(self, tokens: int, seconds: float) -> None:
        self._weight = STEPS_REMEMBERED * self._weight + 1
        share = 1 / self._weight
        if self.known:
            seconds = min(seconds, MOST_TIMES * self._seconds)  # a process that stood still says nothing of its steps
        off, late = tokens - self._tokens, seconds - self._seconds
        self._tokens += share * off
        self._seconds += share * late
        self._variance = (1 - share) * (self._variance + share * off * off)
        self._covariance = (1 - share) * (self._covariance + share * off * late)

    @property
    def known(self) -> bool:
        """Whether there was a step that took any time."""
        return self._seconds > 0

    def weights_worth(self) -> float:
        """Tokens that cost as much as a step costs beside its tokens, at least 0."""
        if not self.known:
            return WEIGHTS_WORTH
        expected = self._seconds / (WEIGHTS_WORTH + self._tokens)
        weight = COST_WEIGHT + (self._spread * self._tokens) ** 2
        each = (self._covariance + weight * expected) / (self._variance + weight)
        if each <= 0:
            return WEIGHTS_WORTH * WEIGHTS_WORTH
        return max(self._seconds / each - self._tokens, 0.0)

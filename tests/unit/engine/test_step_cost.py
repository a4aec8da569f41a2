"""What a step costs by its tokens, learnt from steps whose times are not exact."""

from __future__ import annotations

import numpy as np
import pytest

from banyan_runtime.engine.chunk_size import SPREAD
from banyan_runtime.engine.step_cost import WEIGHTS_WORTH, StepCost


@pytest.mark.parametrize(("weights", "each"), [(16.0, 1.0), (2.0, 1.0), (200.0, 1.0), (0.0, 3.0)])
def test_the_cost_of_a_step_is_learnt(weights: float, each: float) -> None:
    random, cost = np.random.default_rng(0), StepCost()
    for tokens in random.integers(1, 24, 400).tolist():
        cost.learn(tokens, (weights + each * tokens) * float(random.uniform(0.99, 1.01)) * 1e-3)
    assert cost.weights_worth() == pytest.approx(weights / each, rel=0.3, abs=1.0)


def test_where_all_steps_are_alike_what_is_expected_of_costs_stays() -> None:
    cost = StepCost()
    assert cost.weights_worth() == WEIGHTS_WORTH
    for _ in range(1000):
        cost.learn(5, 0.02)
    assert cost.weights_worth() == pytest.approx(WEIGHTS_WORTH)


def test_prompts_of_much_the_same_length_say_little_of_what_a_token_costs() -> None:
    for seed in range(20):
        random, cost = np.random.default_rng(seed), StepCost(SPREAD)
        for tokens in random.integers(126, 131, 400).tolist():
            cost.learn(tokens, 0.002 * tokens * float(random.uniform(0.7, 1.4)))
        assert cost.weights_worth() < 4 * WEIGHTS_WORTH, seed


@pytest.mark.parametrize(("fixed", "each"), [(1.2, 0.0024), (5.2, 0.029), (20.0, 2.5)])
def test_prompts_of_many_lengths_say_it(fixed: float, each: float) -> None:
    random, cost = np.random.default_rng(0), StepCost(SPREAD)
    for tokens in random.integers(50, 1500, 400).tolist():
        cost.learn(tokens, (fixed + each * tokens) * float(random.uniform(0.9, 1.2)) * 1e-3)
    assert cost.weights_worth() == pytest.approx(fixed / each, rel=0.3, abs=WEIGHTS_WORTH)

"""Drafts in the model: right ones are accepted, wrong ones leave no trace, and neither changes a bit of what comes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from banyan_runtime.model.runner import ModelRunner
from tests.support.models.driver import Driver, Request
from tests.support.models.tiny import TinyModel, gate

TinyModels = Callable[[str], TinyModel]
PROMPT = [5, 17, 40, 8, 99, 3]
NEW = 24


def texts(runner: ModelRunner, requests: list[Request], guess: Callable[[Request], list[int]], page_size: int = 1) -> int:
    """Runs the requests side by side, each step with the drafts that `guess` makes; returns the number of steps."""
    driver = Driver(runner, rows=len(requests), context=128, page_size=page_size, shuffle=1)
    steps = 0
    while not all(request.done for request in requests):
        work = [(request, len(request.tokens) - request.computed) for request in requests if not request.done]
        for request, _ in work:
            request.drafts = guess(request)[: request.new_tokens - len(request.output) - 1]
        driver.step(work)
        steps += 1
        # slots of wrong guesses are written again; which ones others got in between does not matter
        for request in requests:
            width = -(-request.computed // page_size) * page_size
            taken = driver.table[request.row, width:]
            driver.free += sorted({int(slot) // page_size for slot in taken[taken > 1].tolist()} - set(driver.free))
            driver.table[request.row, width:] = 1
    assert not any(request.failed for request in requests)
    return steps


def some_requests() -> list[Request]:
    return [
        Request(PROMPT, NEW, row=0, top_logprobs=3),
        Request([1, 2, 3], NEW, row=1, temperature=0.9, seed=11, top_logprobs=3, named=(7, 8)),
        Request([9] * 20, NEW, row=2, temperature=1.0, top_k=30, top_p=0.9, seed=1 << 60, bias={4: 3.0}),
        Request([7, 7], NEW, row=3, repetition_penalty=1.3, seed=5, temperature=0.7),
        Request([30, 31], NEW, row=4, allowed=tuple(range(0, 400, 3)), banned=(6, 9)),
    ]


@pytest.mark.parametrize("page_size", gate([16, 1]))
@pytest.mark.parametrize("family", gate(["qwen3", "mistral-window", "llama-576"]))
def test_drafts_change_no_bit_of_text_or_scores(tiny_model: TinyModels, family: str, page_size: int) -> None:
    runner = tiny_model(family).load(runner="native", max_total_tokens=1024, page_size=page_size)
    plain, drafted = some_requests(), some_requests()
    many = texts(runner, plain, lambda request: [], page_size)
    known = {request.row: request.output for request in plain}
    random = np.random.default_rng(3)

    def guess(request: Request) -> list[int]:
        if request.penalized:
            return []
        guesses = known[request.row][len(request.output) :][: int(random.integers(0, 7))]
        return [token if random.random() < 0.85 else int(random.integers(500)) for token in guesses]

    few = texts(runner, drafted, guess, page_size)
    assert few == many, "the one with penalties has no drafts"
    for one, other in zip(plain, drafted, strict=True):
        assert one.output == other.output
        for score, another in zip(one.logprobs, other.logprobs, strict=True):
            assert score.values.tobytes() == another.values.tobytes()
            assert score.top_ids.tobytes() == another.top_ids.tobytes()
            assert score.top_values.tobytes() == another.top_values.tobytes()
    assert min(request.accepted for request in drafted if not request.penalized) > 0
    assert min(request.refused for request in drafted if not request.penalized) > 0


def test_right_drafts_save_steps_and_wrong_ones_cost_none(tiny_model: TinyModels) -> None:
    model = tiny_model("llama")
    runner = model.load(max_total_tokens=512)
    expected = model.generate(PROMPT, NEW)
    right, wrong = Request(PROMPT, NEW, row=0), Request(PROMPT, NEW, row=0)
    assert texts(runner, [right], lambda request: expected[len(request.output) :][:5]) == NEW // 6
    assert texts(runner, [wrong], lambda request: [(expected[len(request.output)] + 1) % 503, 1, 2]) == NEW
    assert right.output == wrong.output == expected
    assert right.refused == wrong.accepted == 0


def test_the_token_after_a_step_with_drafts_is_the_last_that_counts(tiny_model: TinyModels) -> None:
    """A step may name it by a negative id, as one that is launched without looking at it."""
    model = tiny_model("llama")
    driver = Driver(model.load(max_total_tokens=512), rows=1, context=64)
    expected = model.generate(PROMPT, 6)
    request = Request(PROMPT, 6, row=0, drafts=[expected[0], expected[1], 0 if expected[2] else 1, 7])
    driver.step([(request, len(PROMPT))])
    assert request.output == expected[:3]
    step = driver.build([(request, 1)])
    result = driver.runner.launch(replace(step, token_ids=np.full(1, -1, np.int32))).result()
    assert result.accepted is None
    assert result.token_ids.tolist() == expected[3:4]


def test_a_row_whose_first_draw_fails_fails_alone(tiny_model: TinyModels) -> None:
    model = tiny_model("qwen3")
    driver = Driver(model.load(max_total_tokens=512), rows=2, context=64)
    expected = model.generate(PROMPT, 3)
    none = Request(PROMPT, 3, row=0, drafts=[1, 2], banned=tuple(range(503)))
    some = Request(PROMPT, 3, row=1, drafts=expected[:2])
    result = driver.runner.launch(driver.build([(none, len(PROMPT)), (some, len(PROMPT))])).result()
    assert result.failed.tolist() == [True, False]
    assert result.token_ids.tolist() == [-1, -1, -1, *expected]
    assert result.accepted is not None
    assert result.accepted.tolist() == [1, 3]


def test_a_draw_that_fails_behind_a_right_draft_does_not_count(tiny_model: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that begins there fails, as it would have without drafts."""
    model = tiny_model("qwen3")
    runner = model.load(max_total_tokens=512)
    driver = Driver(runner, rows=1, context=64)
    expected = model.generate(PROMPT, 4)
    whole, broken = runner.forward.logits, [2, 0]  # in the first step the third draw, in the next the first

    def failing(hidden: torch.Tensor) -> torch.Tensor:
        logits = whole(hidden)
        logits[broken.pop(0)] = float("nan")
        return logits

    monkeypatch.setattr(runner.forward, "logits", failing)
    request = Request(PROMPT, 4, row=0, drafts=expected[:3], top_logprobs=0)  # scores need logits
    driver.step([(request, len(PROMPT))])
    assert request.output == expected[:2]
    assert not request.failed
    driver.step([(request, 1)])
    assert request.failed

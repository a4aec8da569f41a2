"""lm-eval against a real server, with tasks of ours: no hub, and no tokenizer but the server's."""

from __future__ import annotations

from typing import Any

import httpx2 as httpx
import pytest

from tests.e2e.clients.conftest import Answers, Told
from tests.support.server.process import ServerProcess

pytestmark = pytest.mark.timeout(1500)  # with the installation, once


@pytest.fixture(scope="module")
def answers(told: Told) -> Answers:
    return told("use_lm_eval", "lm-eval")


def test_a_choice_is_scored_by_the_likelihood_of_its_tokens(answers: Answers, server: ServerProcess) -> None:
    (first, *_) = answers("completions")["choice"][0]
    likelihood, greedy = first
    assert greedy
    assert likelihood == pytest.approx(by_hand(server, "The capital of France is", " Paris"), abs=1e-4)


def by_hand(server: ServerProcess, context: str, continuation: str) -> float:
    """The continuation's log probability, token by token: each as the next of a prompt that is computed anew."""
    ids = [
        server.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()["tokens"]
        for text in (context, context + continuation)
    ]
    total = 0.0
    for at in range(len(ids[0]), len(ids[1])):
        asked: dict[str, Any] = {"model": "tiny", "prompt": ids[1][: at + 1], "echo": True, "max_tokens": 0, "logprobs": 0}
        answer: httpx.Response = server.post("/v1/completions", asked)
        total += answer.json()["choices"][0]["logprobs"]["token_logprobs"][at]
    return total


def test_known_capitals_are_chosen(answers: Answers) -> None:
    assert answers("completions")["metrics"]["capitals_choice"]["acc,none"] == 0.75


def test_a_likelihood_does_not_depend_on_the_batch_or_the_cache(answers: Answers) -> None:
    told = answers("few_shot")
    assert told == answers("few_shot_again")
    assert sum(choices.index(max(choices)) == right for choices, right in zip(told, (0, 1, 2), strict=False)) == 3


def test_a_rolling_likelihood_scores_every_token_of_a_text(answers: Answers) -> None:
    for (likelihood,) in answers("completions")["rolling"]:
        assert likelihood < 0


def test_texts_are_generated_up_to_more_than_four_stop_strings(answers: Answers) -> None:
    assert answers("completions")["text"][:3] == [[" Paris."], [" Oslo."], [" Madrid."]]


def test_chats_are_answered(answers: Answers) -> None:
    assert answers("chat")[:3] == [[f"The capital of {country}."] for country in ("France is Paris", "Norway is Oslo", "Spain is Madrid")]

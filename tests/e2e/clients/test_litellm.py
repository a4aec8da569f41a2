"""litellm against a real server, as a provider of OpenAI's API and as one of vLLM's."""

from __future__ import annotations

import json

import pytest

from tests.e2e.clients.conftest import Answers, Told

pytestmark = pytest.mark.timeout(1500)  # with the installation, once
PARIS = "The capital of France is Paris."


@pytest.fixture(scope="module")
def answers(told: Told) -> Answers:
    return told("use_litellm", "frameworks")


def test_both_providers_bring_text_reasoning_and_usage(answers: Answers) -> None:
    for answer in answers("completion"):
        assert answer["text"] == PARIS
        assert "Paris" in answer["reasoning"]
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


def test_a_stream_brings_the_text_and_one_usage(answers: Answers) -> None:
    for answer, whole in zip(answers("stream"), answers("completion"), strict=True):
        assert answer["text"] == answer["built"] == PARIS
        (usage,) = answer["usages"]
        assert usage["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_several_can_be_asked_at_once(answers: Answers) -> None:
    assert answers("asynchronous") == [PARIS, PARIS]


def test_reasoning_effort_is_taken(answers: Answers) -> None:
    assert all(answers("reasoning_effort"))


def test_tools_are_called_streamed_or_not(answers: Answers) -> None:
    for told in answers("tools"):
        ((name, arguments),) = told["whole"]
        assert (name, json.loads(arguments)) == ("get_weather", {"city": "Oslo"})
        assert told["stream"] == told["whole"]
        assert told["reason"] == "tool_calls"


def test_a_class_as_response_format_is_kept_to(answers: Answers) -> None:
    for text in answers("structured"):
        visit = json.loads(text)
        assert set(visit) == {"city", "days"}
        assert visit["days"] in (1, 2, 3)


def test_text_completions_are_answered(answers: Answers) -> None:
    assert answers("text_completion")


def test_embeddings_are_numbers_for_both_providers(answers: Answers) -> None:
    assert answers("embeddings") == [[128, 128], [128, 128]]


def test_rerank_puts_the_best_document_first(answers: Answers) -> None:
    (best, first), (_, second) = answers("rerank")
    assert best == 1  # the document that is the query
    assert first > second


def test_a_prompt_that_is_too_long_is_known_as_such(answers: Answers) -> None:
    assert answers("overflow") == [400, 400]  # of ContextWindowExceededError, once for each provider


def test_an_unknown_model_is_named(answers: Answers) -> None:
    assert "The model `nobody` does not exist" in (answers("unknown_model") or "no NotFoundError")

"""pydantic-ai against a real server."""

from __future__ import annotations

import pytest

from tests.e2e.clients.conftest import Answers, Told

pytestmark = pytest.mark.timeout(1500)  # with the installation, once
PARIS = "The capital of France is Paris."


@pytest.fixture(scope="module")
def answers(told: Told) -> Answers:
    return told("use_pydantic_ai", "frameworks")


def test_an_agent_answers_with_text_and_usage(answers: Answers) -> None:
    answer = answers("run")
    assert answer["text"] == PARIS
    assert answer["output_tokens"] > 0


@pytest.mark.parametrize("way", ["tool_output", "native_output"])
def test_an_agents_output_is_an_object_of_the_class(answers: Answers, way: str) -> None:
    visit = answers(way)
    assert visit["city"] in ("Oslo", "Paris")  # which one the small model says differs between processors
    assert 1 <= visit["days"] <= 9


def test_an_agents_text_can_be_streamed(answers: Answers) -> None:
    assert answers("stream") == PARIS

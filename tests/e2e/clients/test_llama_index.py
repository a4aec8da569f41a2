"""llama-index' OpenAILike against a real server."""

from __future__ import annotations

import pytest

from tests.e2e.clients.conftest import Answers, Told

pytestmark = pytest.mark.timeout(1500)  # with the installation, once
PARIS = "The capital of France is Paris."


@pytest.fixture(scope="module")
def answers(told: Told) -> Answers:
    return told("use_llama_index", "frameworks")


def test_reasoning_and_text_are_blocks_of_the_message(answers: Answers) -> None:
    assert answers("chat") == {"text": PARIS, "blocks": ["ThinkingBlock", "TextBlock"]}


@pytest.mark.parametrize("way", ["stream", "asynchronous"])
def test_every_way_of_asking_gets_the_same_text(answers: Answers, way: str) -> None:
    assert answers(way) == PARIS


def test_completions_stream_what_they_answer(answers: Answers) -> None:
    whole, streamed = answers("completion")
    assert whole == streamed != ""


@pytest.mark.parametrize("way", ["structured", "structured_without_tools"])
def test_a_structured_prediction_is_an_object_of_the_class(answers: Answers, way: str) -> None:
    visit = answers(way)
    assert visit["city"] in ("Paris", "Oslo")
    assert 1 <= visit["days"] <= 9


def test_a_structured_prediction_can_be_streamed(answers: Answers) -> None:
    assert answers("structured_stream")["city"] in ("Paris", "Oslo")


def test_a_tool_loop_runs_to_its_end(answers: Answers) -> None:
    assert answers("tools")["calls"] == [["get_weather", {"city": "Oslo"}]]

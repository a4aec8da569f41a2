"""langchain-openai against a real server."""

from __future__ import annotations

import json
import math

import pytest

from tests.e2e.clients.conftest import Answers, Told

pytestmark = pytest.mark.timeout(1500)  # with the installation, once
PARIS = "The capital of France is Paris."


@pytest.fixture(scope="module")
def answers(told: Told) -> Answers:
    return told("use_langchain", "frameworks")


def test_an_answer_has_its_text_its_usage_and_its_reason(answers: Answers) -> None:
    answer = answers("invoke")
    assert (answer["text"], answer["reason"]) == (PARIS, "stop")
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert 0 < usage["output_token_details"]["reasoning"] < usage["output_tokens"]


def test_a_streams_usage_comes_once_and_at_its_end(answers: Answers) -> None:
    stream = answers("stream")
    assert "".join(stream["texts"]) == PARIS
    told = [index for index, usage in enumerate(stream["usages"]) if usage]
    assert len(told) == 1
    assert not any(stream["texts"][told[0] :])
    assert stream["usages"][told[0]]["output_tokens"] == answers("invoke")["usage"]["output_tokens"]


def test_several_can_be_asked_at_once(answers: Answers) -> None:
    assert answers("asynchronous") == [PARIS] * 4


def test_log_probabilities_come_with_the_most_likely_tokens(answers: Answers) -> None:
    for entry in answers("logprobs"):
        assert len(entry["top_logprobs"]) == 2
        assert entry["logprob"] == entry["top_logprobs"][0]["logprob"]


@pytest.mark.parametrize("method", ["json_schema", "json_schema_strict", "function_calling"])
def test_structured_output_is_an_object_of_the_model_class(answers: Answers, method: str) -> None:
    answer = answers(method)
    assert answer["parsed"] is not None, answer
    assert answer["parsed"]["city"] == "Oslo"


def test_json_mode_answers_with_an_object(answers: Answers) -> None:
    assert isinstance(json.loads(answers("json_mode")["text"]), dict)


def test_structured_output_can_be_streamed(answers: Answers) -> None:
    assert answers("structured_stream")["city"] == "Oslo"


def test_a_tool_loop_runs_to_its_end(answers: Answers) -> None:
    loop = answers("tools")
    assert loop["calls"] == loop["streamed"] == [["get_weather", {"city": "Oslo"}]]
    assert loop["reasons"][0] == "tool_calls"


def test_a_named_tool_is_called_whatever_is_said(answers: Answers) -> None:
    ((name, arguments),) = answers("named_tool")
    assert name == "get_weather"
    assert set(arguments) == {"city"}


def test_embeddings_of_one_and_of_several_agree(answers: Answers) -> None:
    told = answers("embeddings")
    assert told["one"] == told["later"] == told["several"][0]
    assert math.isclose(math.hypot(*told["one"]), 1, rel_tol=1e-3)


def test_completions_answer_each_prompt_and_stream_the_same(answers: Answers) -> None:
    told = answers("completions")
    assert len(told["whole"]) == 2
    assert told["stream"] == told["whole"][0]
    assert told["usage"]["total_tokens"] == told["usage"]["prompt_tokens"] + told["usage"]["completion_tokens"]


def test_a_prompt_that_is_too_long_is_known_as_such(answers: Answers) -> None:
    assert "maximum context length is 2048 tokens" in (answers("overflow") or "no ContextOverflowError")


def test_a_schema_that_cannot_be_is_refused_with_its_reason(answers: Answers) -> None:
    kind, message = answers("bad_schema")
    assert kind == "BadRequestError"
    assert "Invalid schema for response_format 'visit'" in message.replace("\\'", "'")  # as Python shows it

"""OpenAI's own client, asynchronous, in the version that we test with and in the one that frameworks ask for; and Anthropic's."""

from __future__ import annotations

import pytest

from tests.e2e.clients.conftest import Answers, Told

pytestmark = pytest.mark.timeout(1500)  # with the installation, once
PARIS = "The capital of France is Paris."


@pytest.fixture(scope="module", params=[None, "frameworks"], ids=["openai 3", "openai 2"])
def answers(told: Told, request: pytest.FixtureRequest) -> Answers:
    return told("use_openai", request.param)


def test_the_version_is_the_one_that_is_meant(answers: Answers, request: pytest.FixtureRequest) -> None:
    assert answers("versions")["openai"][0] == request.node.callspec.id[-1]


def test_parse_brings_an_object_of_the_class(answers: Answers) -> None:
    assert answers("parse")["city"] == "Oslo"


def test_parse_brings_the_arguments_of_a_tool_as_its_class(answers: Answers) -> None:
    ((name, arguments),) = answers("parse_tools")
    assert name == "GetWeather"
    assert set(arguments) == {"city"}


def test_an_answer_that_is_cut_raises_that_it_is(answers: Answers) -> None:
    assert answers("parse_cut") == 12  # tokens, of the completion in LengthFinishReasonError


def test_a_stream_of_events_ends_with_an_object_and_the_usage(answers: Answers) -> None:
    told = answers("stream")
    assert {"chunk", "content.delta", "content.done"} <= set(told["kinds"])
    assert told["parsed"] == answers("parse")
    assert told["usage"]["total_tokens"] == told["usage"]["prompt_tokens"] + told["usage"]["completion_tokens"]


def test_a_streamed_tool_call_is_done_once_and_whole(answers: Answers) -> None:
    told = answers("stream_tools")
    assert told["events"] == [told["call"]]


def test_a_tools_result_is_taken_back(answers: Answers) -> None:
    assert answers("tool_loop")[0] == "tool_calls"


def test_many_at_once_get_what_one_alone_gets(answers: Answers) -> None:
    assert answers("many") == [[PARIS, PARIS]] * 16


def test_responses_are_answered_streamed_kept_and_parsed(answers: Answers) -> None:
    told = answers("responses")
    assert told["text"] == told["stream"] == told["kept"] == PARIS
    assert told["parsed"]["city"] == "Oslo"


def test_packed_embeddings_are_the_plain_ones(answers: Answers) -> None:
    packed, plain = answers("embeddings")
    for one, other in zip(packed, plain, strict=True):
        assert one == pytest.approx(other, abs=1e-6)


def test_a_prompt_that_is_too_long_is_refused_with_code_field_and_id(answers: Answers) -> None:
    code, field, message, request_id = answers("overflow")
    assert (code, field) == ("context_length_exceeded", "messages")
    assert "context_length_exceeded" in message  # clients of openai 3 see nothing but the message
    assert request_id


def test_models_are_listed_and_found(answers: Answers) -> None:
    assert answers("models") == [["tiny"], "tiny"]


def test_anthropics_client_gets_an_answer_a_stream_and_a_count(told: Told) -> None:
    answer = told("use_anthropic", "frameworks")("messages")
    assert answer["text"] == answer["stream"] == PARIS
    assert answer["prompt"] == answer["count"]

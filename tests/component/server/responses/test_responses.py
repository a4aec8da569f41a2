"""The Responses API through the real `openai` client, against a real server of the small trained model."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.component.server.responses.conftest import CAPITAL, ENDS, TOOL, WEATHER, ask, lasting, stream
from tests.support.server.process import MODEL, ServerProcess

# --- create ---


def test_a_response_has_thoughts_and_a_message_and_repeats_its_request(client: openai.OpenAI) -> None:
    response = ask(client, instructions="Be brief.", metadata={"trip": "1"}, user="me", parallel_tool_calls=False)
    thoughts, message = response.output
    assert (thoughts.type, message.type) == ("reasoning", "message")
    assert re.fullmatch(r"rs_[0-9a-f]{40}", str(thoughts.id))
    assert re.fullmatch(r"msg_[0-9a-f]{40}", str(message.id))
    assert "Paris" in response.output_text
    assert response.status == "completed"
    assert response.completed_at is not None
    assert response.completed_at >= response.created_at
    assert (response.error, response.incomplete_details) == (None, None)
    repeated = (response.instructions, response.metadata, response.user, response.temperature, response.max_output_tokens, response.model)
    assert repeated == ("Be brief.", {"trip": "1"}, "me", 0, 256, MODEL)
    assert (response.parallel_tool_calls, response.truncation, response.tool_choice, response.tools) == (False, "disabled", "auto", [])
    assert response._request_id


def test_usage_counts_every_token(client: openai.OpenAI) -> None:
    usage = ask(client).usage
    again = ask(client).usage
    assert usage is not None
    assert again is not None
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens
    assert again.input_tokens_details.cached_tokens > 0
    counted = client.responses.input_tokens.count(model=MODEL, input=CAPITAL)
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", usage.input_tokens)


def test_one_that_is_cut_off_says_why(client: openai.OpenAI) -> None:
    response = ask(client, max_output_tokens=3)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert [item.status for item in response.output] == ["incomplete"]
    assert response.completed_at is None
    *_, last = stream(client, max_output_tokens=3)
    assert last.type == "response.incomplete"
    assert lasting(last.response) == lasting(response)


@pytest.mark.parametrize(
    ("given", "options"),
    [
        (CAPITAL, {}),
        (CAPITAL, {"include": ["message.output_text.logprobs"], "top_logprobs": 2}),
        (WEATHER, {"tools": [TOOL]}),
        (WEATHER, {"tools": [TOOL], "tool_choice": "required", "reasoning": {"effort": "none"}}),
        (
            [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}],
            {"text": {"format": {"type": "json_object"}}, "max_output_tokens": 60},
        ),
    ],
)
def test_streamed_events_joined_are_the_whole_answer(client: openai.OpenAI, given: Any, options: dict[str, Any]) -> None:
    whole = ask(client, given, **options)
    events = stream(client, given, **options)
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert [event.type for event in events if event.type in ENDS] == [events[-1].type] == [f"response.{whole.status}"]
    assert lasting(events[-1].response) == lasting(whole)
    for place, item in enumerate(events[-1].response.output):
        own = [event for event in events if getattr(event, "output_index", None) == place]
        assert own[0].type == "response.output_item.added"
        assert (own[0].item.status, getattr(own[0].item, "content", None) or None) == ("in_progress", None)
        assert own[-1].type == "response.output_item.done"
        assert own[-1].item == item
        assert {getattr(event, "item_id", item.id) for event in own} == {item.id}
        joined = "".join(event.delta for event in own if event.type.endswith(".delta"))
        if item.type == "function_call":
            assert joined == item.arguments == next(event.arguments for event in own if event.type.endswith("arguments.done"))
            assert own[0].item.call_id == item.call_id
            continue
        (part,) = item.content
        middle = [event.type.removeprefix("response.").partition(".")[2] for event in own[1:-1] if not event.type.endswith(".delta")]
        assert middle == ["added", "done", "done"]  # of the part, of its text, of the part
        assert joined == part.text == own[-3].text
        assert own[1].part.text == ""
        assert own[-2].part.model_dump() == part.model_dump()
        if options.get("top_logprobs") and item.type == "message":
            told = [one for event in own if event.type.endswith("text.delta") for one in event.logprobs]
            assert [one.token for one in told] == [one.token for one in part.logprobs][: len(told)]
            assert part.text in "".join(one.token for one in told)
            assert all(len(one.top_logprobs) == 2 for one in told)


def test_what_ends_an_answer_does_not_end_the_thoughts_before_it(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "extra_body": {"stop": ["capital", "Oslo"]}, "include": ["message.output_text.logprobs"], "top_logprobs": 2,
    }  # fmt: skip
    response = ask(client, **options)
    thoughts, message = response.output
    assert "capital of France" in thoughts.content[0].text
    assert (response.output_text, response.status) == ("The ", "completed")
    assert "The" in [one.token for one in message.content[0].logprobs]
    *_, last = stream(client, **options)
    assert lasting(last.response) == lasting(response)


def test_fields_that_nobody_knows_are_named_wherever_they_stand(client: openai.OpenAI, server: ServerProcess) -> None:
    part = {"type": "input_text", "text": "Hi", "mood": "bad"}
    body = {
        "model": MODEL, "input": [{"role": "user", "content": [part], "weight": 2, "status": "completed"}], "max_output_tokens": 4,
        "wings": 2,
        "text": {"verbosity": "high", "font": "x"}, "reasoning": {"summary": "auto", "depth": 3}, "tools": [{**TOOL, "colour": "red"}],
        "include": ["reasoning.encrypted_content"], "temperature": 0, "seed": 1, "user": "me", "stop": None,
    }  # fmt: skip
    wanted = [
        "text.verbosity", "reasoning.summary", "include", "wings", "text.font", "reasoning.depth", "tools[0].colour",
        "input[0].weight", "input[0].content[0].mood",
    ]  # fmt: skip
    for more in ({}, {"stream": True}, {"background": True}):
        answer = server.post("/v1/responses", {**body, **more})
        assert answer.status_code == 200
        assert answer.headers["x-banyan-ignored"].split(", ") == wanted
    assert server.post("/v1/responses/input_tokens", body).headers["x-banyan-ignored"].split(", ") == wanted


# --- structured output and tools ---


class Place(pydantic.BaseModel):
    city: Literal["Paris", "Oslo"]
    days: int = pydantic.Field(ge=1, le=9)


def test_parse_and_stream_give_what_was_asked_for(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "input": CAPITAL, "text_format": Place, "temperature": 0, "max_output_tokens": 256}
    parsed = client.responses.parse(**options)
    assert isinstance(parsed.output_parsed, Place)
    with client.responses.stream(**options) as events:
        kinds = {event.type for event in events}
        final = events.get_final_response()
    assert {"response.reasoning_text.delta", "response.output_text.delta", "response.output_text.done", "response.completed"} <= kinds
    assert final.output_parsed == parsed.output_parsed


def test_a_loop_of_calls_runs_to_its_end_with_the_items_of_the_answer(client: openai.OpenAI) -> None:
    items: list[Any] = [{"role": "user", "content": WEATHER}]
    first = ask(client, items, tools=[TOOL])
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert (call.name, json.loads(call.arguments), call.status) == ("get_weather", {"city": "Oslo"}, "completed")
    items += [item.model_dump() for item in first.output]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": '{"degrees": 21}'})
    assert ask(client, items, tools=[TOOL]).status == "completed"
    result: Any = [items[-1]]
    chained = ask(client, result, tools=[TOOL], previous_response_id=first.id)
    assert lasting(chained.output) == lasting(ask(client, items, tools=[TOOL]).output)


def test_a_call_that_is_cut_off_is_incomplete_and_its_conversation_goes_on(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required"}
    whole = ask(client, WEATHER, **options)
    assert whole.usage is not None
    cut = ask(client, WEATHER, **options, max_output_tokens=whole.usage.output_tokens - 6)
    assert (cut.status, cut.output[-1].type, getattr(cut.output[-1], "status", None)) == ("incomplete", "function_call", "incomplete")
    assert ask(client, "Hello", previous_response_id=cut.id).status == "completed"


def test_instructions_and_developer_items_reach_the_model_in_their_order(client: openai.OpenAI) -> None:
    """Under this server's template, which shows a system turn at the beginning alone."""
    developer = [{"role": "developer", "content": text} for text in ("Be kind.", "Be brief.")]
    question: Any = {"role": "user", "content": "Hi"}
    tokens: dict[str, int] = {}
    for title, given, more in (
        ("joined", [{"role": "system", "content": "Be kind.\n\nBe brief."}, question], {}),
        ("two items", [*developer, question], {}),
        ("instructions", [developer[1], question], {"instructions": "Be kind."}),
        ("in the user's", [{"role": "user", "content": "Hi\n\nBe kind.\n\nBe brief."}], {}),
        ("later", [question, *developer], {}),
    ):
        options: Any = {"model": MODEL, "input": given, **more}
        answer = client.responses.create(**options, max_output_tokens=2)
        assert answer.usage is not None
        tokens[title] = answer.usage.input_tokens
        assert client.responses.input_tokens.count(**options).input_tokens == tokens[title]
    assert tokens["two items"] == tokens["instructions"] == tokens["joined"]
    assert tokens["later"] == tokens["in the user's"]


def test_with_truncation_the_oldest_items_are_left_out_of_an_input_that_does_not_fit(client: openai.OpenAI) -> None:
    assert ask(client, truncation="auto", max_output_tokens=4).truncation == "auto"
    said = [{"role": "user", "content": "Hello " * 300}, {"role": "assistant", "content": "Hello " * 300}]
    given: Any = [*said, {"role": "user", "content": CAPITAL}]
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, given)
    assert refused.value.code == "context_length_exceeded"
    first = ask(client, given, truncation="auto")
    rest = ask(client, given[1:])
    assert (first.truncation, first.output_text) == ("auto", rest.output_text)
    assert first.usage is not None
    assert rest.usage is not None
    assert first.usage.input_tokens == rest.usage.input_tokens > 1000
    counted = client.responses.input_tokens.count(model=MODEL, input=given, truncation="auto")
    assert counted.input_tokens == first.usage.input_tokens
    assert len(client.responses.input_items.list(first.id).data) == 3
    assert ask(client, "And of Norway?", previous_response_id=first.id, truncation="auto", max_output_tokens=4).output


@pytest.mark.parametrize("path", ["/v1/responses/compact", "/v1/conversations"])
def test_what_is_not_served_is_an_unknown_path(server: ServerProcess, path: str) -> None:
    answer = server.post(path, {"model": MODEL, "input": "Hello"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url")


# --- errors ---


@pytest.mark.parametrize(
    ("options", "param", "code"),
    [
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content", "invalid_type"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id", "missing_required_parameter"),
        ({"background": True, "store": False}, "background", "invalid_value"),
        ({"max_output_tokens": 5000}, "max_output_tokens", "context_length_exceeded"),
        ({"model": "x"}, "model", "model_not_found"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_what_is_wrong_is_named_in_the_words_of_the_request(
    client: openai.OpenAI, options: dict[str, Any], param: str, code: str, streaming: bool
) -> None:
    """All that is wrong with responses is in tests/unit/front/test_refusals.py."""
    with pytest.raises(openai.APIStatusError) as refused:
        client.responses.create(model=MODEL, input="Hello", stream=streaming, extra_body=options)  # type: ignore[call-overload]
    assert (refused.value.status_code, refused.value.param, refused.value.code) == (404 if param == "model" else 400, param, code)


def test_the_async_client_creates_streams_and_parses(server: ServerProcess) -> None:
    async def scenario() -> None:
        options: dict[str, Any] = {"model": MODEL, "input": CAPITAL, "temperature": 0, "max_output_tokens": 256}
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="None", max_retries=0) as client:
            whole, parsed = await asyncio.gather(client.responses.create(**options), client.responses.parse(**options, text_format=Place))
            assert isinstance(parsed.output_parsed, Place)
            text = ""
            async for event in await client.responses.create(**options, stream=True):
                text += event.delta if event.type == "response.output_text.delta" else ""
            assert text == whole.output_text
            async with client.responses.stream(**options, text_format=Place) as events:
                assert (await events.get_final_response()).output_parsed == parsed.output_parsed

    asyncio.run(scenario())

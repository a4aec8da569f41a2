"""The Responses API through the real `openai` client, against a real server of the small trained model."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

import httpx2 as httpx
import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseInputItemParam

from banyan_runtime.front.deadline import HEADER as TIMEOUT
from tests.server.conftest import MODEL, ServerProcess, StartServer
from tests.storage.servers import S3Server, moto

CAPITAL: Final = "What is the capital of France?"
WEATHER: Final = "What is the weather in Oslo?"
CITY: Final[dict[str, Any]] = {
    "type": "object", "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}}, "required": ["city"],
    "additionalProperties": False,
}  # fmt: skip
TOOL: Final[dict[str, Any]] = {"type": "function", "name": "get_weather", "parameters": CITY}
LONG: Final[dict[str, Any]] = {"max_output_tokens": 1900, "extra_body": {"ignore_eos": True}}
ENDS: Final = ("response.completed", "response.incomplete", "response.failed")


@dataclass(frozen=True)
class Bucket:
    """Where the servers of this module keep responses."""

    s3: S3Server
    name: str = "kept"

    def holds(self, response_id: str) -> bool:
        listed = self.s3.settings().client().list_objects_v2(Bucket=self.name)
        return any(response_id in one["Key"] for one in listed.get("Contents", ()))


@pytest.fixture(scope="module")
def bucket() -> Iterator[Bucket]:
    with moto() as s3:
        s3.settings().client().create_bucket(Bucket=Bucket.name)
        yield Bucket(s3)


FLAGS: Final = ("--reasoning-parser", "qwen3", "--file-storage-path", f"s3://{Bucket.name}/here")


@pytest.fixture(scope="module")
def server(start_server: StartServer, bucket: Bucket) -> ServerProcess:
    return start_server(*FLAGS, environment=bucket.s3.environment()).ready()


def client_of(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="None", max_retries=0)


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return client_of(server)


def ask(client: openai.OpenAI, given: Any = CAPITAL, **options: Any) -> Response:
    response: Response = client.responses.create(model=MODEL, input=given, **{"temperature": 0, "max_output_tokens": 256, **options})
    return response


def stream(client: openai.OpenAI, given: Any = CAPITAL, **options: Any) -> list[Any]:
    """The events, after a look at their numbers."""
    options = {"temperature": 0, "max_output_tokens": 256, **options}
    events = list(client.responses.create(model=MODEL, input=given, stream=True, **options))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events


_PASSING: Final = ("id", "created_at", "completed_at", "call_id", "cached_tokens")


def lasting(value: Any) -> Any:
    """What two answers to the same request have in common."""
    if isinstance(value, pydantic.BaseModel):
        value = value.model_dump()
    if isinstance(value, dict):
        return {name: lasting(one) for name, one in value.items() if name not in _PASSING}
    return [lasting(one) for one in value] if isinstance(value, list) else value


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
            assert [one.token for one in told] == [one.token for one in part.logprobs]
            assert "".join(one.token for one in told) == part.text
            assert all(len(one.top_logprobs) == 2 for one in told)


def test_fields_that_nobody_knows_are_named_wherever_they_stand(client: openai.OpenAI, server: ServerProcess) -> None:
    part = {"type": "input_text", "text": "Hi", "mood": "bad"}
    body = {
        "model": MODEL, "input": [{"role": "user", "content": [part], "weight": 2, "status": "completed"}], "max_output_tokens": 4,
        "wings": 2,
        "text": {"verbosity": "high", "font": "x"}, "reasoning": {"summary": "auto", "depth": 3}, "tools": [{**TOOL, "colour": "red"}],
        "include": ["reasoning.encrypted_content"], "temperature": 0, "seed": 1, "user": "me", "stop": None,
    }  # fmt: skip
    wanted = [
        "text.verbosity", "reasoning.summary", "include", "wings", "text.font", "reasoning.depth", "input[0].weight",
        "input[0].content[0].mood", "tools[0].colour",
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


# --- references to items ---


def reference(item: Any) -> dict[str, Any]:
    return {"type": "item_reference", "id": item if isinstance(item, str) else item.id}


@pytest.mark.parametrize("background", [False, True])
def test_a_loop_of_calls_goes_on_from_references_to_its_thoughts_and_calls(
    client: openai.OpenAI, server: ServerProcess, background: bool
) -> None:
    first = ask(client, WEATHER, tools=[TOOL], background=background)
    first = server.eventually(lambda: (r := client.responses.retrieve(first.id)).status == "completed" and r, "the end")  # type: ignore[assignment]
    assert {item.type for item in first.output} == {"reasoning", "function_call"}
    call: Any = next(item for item in first.output if item.type == "function_call")
    asked: Any = {"role": "user", "content": WEATHER}
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": '{"degrees": 21}'}
    by_hand = ask(client, [asked, *(item.model_dump() for item in first.output), result], tools=[TOOL])
    referred = ask(client, [asked, *map(reference, first.output), result], tools=[TOOL])
    assert lasting(referred.output) == lasting(by_hand.output)
    assert referred.usage is not None
    assert by_hand.usage is not None
    assert referred.usage.input_tokens == by_hand.usage.input_tokens


def test_items_of_several_responses_can_be_referred_to_and_are_listed_as_what_they_are(
    client: openai.OpenAI, server: ServerProcess
) -> None:
    answers = [ask(client, text, reasoning={"effort": "none"}) for text in (CAPITAL, WEATHER)]
    (asked,) = client.responses.input_items.list(answers[0].id).data
    turns: Any = [asked, answers[0].output[-1], {"role": "user", "content": WEATHER}, answers[1].output[-1]]
    last: Any = {"role": "user", "content": "Hello"}
    given = [turn if isinstance(turn, dict) else reference(turn) for turn in turns]
    third = ask(client, [*given, last])
    listed = client.responses.input_items.list(third.id, order="asc").data
    assert [item.id for item in listed][:2] == [asked.id, answers[0].output[-1].id]
    shown = [[part.text for part in item.content] for item in listed]  # type: ignore[union-attr]
    assert shown == [[CAPITAL], [answers[0].output_text], [WEATHER], [answers[1].output_text], ["Hello"]]
    large = {"model": MODEL, "input": [*given, last], "padding": "x" * 300_000}  # too large to be read at once
    counted = server.post("/v1/responses/input_tokens", large)
    assert third.usage is not None
    assert counted.json()["input_tokens"] == third.usage.input_tokens


def test_an_item_that_is_not_kept_is_not_found(client: openai.OpenAI) -> None:
    deleted = ask(client, max_output_tokens=4)
    client.responses.delete(deleted.id)
    passing = ask(client, max_output_tokens=4, store=False)
    for item_id, hint in (
        (deleted.output[0].id, ""),
        ("msg_388f", ""),
        ("x" * 300, ""),
        (passing.output[0].id, " Items are not kept when"),
    ):
        with pytest.raises(openai.NotFoundError, match=re.escape(f"Item with id '{str(item_id)[:100]}' not found.{hint}")) as refused:
            ask(client, [reference(str(item_id)), {"role": "user", "content": "Hello"}])
        assert (refused.value.param, refused.value.code) == ("input", None)
        assert bool(hint) == ("store" in refused.value.message)


@pytest.mark.usefixtures("slowed")
def test_an_item_of_a_response_that_runs_is_waited_for(client: openai.OpenAI) -> None:
    begun = ask(client, background=True, **LONG)
    (asked,) = client.responses.input_items.list(begun.id).data
    with pytest.raises(openai.BadRequestError, match="has not ended yet") as refused:
        ask(client, [reference(asked)])
    assert refused.value.param == "input"
    client.responses.cancel(begun.id)


def test_an_input_that_fits_is_served_however_one_that_does_not_would_be_cut(client: openai.OpenAI) -> None:
    assert ask(client, truncation="auto", max_output_tokens=4).truncation == "auto"


@pytest.mark.parametrize("path", ["/v1/responses/compact", "/v1/conversations"])
def test_what_is_not_served_is_an_unknown_path(server: ServerProcess, path: str) -> None:
    answer = server.post(path, {"model": MODEL, "input": "Hello"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url")


# --- what is kept ---


def test_a_conversation_goes_on_from_its_id_without_its_instructions(client: openai.OpenAI) -> None:
    first = ask(client, instructions="You are a pirate.")
    second = ask(client, "And of Norway?", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert second.instructions is None
    turns: list[ResponseInputItemParam] = [
        {"role": "user", "content": CAPITAL},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And of Norway?"},
    ]
    by_hand = client.responses.input_tokens.count(model=MODEL, input=turns)
    assert second.usage is not None
    assert second.usage.input_tokens == by_hand.input_tokens
    third = ask(client, "And of Spain?", previous_response_id=second.id)
    assert third.usage is not None
    assert third.usage.input_tokens > second.usage.input_tokens


def test_a_response_can_be_retrieved_listed_and_deleted(client: openai.OpenAI) -> None:
    given: Any = [{"role": "user", "content": f"{number}"} for number in range(25)]
    response = ask(client, given, max_output_tokens=4)
    assert client.responses.retrieve(response.id) == response
    listed = [item.content[0].text for item in client.responses.input_items.list(response.id)]  # type: ignore[union-attr]
    assert listed == [str(number) for number in reversed(range(25))]  # the client turns the pages
    page = client.responses.input_items.list(response.id, order="asc", limit=3)
    assert [item.content[0].text for item in page.data] == ["0", "1", "2"]  # type: ignore[union-attr]
    assert page.has_more
    client.responses.delete(response.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError, match=re.escape(f"Response with id '{response.id}' not found.")):
            call(response.id)


def test_one_that_is_not_stored_leaves_no_trace(client: openai.OpenAI, bucket: Bucket) -> None:
    response = ask(client, store=False, max_output_tokens=4)
    assert response.model_extra is not None
    assert response.model_extra["store"] is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
    with pytest.raises(openai.NotFoundError) as refused:
        ask(client, "Hello", previous_response_id=response.id)
    assert refused.value.param == "previous_response_id"
    assert not bucket.holds(response.id)


@pytest.mark.parametrize(
    "hostile", ["..%2F..%2Fetc%2Fpasswd", "resp_" + "0" * 32 + ".json", "resp_%00", "x" * 5000, "resp_ffffffff" + "f" * 24, "%F0%9F%98%80"]
)
def test_an_id_of_any_shape_is_only_not_found(server: ServerProcess, hostile: str) -> None:
    for answer in (
        server.get(f"/v1/responses/{hostile}"),
        server.get(f"/v1/responses/{hostile}?stream=true"),
        server.http.delete(f"{server.url}/v1/responses/{hostile}"),
        server.post(f"/v1/responses/{hostile}/cancel", {}),
        server.get(f"/v1/responses/{hostile}/input_items"),
    ):
        assert answer.status_code == 404
        assert len(answer.content) < 1000
        assert answer.json()["error"]["param"] in ("response_id", None)  # None: a slash makes it another path


# --- in the background ---


def test_a_response_in_the_background_is_polled_to_its_end(client: openai.OpenAI, server: ServerProcess) -> None:
    begun = ask(client, background=True)
    assert (begun.status, begun.background, begun.output) == ("queued", True, [])
    ended = server.eventually(lambda: (r := client.responses.retrieve(begun.id)).status == "completed" and r, "the end")
    assert isinstance(ended, Response)
    assert lasting(ended.output) == lasting(ask(client).output)
    assert client.responses.cancel(begun.id).status == "completed"  # too late, and no error
    events = list(client.responses.retrieve(begun.id, stream=True))
    assert events[-1].type == "response.completed"
    assert events[-1].response == ended


@pytest.mark.usefixtures("slowed")
def test_one_that_runs_can_be_cancelled_and_is_not_gone_on_from(client: openai.OpenAI) -> None:
    begun = ask(client, background=True, **LONG)
    with pytest.raises(openai.BadRequestError, match="has not ended yet") as refused:
        ask(client, "Hello", previous_response_id=begun.id)
    assert refused.value.param == "previous_response_id"
    cancelled = client.responses.cancel(begun.id)
    assert cancelled.status == "cancelled"
    assert client.responses.retrieve(begun.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        client.responses.cancel(ask(client, max_output_tokens=4).id)


def test_a_reader_that_was_cut_off_goes_on_where_it_stopped(client: openai.OpenAI) -> None:
    seen: list[Any] = []
    with client.responses.create(model=MODEL, input=CAPITAL, background=True, stream=True, temperature=0, max_output_tokens=256) as events:
        for event in events:
            seen.append(event)
            if len(seen) == 6:
                break
    assert [event.type for event in seen[:3]] == ["response.created", "response.queued", "response.in_progress"]
    response_id = seen[0].response.id
    seen += client.responses.retrieve(response_id, stream=True, starting_after=seen[-1].sequence_number)
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert seen[-1].type == "response.completed"
    assert "Paris" in seen[-1].response.output_text
    late = list(client.responses.retrieve(response_id, stream=True, starting_after=6))
    assert late == seen[7:]


@pytest.mark.usefixtures("slowed")
def test_what_is_deleted_while_it_runs_ends_and_ends_its_readers(client: openai.OpenAI, server: ServerProcess, bucket: Bucket) -> None:
    with client.responses.create(model=MODEL, input=CAPITAL, background=True, stream=True, **LONG) as events:
        first = next(iter(events))
        client.responses.delete(first.response.id)  # type: ignore[union-attr]
        assert all(event.type not in ENDS for event in events)
    finish_line(server, first.response.id, "abort")  # type: ignore[union-attr]
    assert not bucket.holds(first.response.id)  # type: ignore[union-attr]


# --- clients that go ---


def finish_line(server: ServerProcess, response_id: str, reason: str) -> None:
    """Each request ends in one line, which says how."""
    lines = server.eventually(lambda: [line for line in server.lines if line.startswith(f"Finished {response_id}")], "the finish line")
    assert len(lines) == 1
    assert f"endpoint: responses, reason: {reason}," in lines[0]


def test_every_response_has_one_finish_line(client: openai.OpenAI, server: ServerProcess) -> None:
    for options in ({}, {"stream": True}, {"background": True}):
        answer = server.post("/v1/responses", {"model": MODEL, "input": "Hello", "max_output_tokens": 2, **options})
        found = re.search(r"resp_[0-9a-f]{32}", answer.text)
        assert found
        finish_line(server, found.group(), "length")


@pytest.mark.usefixtures("slowed")
@pytest.mark.parametrize("streaming", [True, False])
def test_a_client_that_goes_away_ends_its_response(server: ServerProcess, streaming: bool) -> None:
    aborted = 'banyan_requests_total{endpoint="responses",finish_reason="abort"}'
    before, body = server.metric(aborted), {"model": MODEL, "input": "Hello", "max_output_tokens": 1900, "ignore_eos": True}
    if streaming:
        with server.http.stream("POST", f"{server.url}/v1/responses", json={**body, "stream": True}) as answer:
            next(answer.iter_lines())
    else:
        with pytest.raises(httpx.ReadTimeout):
            server.http.post(f"{server.url}/v1/responses", json=body, timeout=0.5)
    server.eventually(lambda: server.metric(aborted) == before + 1, "the end of the generation", 8.0)


# --- errors ---

CALL: Final = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"}


@pytest.mark.parametrize(
    ("options", "param", "code"),
    [
        ({"input": []}, "input", "empty_array"),
        ({"input": ["x"]}, "input", "invalid_type"),
        ({"input": [{"role": "user"}]}, "input[0].content", "missing_required_parameter"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content", "invalid_type"),
        ({"input": [{"role": "clown", "content": "x"}], "instructions": "Hi"}, "input[0].role", "invalid_value"),
        ({"input": [{"role": "user", "content": "x"}, {"role": "user", "content": [{"type": "input_text"}]}], "instructions": "Hi"},
         "input[1].content[0].text", "invalid_type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input", "unsupported_content"),
        ({"input": [{"type": "reasoning", "summary": []}, {**CALL, "arguments": "{}"}, {**CALL, "arguments": 5}]}, "input[2].arguments",
         "invalid_type"),
        ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input[0].output", "missing_required_parameter"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id", "missing_required_parameter"),
        ({"input": [{"type": "item_search_call", "id": "x"}]}, "input[0].type", "unsupported"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "unsupported"),
        ({"tools": [{"type": "custom", "name": "f"}]}, "tools[0].type", "unsupported"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "invalid_value"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "invalid_value"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "strin"}}}}, "text.format", "invalid_json_schema"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity", "invalid_value"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "invalid_value"),
        ({"conversation": "c"}, "conversation", "unsupported"),
        ({"prompt": {"id": "p"}}, "prompt", "unsupported"),
        ({"truncation": "sometimes"}, "truncation", "invalid_value"),
        ({"truncation": "auto", "input": "Hello " * 5000}, "input", "context_length_exceeded"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata", "object_above_max_properties"),
        ({"metadata": {"k" * 65: "v"}}, "metadata", "invalid_value"),
        ({"metadata": {"k": "v" * 513}}, "metadata", "invalid_value"),
        ({"metadata": {"k": 1}}, "metadata.k", "invalid_type"),
        ({"background": True, "store": False}, "background", "invalid_value"),
        ({"max_output_tokens": 0}, "max_output_tokens", "integer_below_min_value"),
        ({"max_output_tokens": 5000}, "input", "context_length_exceeded"),
        ({"top_logprobs": 21}, "top_logprobs", "integer_above_max_value"),
        ({"temperature": 3}, "temperature", "decimal_above_max_value"),
        ({"model": "x"}, "model", "model_not_found"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("streaming", [False, True])
def test_what_is_wrong_is_named_in_the_words_of_the_request(
    client: openai.OpenAI, options: dict[str, Any], param: str, code: str, streaming: bool
) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        client.responses.create(model=MODEL, input="Hello", stream=streaming, extra_body=options)  # type: ignore[call-overload]
    assert (refused.value.status_code, refused.value.param, refused.value.code) == (404 if param == "model" else 400, param, code)
    assert "messages" not in refused.value.message
    assert "function.name" not in refused.value.message


@pytest.mark.usefixtures("slowed")
def test_a_deadline_ends_a_response_and_one_in_the_background_too(client: openai.OpenAI, server: ServerProcess) -> None:
    late: dict[str, Any] = {**LONG, "extra_headers": {TIMEOUT: "0.5"}}
    with pytest.raises(openai.InternalServerError) as ended:
        ask(client, **late)
    assert (ended.value.status_code, ended.value.code) == (504, "timeout")
    *_, last = stream(client, **late)
    assert (last.type, last.response.error.code) == ("response.failed", "server_error")
    begun = ask(client, **late, background=True)
    server.eventually(lambda: client.responses.retrieve(begun.id).status == "failed", "the end")
    error = client.responses.retrieve(begun.id).error
    assert error is not None
    assert (error.code, error.message) == ("server_error", "Request running timeout reached.")
    in_time = ask(client, **{**late, "max_output_tokens": 5, "extra_headers": {TIMEOUT: "30"}}, background=True)
    server.eventually(lambda: client.responses.retrieve(in_time.id).status == "incomplete", "its end in time")


# --- async, restarts, storage ---


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


def test_servers_over_one_storage_go_on_from_each_others_responses(
    server: ServerProcess, client: openai.OpenAI, start_server: StartServer, bucket: Bucket
) -> None:
    slow = ("--runner", "torch", "--drain-seconds", "1")  # it is to be cut off in the middle of an answer
    other = start_server(*FLAGS, *slow, environment=bucket.s3.environment()).ready()
    there = client_of(other)
    first = ask(client)
    server.eventually(lambda: bucket.holds(first.id), "the response in the storage")
    assert there.responses.retrieve(first.id) == first
    assert there.responses.input_items.list(first.id).data
    assert ask(there, "And of Norway?", previous_response_id=first.id).status == "completed"
    assert ask(there, [reference(first.output[-1]), {"role": "user", "content": "And of Norway?"}]).status == "completed"

    running = ask(there, background=True, **LONG)
    server.eventually(lambda: bucket.holds(running.id), "the response in the storage")
    with pytest.raises(openai.BadRequestError, match="runs on another server"):
        client.responses.cancel(running.id)
    other.process.terminate()
    assert other.wait(30) == 0
    cut_off = client.responses.retrieve(running.id)  # it was written down once more before the server went
    assert cut_off.error is not None
    assert (cut_off.status, cut_off.error.code) == ("failed", "server_error")

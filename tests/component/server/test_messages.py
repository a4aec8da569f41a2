"""Anthropic's Messages API through the real `anthropic` client, against a real server of the small trained model."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final, Literal

import anthropic
import jsonschema
import pytest
from anthropic.types import Message

from banyan_runtime.front.deadline import HEADER as TIMEOUT
from tests.support.server.process import DEADLINE_S, MODEL, SECOND_NAME, ServerProcess
from tests.support.server.raw import RawClient, post

CAPITAL: Final = "What is the capital of France?"
WEATHER: Final = "What is the weather in Oslo?"
CITY: Final[dict[str, Any]] = {"properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}}, "required": ["city"]}
TOOL: Final[dict[str, Any]] = {"name": "get_weather", "description": "The weather.", "input_schema": CITY}
NOW: Final[dict[str, Any]] = {"name": "now", "input_schema": {"type": "object", "properties": {}}, "cache_control": {"type": "ephemeral"}}
QUIET: Final[dict[str, Any]] = {"thinking": {"type": "disabled"}}


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def request(given: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The client's arguments; what is said is given as a text or as messages."""
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
    extra = {"temperature": 0, **options.pop("extra_body", {})}
    return {"model": MODEL, "messages": messages, "max_tokens": 256, "extra_body": extra, **options}


def ask(client: anthropic.Anthropic, given: Any = CAPITAL, **options: Any) -> Message:
    message: Message = client.messages.create(**request(given, options))
    return message


def stream(client: anthropic.Anthropic, given: Any = CAPITAL, **options: Any) -> tuple[list[Any], Message]:
    """The events as they were sent, and what the client makes of them."""
    options = request(given, options)
    with client.messages.stream(**options) as events:
        final = list(events) and events.get_final_message()
    return list(client.messages.create(**options, stream=True)), final


def lasting(message: Message) -> Any:
    """What two answers to the same request have in common."""
    told = message.model_dump(exclude={"id", "usage", "parsed_output"})
    told["content"] = [{name: one for name, one in block.items() if name not in ("id", "parsed_output")} for block in told["content"]]
    return told, message.usage.output_tokens, message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


# --- messages ---


def test_a_message_has_thoughts_text_usage_and_an_id(client: anthropic.Anthropic) -> None:
    message = ask(client)
    thoughts, text = message.content
    assert thoughts.type == "thinking"
    assert "Paris" in thoughts.thinking
    assert text.type == "text"
    assert "Paris" in text.text
    assert (message.type, message.role, message.model, message.stop_reason, message.stop_sequence) == (
        "message", "assistant", MODEL, "end_turn", None,
    )  # fmt: skip
    assert message.id.startswith("msg_")
    assert message._request_id
    assert message.usage.output_tokens_details is not None
    assert 0 < message.usage.output_tokens_details.thinking_tokens < message.usage.output_tokens


def test_input_tokens_leave_out_those_that_were_cached(client: anthropic.Anthropic) -> None:
    usage = [ask(client, "Tell me of Norway, please.", max_tokens=2).usage for _ in range(2)][1]
    assert usage.cache_read_input_tokens
    counted = client.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": "Tell me of Norway, please."}])
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


@pytest.mark.parametrize(
    ("given", "options"),
    [
        (CAPITAL, {}),
        (CAPITAL, QUIET),
        (CAPITAL, {"max_tokens": 3}),
        (CAPITAL, {**QUIET, "stop_sequences": ["capital"]}),
        (CAPITAL, {"stop_sequences": ["capital"]}),
        (CAPITAL, {**QUIET, "stop_sequences": ["The"]}),  # which leaves nothing to say
        (WEATHER, {"tools": [TOOL, NOW]}),
        (WEATHER, {"tools": [TOOL], "tool_choice": {"type": "any"}, "max_tokens": 12, **QUIET}),
    ],
)
def test_streamed_events_joined_are_the_whole_message(client: anthropic.Anthropic, given: str, options: dict[str, Any]) -> None:
    whole = ask(client, given, **options)
    events, final = stream(client, given, **options)
    assert lasting(final) == lasting(whole)
    assert (events[0].type, events[-2].type, events[-1].type) == ("message_start", "message_delta", "message_stop")
    start = events[0].message
    assert (start.content, start.usage.output_tokens, start.stop_reason) == ([], 0, None)
    assert start.usage.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    blocks = events[1:-2]
    assert sorted({event.index for event in blocks}) == list(range(len(whole.content)))
    for index in range(len(whole.content)):
        own = [event.type for event in blocks if event.index == index]
        assert own == ["content_block_start", *["content_block_delta"] * (len(own) - 2), "content_block_stop"]
    assert [event.index for event in blocks] == sorted(event.index for event in blocks)  # one after another


def test_how_a_message_ends_is_told(client: anthropic.Anthropic) -> None:
    assert ask(client, max_tokens=2).stop_reason == "max_tokens"
    stopped = ask(client, **QUIET, stop_sequences=["Oslo", "capital"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "capital")
    assert stopped.content[0].type == "text"
    assert stopped.content[0].text == "The "
    behind = ask(client, stop_sequences=["Oslo", "capital"])  # of which the thoughts tell, too
    assert (behind.stop_reason, behind.stop_sequence) == ("stop_sequence", "capital")
    assert [(block.type, block.text) for block in behind.content if block.type == "text"] == [("text", "The ")]
    empty = ask(client, **QUIET, stop_sequences=["The"])
    assert [(block.type, block.text) for block in empty.content if block.type == "text"] == [("text", "")]


def test_thinking_is_switched_by_the_request(client: anthropic.Anthropic) -> None:
    kinds = {
        name: [block.type for block in ask(client, thinking=thinking).content]
        for name, thinking in {
            "enabled": {"type": "enabled", "budget_tokens": 1024}, "adaptive": {"type": "adaptive"}, "disabled": {"type": "disabled"},
        }.items()
    }  # fmt: skip
    assert kinds == {"enabled": ["thinking", "text"], "adaptive": ["thinking", "text"], "disabled": ["text"]}
    assert [block.type for block in ask(client, output_config={"effort": "low"}).content] == ["thinking", "text"]


def test_a_system_prompt_may_be_text_or_blocks_and_loses_what_changes_with_each_call(client: anthropic.Anthropic) -> None:
    def count(system: Any) -> int:
        counted = client.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": "Hi"}], system=system)
        return counted.input_tokens

    blocks = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "Be kind."}]
    assert count("Be brief.\nBe kind.") == count(blocks) > count("Be brief.")
    assert count([{"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=9a3f;"}, *blocks]) == count(blocks)


def test_structured_output_fits_its_schema(client: anthropic.Anthropic) -> None:
    schema = {**CITY, "type": "object", "additionalProperties": False}
    message = ask(client, output_config={"format": {"type": "json_schema", "schema": schema}})
    text = message.content[-1]
    assert text.type == "text"
    jsonschema.validate(json.loads(text.text), schema)


# --- tools ---


def test_a_loop_of_calls_runs_to_its_end(client: anthropic.Anthropic) -> None:
    messages: list[Any] = [{"role": "user", "content": WEATHER}]
    first = ask(client, messages, tools=[TOOL, NOW])
    assert first.stop_reason == "tool_use"
    (call,) = [block for block in first.content if block.type == "tool_use"]
    assert (call.name, call.input) == ("get_weather", {"city": "Oslo"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": '{"degrees": 21}'}]}
    messages += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result, {"type": "text", "text": "Thanks."}]},
    ]
    second = ask(client, messages, tools=[TOOL, NOW])
    assert second.stop_reason in ("end_turn", "tool_use")
    flat = [messages[0], {"role": "assistant", "content": [call]}, {"role": "user", "content": [{**result, "content": '{"degrees": 21}'}]}]
    shorter = client.messages.count_tokens(model=MODEL, messages=flat, tools=[TOOL, NOW]).input_tokens
    assert client.messages.count_tokens(model=MODEL, messages=messages, tools=[TOOL, NOW]).input_tokens > shorter


def test_a_call_may_be_forced_named_or_forbidden(client: anthropic.Anthropic) -> None:
    def calls(**choice: Any) -> list[str]:
        message = ask(client, "Hello", tools=[TOOL, NOW], tool_choice=choice, **QUIET)
        return [block.name for block in message.content if block.type == "tool_use"]

    assert len(calls(type="any", disable_parallel_tool_use=True)) == 1
    assert calls(type="tool", name="now") == ["now"]
    assert calls(type="none") == []


def test_tools_of_other_servers_are_left_out_and_named(client: anthropic.Anthropic, server: ServerProcess) -> None:
    mcp = {"mcp_servers": [{"type": "url", "url": "http://x", "name": "x"}], "max_tokens": 2}
    raw = server.http.post(f"{server.url}/v1/messages", json={**request(CAPITAL, mcp), "extra_body": None})
    assert raw.headers["x-banyan-ignored"] == "mcp_servers"
    search: Any = {"type": "web_search_20250305", "name": "web_search"}
    answer = client.messages.with_raw_response.create(**request(CAPITAL, {"tools": [search, TOOL], "max_tokens": 2}))
    assert answer.headers["x-banyan-ignored"] == "tools[0]"
    with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
        ask(client, tools=[search], tool_choice={"type": "any"})


def test_a_runner_of_tools_completes_its_loop_by_its_default_settings(client: anthropic.Anthropic) -> None:
    asked: list[str] = []

    @anthropic.beta_tool
    def get_weather(city: Literal["Paris", "Oslo"]) -> str:
        """The weather."""
        asked.append(city)
        return '{"degrees": 21}'

    @anthropic.beta_tool
    def now() -> str:
        """The time."""
        return "12:00"

    extra: Any = {"extra_body": {"temperature": 0}, "max_iterations": 2}
    runner = client.beta.messages.tool_runner(
        model=MODEL, max_tokens=256, tools=[get_weather, now], messages=[{"role": "user", "content": WEATHER}], **extra
    )
    turns = list(runner)
    assert asked[:1] == ["Oslo"]
    assert turns[0].stop_reason == "tool_use"
    read = [turn.usage.input_tokens + (turn.usage.cache_read_input_tokens or 0) for turn in turns]
    assert read[1] > read[0]  # the second turn has the first one's whole conversation before it


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
@pytest.mark.parametrize("path", ["", "/count_tokens"])
def test_a_thread_is_refused_so_that_clients_send_all_of_it(server: ServerProcess, thread: dict[str, str], path: str) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "thread": thread}
    answer = server.http.post(f"{server.url}/v1/messages{path}", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


# --- an answer that has begun ---


@pytest.mark.parametrize("options", [QUIET, {}])
@pytest.mark.parametrize("begun", ["The capital of", [{"type": "text", "text": "The capital"}, {"type": "text", "text": " of"}]])
def test_a_last_turn_of_the_assistants_is_gone_on_with(client: anthropic.Anthropic, begun: Any, options: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": CAPITAL}, {"role": "assistant", "content": begun}]
    whole = ask(client, messages, **options)
    assert [block.type for block in whole.content] == ["text"]
    assert whole.content[0].text == " France is Paris."  # type: ignore[union-attr]
    _, streamed = stream(client, messages, **options)
    assert lasting(streamed) == lasting(whole)
    counted = client.messages.count_tokens(model=MODEL, messages=messages, **options)
    assert counted.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


def test_a_last_turn_with_thoughts_is_gone_on_with_behind_them(client: anthropic.Anthropic) -> None:
    thought = {"type": "thinking", "thinking": "France has Paris.", "signature": ""}
    begun: list[Any] = [{"role": "user", "content": CAPITAL}, {"role": "assistant", "content": [thought, {"type": "text", "text": "The"}]}]
    whole = ask(client, begun)
    assert [block.type for block in whole.content] == ["text"]
    assert not whole.content[0].text.startswith("The")  # type: ignore[union-attr]


def test_a_last_turn_without_text_is_answered_by_a_new_one(client: anthropic.Anthropic) -> None:
    call = {"type": "tool_use", "id": "a", "name": "get_weather", "input": {"city": "Oslo"}}
    for content in ([call], [{"type": "text", "text": "So"}, call], [{"type": "thinking", "thinking": "Hm", "signature": ""}], ""):
        messages: list[Any] = [{"role": "user", "content": WEATHER}, {"role": "assistant", "content": content}]
        assert ask(client, messages, tools=[TOOL], max_tokens=4).content


def test_a_call_that_is_cut_off_is_no_call_to_be_run(client: anthropic.Anthropic) -> None:
    cut = ask(client, WEATHER, tools=[TOOL], tool_choice={"type": "any"}, max_tokens=8, **QUIET)
    assert cut.stop_reason == "max_tokens"
    assert [block.input for block in cut.content if block.type == "tool_use"] in ([], [{}])


# --- what agents send ---


def test_a_system_turn_between_turns_reaches_the_model_where_it_stands(client: anthropic.Anthropic) -> None:
    """Under this server's template, which shows a system turn at the beginning alone."""
    before: list[Any] = [{"role": "user", "content": CAPITAL}, {"role": "assistant", "content": "Paris."}]
    later: list[Any] = [
        *before,
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": WEATHER},
    ]
    joined: list[Any] = [*before, {"role": "user", "content": f"Be brief.\n\n{WEATHER}"}]
    for system in ("Be kind.", [{"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=0"}]):
        one, other = ask(client, later, system=system, **QUIET), ask(client, joined, system=system, **QUIET)
        assert lasting(one) == lasting(other)
        counted = client.messages.count_tokens(model=MODEL, messages=later, system=system, **QUIET)
        assert counted.input_tokens == one.usage.input_tokens + (one.usage.cache_read_input_tokens or 0)


def test_a_result_with_a_picture_is_answered_and_the_picture_named(client: anthropic.Anthropic) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "rain"}, image]}
    call = {"type": "tool_use", "id": "a", "name": "get_weather", "input": {"city": "Oslo"}}
    messages: list[Any] = [
        {"role": "user", "content": WEATHER},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    answer = client.messages.with_raw_response.create(**request(messages, {"tools": [TOOL], "max_tokens": 4}))
    assert answer.headers["x-banyan-ignored"] == "messages[2].content[0].content[1]"
    assert answer.parse().content


def test_turns_without_blocks_are_answered(client: anthropic.Anthropic) -> None:
    for turns in ([[]], [[], []]):
        messages: list[Any] = [{"role": "user", "content": content} for content in turns]
        assert ask(client, messages, max_tokens=4).content


# --- what is wrong, and what has no effect ---


def test_fields_that_nobody_knows_are_named_wherever_they_stand(client: anthropic.Anthropic, server: ServerProcess) -> None:
    block = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}, "mood": "bad"}
    body: dict[str, Any] = {
        "model": MODEL, "messages": [{"role": "user", "content": [block], "weight": 2}], "max_tokens": 2, "wings": 2, "top_k": 3, "seed": 1,
        "metadata": {"user_id": "me"}, "service_tier": "auto", "thinking": {"type": "enabled", "budget_tokens": 2048},
        "tools": [{**TOOL, "colour": "red"}], "stop_sequences": None,
    }  # fmt: skip
    wanted = ["wings", "messages[0].weight", "messages[0].content[0].mood", "tools[0].colour", "thinking.budget_tokens"]
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "x"}
    for path, more in (("", {}), ("", {"stream": True}), ("/count_tokens", {})):
        answer = server.http.post(f"{server.url}/v1/messages{path}", json={**body, **more}, headers=headers)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-banyan-ignored"].split(", ") == wanted


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages[0].content[0].text"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"stop_sequences": ["x"] * 33}, "33"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_what_is_wrong_is_named_in_the_words_of_the_request(
    client: anthropic.Anthropic, options: dict[str, Any], field: str, streaming: bool
) -> None:
    """All that is wrong with messages is in tests/unit/front/test_refusals.py; their error object has no `param`."""
    with pytest.raises(anthropic.BadRequestError) as refused:
        ask(client, extra_body={**options, "stream": streaming})
    body: Any = refused.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert field in body["error"]["message"]
    assert body["request_id"] == refused.value.request_id == refused.value.response.headers["request-id"]


def test_each_status_is_the_clients_class_of_error(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        ask(client, model="x")
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError):
        client.post("/v1/messages", cast_to=object, content=b"{", options={"headers": {"content-type": "application/json"}})


@pytest.mark.parametrize("path", ["/v1/messages/batches", "/v1/messages/x/y"])
def test_an_unknown_path_below_messages_is_told_as_they_tell_it(server: ServerProcess, path: str) -> None:
    answer = server.http.post(server.url + path, json={})
    assert (answer.status_code, answer.json()["type"], answer.json()["error"]["type"]) == (404, "error", "not_found_error")
    other = server.http.post(f"{server.url}/v1/messagesx", json={})
    assert other.json()["error"]["code"] == "unknown_url"


def test_the_client_lists_models_and_finds_one(client: anthropic.Anthropic) -> None:
    page = client.models.list()
    assert (page.has_more, page.first_id, page.last_id) == (False, MODEL, SECOND_NAME)
    model, other = page
    assert other.id == SECOND_NAME
    assert (model.id, model.type, model.display_name) == (MODEL, "model", MODEL)
    assert model.created_at.tzinfo is not None
    assert client.models.retrieve(MODEL) == model


@pytest.mark.usefixtures("slowed")
def test_an_error_in_a_stream_names_the_request(client: anthropic.Anthropic) -> None:
    options = request("Hello", {"max_tokens": 1900, "extra_body": {"ignore_eos": True}})
    late = {TIMEOUT: str(DEADLINE_S)}
    with pytest.raises(anthropic.APIStatusError) as ended, client.messages.stream(**options, extra_headers=late) as events:
        list(events)
    body: Any = ended.value.body
    assert body["error"]["type"] == "api_error"
    assert body["request_id"] == ended.value.response.headers["request-id"]


# --- async, clients that go ---


def test_the_async_client_asks_and_streams(server: ServerProcess) -> None:
    async def scenario() -> None:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client:
            whole = await client.messages.create(**request(CAPITAL, {}))
            async with client.messages.stream(**request(CAPITAL, {})) as events:
                text = "".join([piece async for piece in events.text_stream])
                final = await events.get_final_message()
        assert lasting(final) == lasting(whole)
        assert text == whole.content[-1].text

    asyncio.run(scenario())


@pytest.mark.usefixtures("slowed")
@pytest.mark.parametrize("streaming", [True, False])
def test_a_client_that_goes_away_ends_its_message(client: anthropic.Anthropic, server: ServerProcess, streaming: bool) -> None:
    aborted = 'banyan_requests_total{endpoint="messages",finish_reason="abort"}'
    options = request("Hello", {"max_tokens": 1900, "extra_body": {"ignore_eos": True}})
    server.until_idle()
    before = server.settled(aborted)
    if streaming:
        with client.messages.stream(**options) as events:
            message_id = next(iter(events)).message.id  # type: ignore[union-attr]
    else:
        with RawClient(server.url) as leaving:
            body = {"model": MODEL, "messages": options["messages"], "max_tokens": 1900, "ignore_eos": True}
            leaving.send(post("/v1/messages", body))
            server.eventually(lambda: server.metric("banyan_requests_running") == 1, "a running request")
    server.eventually(lambda: server.metric(aborted) == before + 1, "the end of the generation")
    if streaming:
        lines = server.eventually(lambda: [line for line in server.lines if line.startswith(f"Finished {message_id}")], "the finish line")
        assert len(lines) == 1
        assert "endpoint: messages, reason: abort," in lines[0]

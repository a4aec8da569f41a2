"""Tools and structured output through the real `openai` client, against a real server of the small trained model."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletion

from tests.support.server.process import MODEL, ServerProcess, StartServer
from tests.unit.front.support import CHATML

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now", "description": "The time."}}
ASK = [{"role": "user", "content": "What is the weather in Oslo?"}]
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="None", max_retries=0)


def ask(client: openai.OpenAI, messages: Any = HELLO, **options: Any) -> ChatCompletion:
    return client.chat.completions.create(model=MODEL, messages=messages, **{"temperature": 0, "max_tokens": 256, **options})


def calls_of(completion: ChatCompletion) -> list[tuple[str, dict[str, Any]]]:
    calls = completion.choices[0].message.tool_calls or []
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls if call.type == "function"]


def streamed(client: openai.OpenAI, messages: Any, **options: Any) -> tuple[dict[str, Any], str | None]:
    """The message that a client puts together from a stream, and how it ended."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}}
    reason = None
    stream = client.chat.completions.create(model=MODEL, messages=messages, stream=True, **{"temperature": 0, "max_tokens": 256, **options})
    for chunk in stream:
        (choice,) = chunk.choices
        message["content"] += choice.delta.content or ""
        message["reasoning"] += (choice.delta.model_extra or {}).get("reasoning_content") or ""
        for part in choice.delta.tool_calls or []:
            assert part.function is not None
            if part.index not in message["calls"]:
                assert part.id
                assert part.function.name
                message["calls"][part.index] = [part.function.name, ""]
            message["calls"][part.index][1] += part.function.arguments or ""
        reason = choice.finish_reason or reason
    return message, reason


# --- tools ---


def test_a_model_that_calls_a_tool_ends_with_the_call(client: openai.OpenAI) -> None:
    completion = ask(client, ASK, tools=[TOOL, NOW])
    choice = completion.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls or []
    assert re.fullmatch(r"call_[0-9a-f]{24}", call.id)
    assert calls_of(completion)[0][0] == "get_weather"
    assert choice.message.model_extra is not None
    assert "get_weather" in choice.message.model_extra["reasoning_content"]


@pytest.mark.parametrize("options", [{}, {"tool_choice": "required"}, {"tool_choice": "required", "parallel_tool_calls": False}])
def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI, options: dict[str, Any]) -> None:
    whole = ask(client, ASK, tools=[TOOL, NOW], **options).choices[0]
    message, reason = streamed(client, ASK, tools=[TOOL, NOW], **options)
    assert reason == whole.finish_reason == "tool_calls"
    assert message["content"] == (whole.message.content or "")
    assert message["reasoning"] == (whole.message.model_extra or {})["reasoning_content"]
    told = [[call.function.name, call.function.arguments] for call in whole.message.tool_calls or [] if call.type == "function"]
    assert [message["calls"][index] for index in range(len(told))] == told


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_a_required_call_fits_the_schema_of_its_tool(client: openai.OpenAI, temperature: float) -> None:
    body: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
    for seed in range(3):
        options: dict[str, Any] = {"temperature": temperature, "seed": seed, "extra_body": body, "parallel_tool_calls": False}
        completion = ask(client, tools=[TOOL, NOW], tool_choice="required", **options)
        assert completion.choices[0].finish_reason == "tool_calls"
        ((name, arguments),) = calls_of(completion)
        jsonschema.validate(arguments, WEATHER if name == "get_weather" else {"type": "object"})


@pytest.mark.matrix(gate=2)
@pytest.mark.parametrize(
    "hard",
    [
        {"type": "string", "pattern": "(?=a)b"},
        {"type": "string", "format": "regex"},
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"type": "integer", "minimum": 2, "maximum": 1},
        {"not": {"type": "string"}},
    ],
    ids=["pattern", "format", "oneOf", "bounds", "not"],
)
def test_of_a_tool_that_is_not_strict_what_cannot_be_enforced_is_not(client: openai.OpenAI, hard: dict[str, Any]) -> None:
    """The names of its parameters and their types are. What may be anything is written until there are no more tokens, now and then."""
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 5}, "hard": hard},
        "required": ["city", "hard"],
        "additionalProperties": False,
    }
    search: dict[str, Any] = {"type": "function", "function": {"name": "search", "parameters": parameters}}
    body: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
    options: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False, "extra_body": body}
    choice = {"type": "function", "function": {"name": "search"}}
    for tools in ([search, TOOL], [TOOL, search]):
        answer = client.chat.completions.with_raw_response.create(
            model=MODEL, messages=HELLO, temperature=0, max_tokens=256, **options | {"tools": tools, "tool_choice": choice}
        )
        assert answer.headers["X-Banyan-Ignored"] == f"tools[{tools.index(search)}].function.parameters"
        (call,) = answer.parse().choices[0].message.tool_calls or []
        assert call.type == "function"
        assert re.match(r'\{"city": ?"', call.function.arguments)
    assert ask(client, tools=[search, TOOL], **options).choices[0].finish_reason in ("tool_calls", "length")
    json_or_call = ask(client, tools=[search], response_format={"type": "json_object"}, extra_body=body)
    assert json_or_call.choices[0].finish_reason in ("stop", "tool_calls", "length")
    search["function"]["strict"] = True
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, tools=[search, TOOL], **options)
    assert refused.value.param == "tools[0].function.parameters"


def test_a_named_tool_is_called_once(client: openai.OpenAI) -> None:
    completion = ask(client, tools=[TOOL, NOW], tool_choice={"type": "function", "function": {"name": "now"}})
    assert [name for name, _ in calls_of(completion)] == ["now"]


def test_only_allowed_tools_can_be_called(client: openai.OpenAI) -> None:
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]}}
    completion = ask(client, ASK, tools=[TOOL, NOW], tool_choice=allowed)
    assert {name for name, _ in calls_of(completion)} == {"now"}


def test_a_tool_that_is_not_allowed_is_neither_shown_nor_called(client: openai.OpenAI) -> None:
    allowed: Any = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "now"}}]},
    }
    all_shown, shown = ask(client, ASK, tools=[TOOL, NOW]), ask(client, ASK, tools=[TOOL, NOW], tool_choice=allowed)
    assert all_shown.usage is not None
    assert shown.usage is not None
    assert shown.usage.prompt_tokens < all_shown.usage.prompt_tokens
    message, _ = streamed(client, ASK, tools=[TOOL, NOW], tool_choice=allowed)
    assert {name for name, _ in calls_of(shown)} | {name for name, _ in message["calls"].values()} <= {"now"}


def test_the_log_says_of_a_call_that_is_no_call_what_the_answer_says(client: openai.OpenAI, server: ServerProcess) -> None:
    for stop, reason in ((None, "tool_calls"), ('"city', "stop")):
        answer = ask(client, ASK, tools=[TOOL], stop=stop)
        assert answer.choices[0].message.tool_calls
        assert answer.choices[0].finish_reason == reason
        finished = f"Finished {answer.id}"
        (line,) = server.eventually(lambda: [line for line in server.lines if line.startswith(finished)], finished)  # noqa: B023
        assert f"reason: {reason}," in line


def test_a_strict_tool_is_called_by_its_schema_where_the_model_calls_it(client: openai.OpenAI) -> None:
    strict = {"type": "function", "function": {**TOOL["function"], "strict": True}}
    ((name, arguments),) = calls_of(ask(client, ASK, tools=[strict, NOW]))
    assert name == "get_weather"
    jsonschema.validate(arguments, WEATHER)


def test_a_call_that_is_cut_off_stays_cut_off(client: openai.OpenAI) -> None:
    whole = ask(client, ASK, tools=[TOOL], tool_choice="required")
    assert whole.usage is not None
    cut = ask(client, ASK, tools=[TOOL], tool_choice="required", max_tokens=whole.usage.completion_tokens - 8)
    assert cut.choices[0].finish_reason == "length"
    message, reason = streamed(client, ASK, tools=[TOOL], tool_choice="required", max_tokens=whole.usage.completion_tokens - 8)
    assert reason == "length"
    (call,) = [call for call in cut.choices[0].message.tool_calls or [] if call.type == "function"]
    assert message["calls"][0] == [call.function.name, call.function.arguments]
    with pytest.raises(json.JSONDecodeError):
        json.loads(call.function.arguments)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
@pytest.mark.parametrize("thinking", [False, True])
def test_what_is_cut_off_of_required_calls_is_never_content(client: openai.OpenAI, choice: Any, thinking: bool) -> None:
    options: dict[str, Any] = {"tools": [TOOL], "tool_choice": choice}
    options["extra_body"] = {"chat_template_kwargs": {"enable_thinking": thinking}}
    for most in (2, 10, 40):
        whole = ask(client, ASK, max_tokens=most, **options).choices[0]
        assert whole.message.content is None
        assert whole.finish_reason == "length" or most == 40  # in which the call of one tool may be made
        message, reason = streamed(client, ASK, max_tokens=most, **options)
        assert (message["content"], reason) == ("", whole.finish_reason)


def test_without_tools_or_with_none_to_be_called_markup_is_text(client: openai.OpenAI) -> None:
    for options in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        message = ask(client, ASK, **options).choices[0].message
        assert message.tool_calls is None


def test_a_loop_of_calls_and_answers_runs_to_its_end(client: openai.OpenAI) -> None:
    messages: list[Any] = list(ASK)
    first = ask(client, messages, tools=[TOOL, NOW]).choices[0].message
    (call,) = first.tool_calls or []
    messages += [first.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": '{"degrees": 21}'}]
    second = ask(client, messages, tools=[TOOL, NOW])
    assert second.choices[0].finish_reason in ("stop", "length", "tool_calls")


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes", "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}, "tools": [TOOL]}, "tool_choice"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "web_search", "function": {"name": "x"}}]}, "tools[0].type"),
        (
            {"tools": [{"type": "function", "function": {"name": "x", "strict": True, "parameters": {"type": "strin"}}}]},
            "tools[0].function.parameters",
        ),
    ],
)
def test_tools_that_nobody_could_call_are_refused_by_name(client: openai.OpenAI, options: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, **options)
    assert refused.value.param == param


# --- structured output ---


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=12)
    age: int = pydantic.Field(ge=0, le=150)


@pytest.mark.parametrize("seed", range(3))
def test_an_answer_can_be_parsed_into_a_model(client: openai.OpenAI, seed: int) -> None:
    parsed = client.chat.completions.parse(
        model=MODEL, messages=[{"role": "user", "content": "Name a person."}], response_format=Person, seed=seed, max_tokens=900,
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )  # fmt: skip
    assert isinstance(parsed.choices[0].message.parsed, Person)


@pytest.mark.parametrize(
    ("body", "pattern"),
    [
        ({"regex": "[a-c]{3}-[0-9]{2}"}, "[a-c]{3}-[0-9]{2}"),
        ({"structured_outputs": {"choice": ["red", "green"]}}, "red|green"),
        ({"structured_outputs": {"regex": "x{2,4}"}}, "x{2,4}"),
        ({"ebnf": 'root ::= "a" | "b" root'}, "b*a"),
        ({"structured_outputs": {"grammar": 'root ::= "ok"'}}, "ok"),
        ({"structured_outputs": {"json": {"type": "integer"}}}, "-?[0-9]+"),
        ({"json_schema": '{"const": 7}'}, "7"),
    ],
)
def test_every_spelling_of_a_constraint_is_obeyed(client: openai.OpenAI, body: dict[str, Any], pattern: str) -> None:
    for stream in (False, True):
        options: dict[str, Any] = {"temperature": 1.5, "seed": 3, "max_tokens": 200}
        extra = {**body, "chat_template_kwargs": {"enable_thinking": False}}
        if stream:
            message, reason = streamed(client, HELLO, extra_body=extra, **options)
            text = message["content"]
        else:
            choice = ask(client, extra_body=extra, **options).choices[0]
            text, reason = choice.message.content or "", choice.finish_reason
        assert reason == "stop", text
        assert re.fullmatch(pattern, text), text


def test_completions_and_generate_obey_too(client: openai.OpenAI, server: ServerProcess) -> None:
    completion = client.completions.create(
        model=MODEL, prompt="Hello", max_tokens=50, n=3, temperature=1.5, extra_body={"regex": "[xy]{4}"}
    )
    assert all(re.fullmatch("[xy]{4}", choice.text) for choice in completion.choices)
    answer = server.post("/generate", {"text": "Hello", "sampling_params": {"regex": "[xy]{4}", "max_new_tokens": 50}}).json()
    assert re.fullmatch("[xy]{4}", answer["text"])
    assert answer["meta_info"]["finish_reason"]["type"] == "stop"


def test_a_json_object_is_one_whatever_the_model_would_say(client: openai.OpenAI) -> None:
    thoughtless = {"chat_template_kwargs": {"enable_thinking": False}}
    options: dict[str, Any] = {"response_format": {"type": "json_object"}, "temperature": 1, "max_tokens": 200, "extra_body": thoughtless}
    choices = ask(client, n=8, **options).choices
    whole = [json.loads(choice.message.content or "") for choice in choices if choice.finish_reason == "stop"]
    assert whole
    assert all(isinstance(value, dict) for value in whole)


def test_reasoning_is_free_and_the_answer_behind_it_is_not(client: openai.OpenAI) -> None:
    choice = ask(client, [{"role": "user", "content": "What is the capital of France?"}], extra_body={"regex": "[A-Z]{3}"}).choices[0]
    assert choice.message.model_extra is not None
    assert "Paris" in choice.message.model_extra["reasoning_content"]
    assert re.fullmatch("[A-Z]{3}", choice.message.content or "")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strin"}}}}, "'x'"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"uniqueItems": True}}}}, "uniqueItems"),
        ({"regex": "(((("}, "regex"),
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "regex"),
        ({"ebnf": "nothing"}, "ebnf"),
        ({"response_format": {"type": "xml"}}, "json_schema"),
    ],
)
def test_a_constraint_that_cannot_be_kept_is_refused(client: openai.OpenAI, body: dict[str, Any], words: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, extra_body=body)
    assert words in refused.value.message


@pytest.mark.long
def test_parameters_that_are_text_are_held_to_their_schema_or_refused(start_server: StartServer) -> None:
    server = start_server("--reasoning-parser", "qwen3", "--tool-call-parser", "qwen3_coder").ready()
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="None", max_retries=0)
    properties: dict[str, Any] = {
        "code": {"type": "string", "pattern": "[0-9]", "minLength": 3, "maxLength": 6},
        "note": {"type": "string", "maxLength": 20},
    }
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    note: dict[str, Any] = {"type": "function", "function": {"name": "note", "parameters": parameters, "strict": True}}
    options: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 1.5}
    options["extra_body"] = {"chat_template_kwargs": {"enable_thinking": False}}
    for seed in range(5):
        ((name, arguments),) = calls_of(ask(client, ASK, tools=[note], seed=seed, **options))
        assert name == "note"
        jsonschema.validate(arguments, parameters)
    properties["day"] = {"type": "string", "format": "date"}
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, ASK, tools=[note], **options)
    assert refused.value.param == "tools[0].function.parameters"
    assert "#/properties/day" in refused.value.message


@pytest.mark.long
def test_a_server_whose_template_shows_no_tools_says_so_in_its_log_and_its_answers(start_server: StartServer) -> None:
    server = start_server("--chat-template", CHATML).ready()
    assert [line for line in server.lines if line.startswith("WARNING: ") and "template" in line]
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 20, "tools": [NOW]}
    for more in ({}, {"stream": True}, {"tool_choice": "required"}):
        answer = server.http.post(f"{server.url}/v1/chat/completions", json={**body, **more})
        assert (answer.status_code, answer.headers["X-Banyan-Ignored"]) == (200, "tools")
    server.stop()

"""From the bytes of a request to its plan, on the small model of the repository."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy
import pytest

from banyan_runtime import wire
from banyan_runtime.config import ServerConfig
from banyan_runtime.front.errors import ApiError
from banyan_runtime.front.native.schema import (
    TOKENIZE_UNSUPPORTED,
    UNSUPPORTED,
    DetokenizeRequest,
    NativeGenerateRequest,
    NativeSampling,
    TokenizeRequest,
)
from banyan_runtime.front.openai.schema import CHAT_UNSUPPORTED, COMPLETION_UNSUPPORTED, ChatRequest, CompletionRequest
from banyan_runtime.front.plan import AnswerPlan, ChatPlan, CompletionPlan, Endpoint, NativePlan, Plan
from banyan_runtime.front.prepare.frames import FRAME_HEAD, pack, unpack, unpack_head
from banyan_runtime.front.prepare.planner import Planner
from banyan_runtime.front.text.text import Text
from banyan_runtime.front.text.tokenizer import Tokenizer
from tests.front.support import engine_info

USER = [{"role": "user", "content": "What is the capital of France?"}]
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(scope="module")
def planner(tiny_chat: Path) -> Planner:
    return planner_of(tiny_chat)


def planner_of(folder: Path, **flags: Any) -> Planner:
    config = ServerConfig(model_path=str(folder), served_model_name=("tiny", "other"), **flags)
    text = Text.load(config, folder)
    return Planner(config, text, engine_info(vocab_size=text.model_config["vocab_size"]))


def plan(planner: Planner, endpoint: Endpoint, body: dict[str, Any]) -> Plan:
    return planner.plan(endpoint, json.dumps(body).encode(), "request")


def chat(planner: Planner, **body: Any) -> ChatPlan:
    made = plan(planner, "chat", {"messages": USER, **body})
    assert isinstance(made, ChatPlan)
    return made


def completion(planner: Planner, **body: Any) -> CompletionPlan:
    made = plan(planner, "completions", {"prompt": "Hello there", **body})
    assert isinstance(made, CompletionPlan)
    return made


def native(planner: Planner, **body: Any) -> NativePlan:
    made = plan(planner, "generate", body)
    assert isinstance(made, NativePlan)
    return made


def refused(planner: Planner, endpoint: Endpoint, **body: Any) -> ApiError:
    basis: dict[str, dict[str, Any]] = {"chat": {"messages": USER}, "completions": {"prompt": "a"}}
    with pytest.raises(ApiError) as raised:
        plan(planner, endpoint, {**basis.get(endpoint, {}), **body})
    assert 400 <= raised.value.status < 500
    return raised.value


def test_a_chat_becomes_one_sequence_a_choice_with_one_prompt(planner: Planner) -> None:
    made = chat(planner, n=3, seed=7, max_tokens=5, stop="x", stream=True, stream_options={"include_usage": True}, model="other")
    assert len(made.requests) == made.choices_per_prompt == 3
    assert len({request.token_ids for request in made.requests}) == 1
    envelope = made.envelope
    assert (envelope.model, envelope.stream, envelope.include_usage, envelope.continuous_usage) == ("other", True, True, False)
    first = made.requests[0]
    assert (first.sampling.max_new_tokens, first.sampling.seed, first.stops, first.param) == (5, 7, ("x",), "messages")
    assert first.stream_interval == 1


def test_equal_requests_have_equal_plans_and_others_their_own_seeds(planner: Planner) -> None:
    body = json.dumps({"messages": USER}).encode()
    assert planner.plan("chat", body, "a") == planner.plan("chat", body, "a")
    assert planner.plan("chat", body, "a") != planner.plan("chat", body, "b")


def test_an_own_id_seeds_a_request_whatever_the_server_calls_it(planner: Planner) -> None:
    body = json.dumps({"messages": USER, "rid": "mine"}).encode()
    first, second = planner.plan("chat", body, "a"), planner.plan("chat", body, "b")
    assert isinstance(first, ChatPlan)
    assert first == second
    assert (first.envelope.own_id, first.envelope.own_id_param) == ("mine", "rid")


def test_choice_i_of_a_seed_is_that_of_the_seed_i_further(planner: Planner) -> None:
    def seeds(**body: Any) -> list[int]:
        return [request.sampling.seed for request in chat(planner, **body).requests]

    assert seeds(seed=1, n=4) == [1, 2, 3, 4]
    assert len({*seeds(n=4), *seeds(n=4, rid="other")}) == 8


def test_the_prompts_of_one_request_draw_apart(planner: Planner) -> None:
    made = completion(planner, prompt=["a", "b"], n=2)
    assert len({request.sampling.seed for request in made.requests}) == 4
    assert len({request.sampling.seed for request in completion(planner, prompt=["a", "b"], n=2, seed=3).requests}) == 2


def test_logprobs_of_a_chat(planner: Planner) -> None:
    assert chat(planner).top_logprobs == -1
    assert chat(planner).requests[0].logprobs is None
    assert chat(planner, logprobs=False).top_logprobs == -1
    made = chat(planner, logprobs=True, top_logprobs=3)
    assert (made.top_logprobs, made.requests[0].logprobs) == (3, wire.LogprobRequest(output_top=3))
    assert chat(planner, logprobs=True).requests[0].logprobs == wire.LogprobRequest(output_top=0)


def test_logprobs_of_an_echoed_prompt_start_behind_its_first_token(planner: Planner) -> None:
    made = completion(planner, prompt=[5, 6, 7], echo=True, logprobs=2, max_tokens=0)
    assert (made.echo_logprobs, made.top_logprobs) == (True, 2)
    assert made.requests[0].logprobs == wire.LogprobRequest(output_top=-1, prompt_from=1, prompt_top=2)
    assert made.requests[0].sampling.max_new_tokens == 0
    assert completion(planner, logprobs=1).requests[0].logprobs == wire.LogprobRequest(output_top=1)
    alone = completion(planner, prompt=[5], echo=True, logprobs=2, max_tokens=0)
    assert alone.requests[0].logprobs is None  # nothing comes before it: there is nothing to compute


def test_logprobs_of_generate_come_by_item(planner: Planner) -> None:
    made = native(
        planner,
        input_ids=[[5, 6, 7], [5, 6], [8]],
        return_logprob=[True, True, False],
        logprob_start_len=[0, -1, 0],
        top_logprobs_num=2,
        return_text_in_logprobs=True,
    )
    assert [request.logprobs for request in made.requests] == [wire.LogprobRequest(2, 1, 2), wire.LogprobRequest(2), None]
    assert (made.top_logprobs, made.logprobs_from, made.text_in_logprobs) == ((2, 2, -1), (0, -1, -1), True)
    named = native(planner, input_ids=[[5, 6], [7]], return_logprob=True, token_ids_logprob=[4, 9])
    assert (named.named, {request.logprobs for request in named.requests}) == (
        (2, 2),
        {wire.LogprobRequest(0, named=wire.pack_ids([4, 9]))},
    )
    each = native(planner, input_ids=[[5, 6], [7]], return_logprob=[True, False], token_ids_logprob=[[4], [9]])
    assert (each.named, each.requests[0].logprobs) == ((1, 0), wire.LogprobRequest(0, named=wire.pack_ids([4])))
    behind = native(planner, input_ids=[5, 6, 7], return_logprob=True, logprob_start_len=1)
    assert (behind.logprobs_from, behind.requests[0].logprobs) == ((1,), wire.LogprobRequest(0, 2, 0))
    assert refused(planner, "generate", text="a", return_logprob=True, logprob_start_len=50).param == "logprob_start_len"
    assert refused(planner, "generate", text="a", return_logprob=[True, False]).param == "return_logprob"
    assert refused(planner, "generate", text="a", return_logprob=True, top_logprobs_num=21).param == "top_logprobs_num"


@pytest.mark.parametrize(
    ("endpoint", "body", "param", "message"),
    [
        ("chat", {"top_logprobs": 2}, "top_logprobs", "`logprobs` must be set to true"),
        ("chat", {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "greater than max allowed: 20"),
        ("chat", {"logprobs": 1}, "logprobs", "expected a boolean, got an integer"),
        ("completions", {"logprobs": True}, "logprobs", "expected an integer, got a boolean"),
        ("completions", {"logprobs": 21}, "logprobs", "greater than max allowed: 20"),
        ("completions", {"top_logprobs": 1}, "top_logprobs", "Unsupported parameter"),
        ("chat", {"prompt_logprobs": 0}, "prompt_logprobs", "Unsupported parameter"),
        ("generate", {"text": "a", "token_ids_logprob": [99_999]}, "token_ids_logprob", "Token id 99999 is out of vocabulary"),
        ("generate", {"text": "a", "token_ids_logprob": ["a"]}, "token_ids_logprob", "expected a list of token ids"),
        ("generate", {"text": "a", "token_ids_logprob": [1.5]}, "token_ids_logprob", "expected a list of token ids"),
        ("generate", {"text": ["a", "b"], "token_ids_logprob": [[1]]}, "token_ids_logprob", "1 items for 2 prompts"),
        ("generate", {"text": "a", "token_ids_logprob": [1] * 129}, "token_ids_logprob", "at most 128 token ids, got 129"),
    ],
)
def test_logprobs_that_cannot_be_had_are_refused(
    planner: Planner, endpoint: Endpoint, body: dict[str, Any], param: str, message: str
) -> None:
    error = refused(planner, endpoint, **body)
    assert error.param == param
    assert message in error.message


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"reasoning_effort": "bogus"}, "reasoning_effort", "none, minimal, low, medium, high, xhigh, max"),
        ({"reasoning": {"effort": "bogus"}}, "reasoning.effort", "none, minimal"),
        ({"verbosity": "loud"}, "verbosity", "low, medium, high"),
        ({"service_tier": "bogus"}, "service_tier", "auto, default, flex, scale, priority"),
        ({"functions": [{"name": "f"}, {"name": "f"}]}, "functions[1].name", "'f' is the name of two tools"),
        ({"functions": [{"description": "x"}]}, "functions[0].name", "'functions[0].name'"),
        ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call", "'g' not found"),
        ({"functions": [{"name": "f"}], "function_call": "required"}, "function_call", "none, auto, or an object"),
        ({"functions": [{"name": "f"}], "tools": [TOOL]}, "functions", "exclude each other"),
        ({"function_call": {"name": "f"}}, "function_call", "there are no functions"),
        ({"functions": [{"name": "f"}], "tool_choice": "required"}, "tool_choice", "exclude each other; with functions, say function_call"),
        ({"tools": [TOOL], "function_call": {"name": "g"}}, "function_call", "exclude each other; with tools, say tool_choice"),
        ({"tools": [TOOL], "function_call": "none"}, "function_call", "exclude each other"),
        ({"tools": [TOOL], "function_call": "required"}, "function_call", "none, auto, or an object"),
        ({"web_search_options": {}}, "web_search_options", "Unsupported parameter"),
        ({"min_tokens": 10**30}, "min_tokens", "min_tokens must be at most"),
        ({"min_tokens": 6, "max_completion_tokens": 5}, "min_tokens", "at most max_completion_tokens=5, got 6"),
        ({"priority": 1001}, "priority", "priority must be in [-1000, 1000]"),
        ({"priority": -1001}, "priority", "priority must be in [-1000, 1000]"),
        ({"cache_salt": "s" * 1025}, "cache_salt", "at most 1024 characters"),
        ({"repetition_penalty": 1e-38}, "repetition_penalty", "must be in [0.01, 2]"),
        ({"stop": "s" * 1025}, "stop", "at most 1024 characters"),
        ({"stop_token_ids": [5] * 1025}, "stop_token_ids", "at most 1024 stop token ids"),
        ({"max_tokens": 10**50}, "messages", "a number of more than 40 digits"),
        ({"rid": "a\nb"}, "rid", "printable"),
    ],
)
def test_what_is_wrong_or_cannot_be_had_is_refused_by_name(planner: Planner, body: dict[str, Any], param: str, message: str) -> None:
    error = refused(planner, "chat", **body)
    assert error.param == param
    assert message in error.message


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "nope"}, "'type' must be one of array, boolean,"),
        ({"properties": {"many": {"anyOf": [{}] * 20_001}}}, "it has more than 20000 schemas and values of enums in it."),
        ({"properties": {"many": {"enum": [1] * 20_001}}}, "it has more than 20000 schemas and values of enums in it."),
        ({"type": "array", "items": {}}, "schema must be a JSON Schema of 'type: \"object\"', got 'type: \"array\"'."),
        ({"type": ["string", "null"]}, "schema must be a JSON Schema of 'type: \"object\"', got 'type: [\"string\",\"null\"]'."),
        ({"type": [["object"]]}, "'type' must be one of"),
        ({"type": "object", "properties": []}, "'properties' must be an object"),
        ({"type": "object", "properties": {"city": "string"}}, "'properties.city' must be an object, true or false"),
        ({"type": "object", "properties": {"city": {"type": "str"}}}, "'properties.city.type' must be one of"),
        ({"type": "object", "properties": {"city": {"type": "string", "required": True}}}, "'properties.city.required' must be a list"),
        ({"properties": {"many": {"items": {"anyOf": [{"type": "number"}, {"enum": []}]}}}}, "'properties.many.items.anyOf[1].enum' "),
        ({"$defs": {"a": {"items": [{"type": "x"}]}}}, "'$defs.a.items[0].type' must be"),
    ],
)  # fmt: skip
def test_a_tool_whose_parameters_are_no_schema_is_refused_whether_or_not_it_may_be_called(
    planner: Planner, schema: dict[str, Any], words: str
) -> None:
    error = refused(planner, "chat", tools=[{"type": "function", "function": {"name": "f", "parameters": schema}}], tool_choice="none")
    assert (error.code, error.param) == ("invalid_function_parameters", "tools[0].function.parameters")
    assert f"Invalid schema for function 'f': {words}" in error.message
    older = refused(planner, "chat", functions=[{"name": "f", "parameters": schema}])
    assert older.param == "functions[0].parameters"


@pytest.mark.parametrize(
    "schema",
    [
        {},
        None,
        {"properties": {"a": {}}},
        {"type": "object"},
        {
            "type": ["object", "null"],
            "properties": {"a": True, "type": {"type": "string"}, "required": {"enum": ["x", None]}},
            "required": [],
        },
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"const": 1}}, "additionalProperties": False},
        {"type": "object", "properties": {"a": {"type": "array", "items": [{"type": "string"}], "x-order": [1], "default": {"type": "y"}}}},
    ],
)
def test_a_tool_may_have_any_schema_for_its_parameters(planner: Planner, schema: dict[str, Any]) -> None:
    chat(planner, tools=[{"type": "function", "function": {"name": "f", "parameters": schema}}], tool_choice="none")


@pytest.mark.parametrize("call", [None, "none", "auto"])
def test_functions_are_tools_in_older_words(tiny_chat: Path, call: str | None) -> None:
    planner = planner_of(tiny_chat, tool_call_parser="hermes")
    functions = [{"name": "now", "description": "The time.", "parameters": {"type": "object", "properties": {}}}, {"name": "later"}]
    older = {"functions": functions, "function_call": call}
    newer = {"tools": [{"type": "function", "function": each} for each in functions], "tool_choice": call}
    assert chat(planner, **older) == chat(planner, **newer)
    assert chat(planner, **older).envelope.ignored == ()


def test_a_request_brings_its_own_template_where_the_server_lets_it(planner: Planner, tiny_chat: Path) -> None:
    own = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ tone }}{% endfor %}"
    error = refused(planner, "chat", chat_template=own)
    assert (error.code, error.param) == ("unsupported", "chat_template")
    assert "--trust-request-chat-template" in error.message
    trusting = planner_of(tiny_chat, trust_request_chat_template=True)
    assert chat(trusting) == chat(planner)
    tokenizer = Tokenizer.load(tiny_chat)
    text = f"{tokenizer.named.get('bos_token', '')}<user>{USER[0]['content']}!"
    ids = wire.pack_ids(tokenizer.encode(text, add_special_tokens=False))
    for body in (
        {"chat_template": own, "chat_template_kwargs": {"tone": "!"}},
        {"chat_template_kwargs": {"tone": "!", "chat_template": own}},
    ):
        assert chat(trusting, **body).requests[0].token_ids == ids
    for body, param in (
        ({"chat_template": "{% for"}, "chat_template"),
        ({"chat_template": "(" * 5000 + "{{ " + "(" * 5000}, "chat_template"),
        ({"chat_template": "{{ raise_exception('no') }}"}, "chat_template"),
        ({"chat_template": "{{ ''.__class__.__mro__ }}"}, "chat_template"),
        ({"chat_template_kwargs": {"chat_template": "{% for"}}, "chat_template_kwargs.chat_template"),
        ({"chat_template_kwargs": {"chat_template": [own]}}, "chat_template_kwargs.chat_template"),
        ({"chat_template": own, "chat_template_kwargs": {"chat_template": own}}, "chat_template_kwargs.chat_template"),
        ({"chat_template": own, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ):
        assert refused(trusting, "chat", **body).param == param, body


def test_stream_options_have_no_effect_without_a_stream(planner: Planner) -> None:
    for make in (chat, completion):
        made = make(planner, stream_options={"include_usage": True})
        assert made.envelope.ignored == ("stream_options",)
        assert make(planner, stream=True, stream_options={"include_usage": True}).envelope.ignored == ()


@pytest.mark.parametrize("name", ["tools", "documents", "messages", "add_generation_prompt", "chat_template", "eos_token"])
def test_template_variables_do_not_go_round_what_other_fields_refuse(planner: Planner, name: str) -> None:
    endpoints: tuple[Endpoint, ...] = ("chat", "tokenize")
    for endpoint in endpoints:
        error = refused(planner, endpoint, messages=USER, chat_template_kwargs={name: []})
        assert (error.code, error.param) == ("unsupported", f"chat_template_kwargs.{name}")


@pytest.mark.parametrize(
    ("ours", "value", "message"),
    [
        ("top_p", 7, "{} must be in (0, 1], got 7."),
        ("n", 0, "{} must be at least 1, got 0."),
        ("max_tokens", -1, "{} must be at least "),
        ("min_tokens", -1, "{} must be at least 0, got -1."),
        ("seed", 2**63, "{} must be a 64-bit integer, got "),
        ("stop", "", "{} must not contain an empty string."),
    ],
)
def test_a_sampling_field_is_refused_in_the_same_words_everywhere_under_the_clients_name_for_it(
    planner: Planner, ours: str, value: Any, message: str
) -> None:
    natively = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}.get(ours, ours)
    for name, error in (
        (ours, refused(planner, "chat", **{ours: value})),
        (ours, refused(planner, "completions", **{ours: value})),
        (natively, refused(planner, "generate", text="a", sampling_params={natively: value})),
    ):
        assert (error.param, error.message[: len(message.format(name))]) == (name, message.format(name))
    if natively != ours:
        assert refused(planner, "generate", text="a", sampling_params={ours: 1}).code == "unknown_parameter"
        wrong = refused(planner, "generate", text="a", sampling_params={natively: "x"})
        assert (wrong.code, wrong.param) == ("invalid_type", f"sampling_params.{natively}")


def test_the_newer_word_of_chat_for_the_most_tokens_wins_and_is_the_one_in_errors(planner: Planner) -> None:
    assert chat(planner, max_tokens=0, max_completion_tokens=3).requests[0].sampling.max_new_tokens == 3
    error = refused(planner, "chat", max_tokens=9, max_completion_tokens=3, min_tokens=4)
    assert (error.param, error.message) == ("min_tokens", "min_tokens must be at most max_completion_tokens=3, got 4.")


def test_what_has_no_effect_is_named_and_what_asks_for_nothing_is_not(planner: Planner) -> None:
    idle = {"store": True, "metadata": {"a": "b"}, "service_tier": "scale", "verbosity": "low", "prediction": {"type": "content"}}
    made = chat(planner, **idle, prompt_cache_key="k", session_id="s", nonsense=1)
    assert set(made.envelope.ignored) == {*idle, "prompt_cache_key", "session_id", "nonsense"}
    nothing = {"store": False, "metadata": {}, "service_tier": "auto", "verbosity": "medium", "user": "u", "parallel_tool_calls": True}
    assert chat(planner, **nothing, tools=[], tool_choice="auto", response_format={"type": "text"}, stop=None).envelope.ignored == ()


def test_either_key_of_a_client_keeps_its_cached_prefixes_apart(planner: Planner) -> None:
    salts = [
        chat(planner, **body).requests[0].salt
        for body in ({}, {"cache_salt": "a"}, {"extra_key": "b"}, {"cache_salt": "a", "extra_key": "b"})
    ]
    assert salts[0] == ""
    assert len(set(salts)) == 4


def test_stop_tokens_must_leave_something_to_generate(tmp_path: Path, planner: Planner) -> None:
    config = ServerConfig(model_path="m")
    small = Planner(config, planner._served.text, engine_info(vocab_size=64))
    error = refused(small, "completions", prompt=[5], stop_token_ids=list(range(64)), min_tokens=1)
    assert (error.param, error.status) == ("stop_token_ids", 400)
    assert completion(small, prompt=[5], stop_token_ids=list(range(64))).requests


@pytest.mark.parametrize("temperature", [10**400, 1e308, 1e6 + 1])
def test_a_temperature_that_no_computer_can_divide_by_is_refused(planner: Planner, temperature: float) -> None:
    error = refused(planner, "generate", text="a", sampling_params={"temperature": temperature})
    assert (error.status, error.param) == (400, "temperature")
    assert native(planner, text="a", sampling_params={"temperature": 100}).requests


def test_min_tokens_beyond_the_default_length_are_refused(planner: Planner) -> None:
    assert "at most 16" in refused(planner, "completions", min_tokens=17).message
    assert refused(planner, "generate", text="a", sampling_params={"min_new_tokens": 129}).param == "min_new_tokens"
    assert completion(planner, min_tokens=16).requests[0].sampling.min_new_tokens == 16


def test_one_request_cannot_ask_for_thousands_of_sequences(planner: Planner) -> None:
    assert len(completion(planner, prompt=["a"] * 8, n=128).requests) == 1024
    assert refused(planner, "completions", prompt=["a"] * 9, n=128).param == "n"
    assert refused(planner, "generate", text=["a"] * 1024, sampling_params={"n": 2}).param == "n"


def test_the_stop_conditions_of_a_list_are_bounded_together(planner: Planner) -> None:
    each = {"stop": ["s" * 1000 + str(number) for number in range(32)]}
    assert native(planner, text=["a"] * 2, sampling_params=[each] * 2).requests
    assert refused(planner, "generate", text=["a"] * 3, sampling_params=[each] * 3).code == "array_above_max_length"


def test_generate_keeps_ids_and_stream_intervals_by_prompt(planner: Planner) -> None:
    made = native(planner, text=["a", "b"], rid="x", stream=True, sampling_params=[{"n": 2, "stream_interval": 4}, {"n": 2}], priority=-3)
    assert made.rids == ("x_0", "x_0", "x_1", "x_1")
    assert [request.stream_interval for request in made.requests] == [4, 4, 1, 1]
    assert {request.priority for request in made.requests} == {-3}
    assert made.listed
    assert not native(planner, text="a").listed
    assert native(planner, text="a").rids == (None,)


@pytest.mark.parametrize("content", ["", []])
def test_a_prompt_without_tokens_is_refused_on_every_path(tiny_chat: Path, content: Any) -> None:
    bare = planner_of(tiny_chat, chat_template="{{ messages[-1].content }}")
    error = refused(bare, "chat", messages=[{"role": "user", "content": content}])
    assert (error.param, error.code) == ("messages", "empty_array")
    assert refused(bare, "completions", prompt=["a", ""]).param == "prompt"
    assert refused(bare, "completions", prompt=[[5], []]).code == "empty_array"
    assert refused(bare, "generate", text=["a", ""]).param == "text"
    assert refused(bare, "generate", input_ids=[[5], []]).param == "input_ids"


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The length of every text that is tokenized."""
    lengths: list[int] = []
    encode = Tokenizer.encode

    def spy(self: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
        lengths.append(len(text))
        return encode(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", spy)
    return lengths


@pytest.mark.parametrize("text", [" " * 5_000_000, "word " * 1_000_000, "a" * 5_000_000], ids=["spaces", "words", "one word"])
def test_of_a_prompt_that_is_far_too_long_only_the_beginning_is_tokenized(planner: Planner, encoded: list[int], text: str) -> None:
    bodies: tuple[tuple[Endpoint, dict[str, Any]], ...] = (
        ("chat", {"messages": [{"role": "user", "content": text}]}),
        ("completions", {"prompt": ["a", text]}),
        ("generate", {"text": text}),
    )
    for endpoint, body in bodies:
        error = refused(planner, endpoint, **body)
        assert (error.code, error.param) == ("context_length_exceeded", "messages" if endpoint == "chat" else "prompt")
        assert "maximum context length is 2048 tokens" in error.message
        assert "contains at least " in error.message
    assert sum(encoded) < 200_000


def test_a_long_prompt_of_few_tokens_is_tokenized_whole(planner: Planner, encoded: list[int]) -> None:
    text = "<|im_end|>" * 1900
    assert len(text) > 8 * 2042
    made = completion(planner, prompt=text, max_tokens=1)
    assert made.requests[0].prompt_tokens >= 1900
    assert encoded[-1] == len(text)


def test_of_a_long_prompt_that_may_be_cut_the_beginning_is_kept(tiny_chat: Path, planner: Planner) -> None:
    cut = planner_of(tiny_chat, allow_auto_truncate=True)
    text = "one two three " * 5000
    tokenizer = cut._served.text.needed_tokenizer
    whole = tokenizer.encode(text, add_special_tokens=True)
    assert completion(cut, prompt=text, max_tokens=1).requests[0].token_ids == wire.pack_ids(whole[: cut._served.info.max_req_input_len])


def test_echo_repeats_the_prompt_for_each_choice(planner: Planner) -> None:
    assert completion(planner, echo=True, n=2).echoes == ("Hello there", "Hello there")
    ids = json.loads(answer(planner, "tokenize", prompt="Hello there", add_special_tokens=False))["tokens"]
    assert completion(planner, prompt=ids, echo=True).echoes == ("Hello there",)
    assert completion(planner).echoes == ("",)


def answer(planner: Planner, endpoint: Endpoint, **body: Any) -> bytes:
    made = plan(planner, endpoint, body)
    assert isinstance(made, AnswerPlan)
    return made.body


def test_tokenizing_there_and_back(planner: Planner) -> None:
    told = json.loads(answer(planner, "tokenize", prompt=["Hello", "Hello there"], return_token_strs=True))
    assert told["count"] == [len(ids) for ids in told["tokens"]]
    assert ["".join(pieces) for pieces in told["token_strs"]] == ["Hello", "Hello there"]
    assert told["max_model_len"] == 2048
    assert json.loads(answer(planner, "detokenize", tokens=told["tokens"][1]))["text"] == "Hello there"
    rendered = json.loads(answer(planner, "tokenize", messages=USER))
    assert wire.pack_ids(rendered["tokens"]) == chat(planner).requests[0].token_ids
    assert refused(planner, "detokenize", tokens=[0] * 1_000_001).code == "array_above_max_length"


def test_who_tokenizes_for_another_model_is_told_so(planner: Planner) -> None:
    asked: dict[Endpoint, dict[str, Any]] = {"tokenize": {"prompt": "a"}, "detokenize": {"tokens": [5]}}
    for endpoint, fields in asked.items():
        assert answer(planner, endpoint, model="other", **fields)
        error = refused(planner, endpoint, model="unheard-of", **fields)
        assert (error.status, error.code, error.param) == (404, "model_not_found", "model")


def test_without_a_tokenizer_only_ids_are_planned(tiny_chat: Path) -> None:
    bare = planner_of(tiny_chat, skip_tokenizer_init=True)
    assert native(bare, input_ids=[1, 2], return_logprob=True).requests[0].prompt_tokens == 2
    assert "no tokenizer" in refused(bare, "chat").message
    assert "no tokenizer" in refused(bare, "generate", text="a").message
    assert refused(bare, "generate", input_ids=[1], sampling_params={"stop": "x"}).param == "stop"


@pytest.mark.parametrize(
    "body", [b'{"messages": [', b"\xff\xfe", b"[1]", b'"text"', b"", b'{"a": NaN}', b"[" * 200_000, b'{"a":"\\ud800"}']
)
def test_what_is_no_json_object_is_named_as_such(planner: Planner, body: bytes) -> None:
    with pytest.raises(ApiError, match="We could not parse the JSON body of your request"):
        planner.plan("chat", body, "request")


VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 3, 2**31, 2**63, 2**70, -(2**70), 10**400, 1e308, -1e308, 5e-324, 1e-38, -0.0, -0.5, 2.0,
    "", "a", "\x00", "é", "\u2028", "high", "auto", "none", "a" * 5000,
    [], [[]], [None], [1], [1.0], [2**70], [-1], ["a"], [""], ["a", 1], [[1], "a"], [[1], [2]], [True], [{"n": 2}],
    {}, {"a": 1}, {"type": "text"}, {"tools": []}, {"enable_thinking": False}, {"include_usage": True}, {"effort": "none"},
    {"max_new_tokens": 2**70}, {"temperature": 10**400}, {"stop": ["a"], "n": 2}, {"stop_token_ids": [0, 5]},
    [{"type": "text"}], [{"role": "user", "content": "x"}], [{"role": "assistant", "content": None}],
    [{"role": "user", "content": [{"type": "text", "text": "x"}]}], [{"role": "tool", "tool_calls": [{"function": {"name": "f"}}]}],
)  # fmt: skip


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


def outcome(planner: Planner, endpoint: Endpoint, body: dict[str, Any]) -> Plan | ApiError:
    try:
        return plan(planner, endpoint, body)
    except ApiError as error:
        return error


@pytest.mark.parametrize("seed", range(4))
def test_whatever_values_are_in_whatever_fields_the_plan_is_made_or_refused_and_can_be_sent(planner: Planner, seed: int) -> None:
    dice = random.Random(seed)
    values = (*VALUES, nested(50), nested(900))
    fields: dict[Endpoint, list[str]] = {
        "chat": [*ChatRequest.model_fields, *CHAT_UNSUPPORTED, "user"],
        "completions": [*CompletionRequest.model_fields, *COMPLETION_UNSUPPORTED],
        "generate": [*NativeGenerateRequest.model_fields, *UNSUPPORTED],
        "tokenize": [*TokenizeRequest.model_fields, *TOKENIZE_UNSUPPORTED],
        "detokenize": list(DetokenizeRequest.model_fields),
    }
    basis: dict[str, Any] = {"chat": {"messages": USER}, "completions": {"prompt": "a"}, "generate": {"text": "a"}}
    planned = 0
    for _ in range(2500):
        endpoint = dice.choice(list(fields))
        body: dict[str, Any] = dict(basis.get(endpoint, {}))
        for field in dice.sample(fields[endpoint], dice.randrange(1, 3)):
            body[field] = dice.choice(values)
        if endpoint == "generate" and dice.random() < 0.5:
            body["sampling_params"] = {
                name: dice.choice(values) for name in dice.sample(list(map(NativeSampling.word, NativeSampling.model_fields)), 2)
            }
        made = outcome(planner, endpoint, body)
        if isinstance(made, ApiError):
            assert 400 <= made.status < 500, body
            assert len(json.dumps(made.body())) < 2000, body
            continue
        planned += 1
        head, *parts = pack(made)
        assert unpack(unpack_head(head[FRAME_HEAD.size :]), parts) == made, body
        for request in () if isinstance(made, AnswerPlan) else getattr(made, "requests", ()):
            sent = wire.Submit(1, request.token_ids, request.sampling, request.priority, request.salt, logprobs=request.logprobs)
            assert wire.decode_front(wire.encode(sent)) == sent, body
            assert all(numpy.isfinite(numpy.float32(getattr(request.sampling, name))) for name in ("temperature", "top_p", "min_p"))
    assert planned > 30


@pytest.mark.parametrize(
    ("fields", "priority", "tier"),
    [
        ({}, 0, None),
        ({"service_tier": "auto"}, 0, "default"),
        ({"service_tier": "flex"}, -1, "flex"),
        ({"service_tier": "priority"}, 1, "priority"),
        ({"service_tier": "flex", "priority": 5}, 5, "flex"),
    ],
)
def test_a_tier_of_service_is_a_priority(planner: Planner, fields: dict[str, Any], priority: int, tier: str | None) -> None:
    plan = planner.plan("chat", json.dumps({"messages": [{"role": "user", "content": "Hi"}], **fields}).encode(), "r")
    assert isinstance(plan, ChatPlan)
    assert (plan.requests[0].priority, plan.envelope.tier) == (priority, tier)

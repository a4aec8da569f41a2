"""What becomes of a request in its plan, whatever stands in its fields."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy
import pytest

from banyan_runtime import nesting, wire
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
from banyan_runtime.front.plan import AnswerPlan, ChatPlan, CompletionPlan, Endpoint, Plan
from banyan_runtime.front.prepare.planner import Planner
from banyan_runtime.front.prepare.worker_client import LENGTH, Planned, decode_message, framed
from tests.unit.front.planning import USER, answer, chat, completion, native, plan, planner_of, refused


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


def test_choices_of_different_seeds_are_independent_and_the_first_is_that_of_a_request_for_one(planner: Planner) -> None:
    def seeds(**body: Any) -> list[int]:
        return [request.sampling.seed for request in chat(planner, **body).requests]

    assert seeds(seed=1, n=4) == [1, *seeds(seed=1, n=4)[1:]]
    assert seeds(seed=1) == [1]
    assert len({seed for near in range(-3, 4) for seed in seeds(seed=near, n=4)}) == 28
    assert len({*seeds(n=4), *seeds(n=4, rid="other")}) == 8


def test_the_prompts_of_one_request_draw_apart(planner: Planner) -> None:
    made = completion(planner, prompt=["a", "b"], n=2)
    assert len({request.sampling.seed for request in made.requests}) == 4
    assert len({request.sampling.seed for request in completion(planner, prompt=["a", "b"], n=2, seed=3).requests}) == 2


def test_stream_options_have_no_effect_without_a_stream(planner: Planner) -> None:
    for make in (chat, completion):
        made = make(planner, stream_options={"include_usage": True})
        assert made.envelope.ignored == ("stream_options",)
        assert make(planner, stream=True, stream_options={"include_usage": True}).envelope.ignored == ()


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


def test_generate_keeps_ids_and_stream_intervals_by_prompt(planner: Planner) -> None:
    made = native(planner, text=["a", "b"], rid="x", stream=True, sampling_params=[{"n": 2, "stream_interval": 4}, {"n": 2}], priority=-3)
    assert made.rids == ("x_0", "x_0", "x_1", "x_1")
    assert [request.stream_interval for request in made.requests] == [4, 4, 1, 1]
    assert {request.priority for request in made.requests} == {-3}
    assert made.listed
    assert not native(planner, text="a").listed
    assert native(planner, text="a").rids == (None,)


def test_echo_repeats_the_prompt_for_each_choice(planner: Planner) -> None:
    assert completion(planner, echo=True, n=2).echoes == ("Hello there", "Hello there")
    ids = json.loads(answer(planner, "tokenize", prompt="Hello there", add_special_tokens=False))["tokens"]
    assert completion(planner, prompt=ids, echo=True).echoes == ("Hello there",)
    assert completion(planner).echoes == ("",)


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
    assert refused(bare, "chat").status == 400
    assert refused(bare, "generate", text="a").status == 400
    assert refused(bare, "generate", input_ids=[1], sampling_params={"stop": "x"}).param == "stop"


@pytest.mark.parametrize(
    "body", [b'{"messages": [', b"\xff\xfe", b"[1]", b'"text"', b"", b'{"a": NaN}', b"[" * 200_000, b'{"a":"\\ud800"}']
)
def test_what_is_no_json_object_is_named_as_such(planner: Planner, body: bytes) -> None:
    with pytest.raises(ApiError) as raised:
        planner.plan("chat", body, "request")
    assert (raised.value.status, raised.value.param) == (400, None)


def test_what_is_nested_very_deeply_is_refused_at_one_depth_whoever_reads_it(planner: Planner) -> None:
    def asked(depth: int) -> bytes:
        inner = b'{"a":' * (depth - 5) + b"1" + b"}" * (depth - 5)
        tool = b'{"type":"function","function":{"name":"f","parameters":{"properties":%s}}}' % inner
        return b'{"messages":[{"role":"user","content":"hi"}],"tools":[%s]}' % tool

    planner.plan("chat", asked(nesting.MOST), "request")
    for depth in (nesting.MOST + 1, 960, 5_000):
        with pytest.raises(ApiError, match=str(nesting.MOST)):
            planner.plan("chat", asked(depth), "request")


@pytest.mark.parametrize("body", [b'{"stop":"\\ud800"}', b'{"stop":"\\uD83d x"}', b'{"a":["\\udc00"]}', b'{"\\ud800":1}'])
def test_half_a_character_is_named_as_such(planner: Planner, body: bytes) -> None:
    """The library says that the input was truncated, where it ends a string."""
    with pytest.raises(ApiError, match="surrogate"):
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
        told = decode_message.decode(framed(Planned.of(made, last=False))[LENGTH.size :])
        assert isinstance(told, Planned)
        assert told.whole() == made, body
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


@pytest.mark.parametrize(("most", "told"), [(0, "default"), (1, "priority")])
def test_a_tier_that_the_server_gives_nobody_is_not_said_to_be_given(tiny_chat: Path, most: int, told: str) -> None:
    made = chat(planner_of(tiny_chat, max_client_priority=most), service_tier="priority")
    assert made.envelope.tier == told
    assert chat(planner_of(tiny_chat, max_client_priority=most), service_tier="flex").envelope.tier == "flex"


@pytest.mark.parametrize("kind", [{}, [], 3, None])
def test_a_kind_of_choice_that_is_no_name_is_refused(planner: Planner, kind: Any) -> None:
    told = {"max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}], "tool_choice": {"type": kind}}
    assert refused(planner, "messages", **told).param == "tool_choice.type"
    assert refused(planner, "count_tokens", **told).param == "tool_choice.type"


def test_a_prompt_crosses_once_however_many_choices_it_has(planner: Planner) -> None:
    made = plan(planner, "completions", {"prompt": [[5] * 1000, [6] * 1000], "n": 100, "max_tokens": 1})
    raw = framed(Planned.of(made, last=False))
    told = decode_message.decode(raw[LENGTH.size :])
    assert len(raw) < 100_000
    assert isinstance(told, Planned)
    whole = told.whole()
    assert isinstance(whole, CompletionPlan)
    assert len({id(one.token_ids) for one in whole.requests}) == 2
    assert whole == made

"""Chat completions through the real `openai` client, against a real server of the small trained model."""

from __future__ import annotations

import json
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2 as httpx
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.support.server.process import MODEL, SECOND_NAME, ServerProcess

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
LIST = [{"role": "user", "content": "List 3 countries and their capitals."}]
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
THOUGHT = "The user asks for the capital of France. It is Paris."
ANSWER = "The capital of France is Paris."
END_OF_TURN = 2


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="None", max_retries=0)


def ask(client: openai.OpenAI, messages: Any = FRANCE, **options: Any) -> ChatCompletion:
    return client.chat.completions.create(model=MODEL, messages=messages, **{"temperature": 0, "max_tokens": 64, **options})


def chunks(client: openai.OpenAI, messages: Any = FRANCE, **options: Any) -> list[ChatCompletionChunk]:
    stream = client.chat.completions.create(model=MODEL, messages=messages, stream=True, **{"temperature": 0, "max_tokens": 64, **options})
    return list(stream)


def answer(client: openai.OpenAI, messages: Any = FRANCE, **options: Any) -> str:
    return ask(client, messages, extra_body=NO_THINKING | options.pop("extra_body", {}), **options).choices[0].message.content or ""


def extra(value: Any, name: str) -> Any:
    """A field that OpenAI's types do not have; it must be there, also when null."""
    assert name in value.model_extra, f"{name} is missing in {value}"
    return value.model_extra[name]


def test_an_answer_has_all_the_fields_that_clients_read(client: openai.OpenAI) -> None:
    completion = ask(client, extra_body={**NO_THINKING})
    choice = completion.choices[0]
    assert completion.id.startswith("chatcmpl-")
    assert (completion.object, completion.model) == ("chat.completion", MODEL)
    assert (choice.message.role, choice.message.content, choice.message.tool_calls) == ("assistant", ANSWER, None)
    assert (choice.finish_reason, extra(choice, "matched_stop"), extra(choice, "stop_reason")) == ("stop", END_OF_TURN, None)
    assert extra(choice.message, "reasoning_content") is None
    usage = completion.usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_reasoning_stands_beside_the_answer_and_its_tokens_are_counted(client: openai.OpenAI) -> None:
    completion = ask(client, extra_body={"chat_template_kwargs": {"enable_thinking": True}, "separate_reasoning": True})
    message = completion.choices[0].message
    assert (extra(message, "reasoning_content"), extra(message, "reasoning"), message.content) == (THOUGHT, THOUGHT, ANSWER)
    assert completion.usage is not None
    assert completion.usage.completion_tokens_details is not None
    assert 0 < (completion.usage.completion_tokens_details.reasoning_tokens or 0) < completion.usage.completion_tokens


def test_reasoning_may_stay_in_the_answer_or_come_in_one_piece_or_be_dropped(client: openai.OpenAI) -> None:
    raw = ask(client, extra_body={"separate_reasoning": False}).choices[0].message
    assert (raw.content, extra(raw, "reasoning_content")) == (f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}", None)
    deltas = [extra(chunk.choices[0].delta, "reasoning_content") for chunk in chunks(client, extra_body={"stream_reasoning": False})]
    assert [delta for delta in deltas if delta] == [THOUGHT]
    dropped = ask(client, extra_body={"include_reasoning": False}).choices[0].message
    assert (dropped.content, extra(dropped, "reasoning_content")) == (ANSWER, None)
    assert ask(client, reasoning_effort="none").choices[0].message.content == ANSWER


def test_an_answer_cut_off_while_thinking_is_all_reasoning(client: openai.OpenAI) -> None:
    choice = ask(client, max_tokens=6).choices[0]
    assert choice.finish_reason == "length"
    assert (choice.message.content, extra(choice, "matched_stop")) == ("", None)
    assert THOUGHT.startswith(extra(choice.message, "reasoning_content"))


@pytest.mark.matrix(gate=4)
@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize(
    "question", ["What is the capital of France?", "Say hello in Emoji.", "Say hello in Hindi.", "Give me JSON about Oslo.", "Count to 20."]
)
def test_a_stream_adds_up_to_the_whole_answer(client: openai.OpenAI, question: str, thinking: bool) -> None:
    messages = [{"role": "user", "content": question}]
    body = {"chat_template_kwargs": {"enable_thinking": thinking}}
    whole = ask(client, messages, extra_body=body)
    stream = chunks(client, messages, extra_body=body, stream_options={"include_usage": True})
    *body_chunks, last = stream
    deltas = [chunk.choices[0].delta for chunk in body_chunks]
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    assert "".join(extra(delta, "reasoning_content") or "" for delta in deltas) == (
        extra(whole.choices[0].message, "reasoning_content") or ""
    )
    assert not any("�" in (delta.content or "") for delta in deltas)
    end = body_chunks[-1].choices[0]
    assert (end.finish_reason, extra(end, "matched_stop")) == (whole.choices[0].finish_reason, extra(whole.choices[0], "matched_stop"))
    assert last.choices == []
    assert last.usage is not None
    assert whole.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)
    assert len({chunk.id for chunk in stream}) == 1


def test_without_usage_every_chunk_has_a_choice_and_the_first_has_the_role(client: openai.OpenAI) -> None:
    stream = chunks(client, extra_body=NO_THINKING)
    assert all(len(chunk.choices) == 1 for chunk in stream)
    assert (stream[0].choices[0].delta.role, stream[0].choices[0].delta.content) == ("assistant", "")
    assert [chunk.choices[0].finish_reason for chunk in stream[:-1]] == [None] * (len(stream) - 1)
    assert stream[-1].choices[0].delta.content is None
    for chunk in stream:
        extra(chunk.choices[0], "matched_stop")
        extra(chunk.choices[0].delta, "reasoning_content")


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("chat/completions", {"messages": FRANCE}),
        ("chat/completions", {"messages": FRANCE, "logprobs": True, "n": 2}),
        ("completions", {"prompt": "x"}),
        ("completions", {"prompt": "x", "logprobs": 1, "echo": True}),
    ],
)
def test_where_the_last_chunk_has_the_usage_all_others_say_null_and_else_none_names_it(
    server: ServerProcess, path: str, asked: dict[str, Any]
) -> None:
    def told(**options: Any) -> list[dict[str, Any]]:
        body = {**asked, "stream": True, "max_tokens": 4, **options}
        events = httpx.post(f"{server.url}/v1/{path}", json=body).text.split("\n\n")[:-2]
        return [json.loads(event.removeprefix("data: ")) for event in events]

    *before, last = told(stream_options={"include_usage": True})
    assert [chunk["usage"] for chunk in before] == [None] * len(before)
    assert last["usage"]["completion_tokens"] > 0
    assert not any("usage" in chunk for chunk in [*told(), *told(stream_options={"include_usage": False})])


def test_running_usage_grows_with_the_tokens_that_are_told(client: openai.OpenAI) -> None:
    stream = chunks(client, extra_body=NO_THINKING | {"stream_options": {"continuous_usage_stats": True, "include_usage": True}})
    counts = [chunk.usage.completion_tokens for chunk in stream if chunk.usage is not None]
    assert len(counts) == len(stream), "the chunk with the role has its numbers too"
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert len(set(counts)) > 2


def test_the_body_of_a_stream_is_server_sent_events_that_end_with_done(server: ServerProcess) -> None:
    body = {"messages": FRANCE, "stream": True, "max_tokens": 4}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert (response.headers["cache-control"], response.headers["x-accel-buffering"]) == ("no-cache", "no")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(json.loads(event.removeprefix("data: "))["object"] == "chat.completion.chunk" for event in events[:-2])


def test_stop_strings_cut_the_answer_and_are_named(client: openai.OpenAI) -> None:
    choice = ask(client, LIST, stop=["\n\n", "THE END"], extra_body=NO_THINKING).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("1. France - Paris\n2. Japan - Tokyo\n3. Italy - Rome", "stop")
    assert (extra(choice, "matched_stop"), extra(choice, "stop_reason")) == ("\n\n", "\n\n")
    kept = answer(client, LIST, stop="Japan", extra_body={"no_stop_trim": True})
    assert kept == "1. France - Paris\n2. Japan"
    streamed = chunks(client, LIST, stop="Tok", extra_body=NO_THINKING)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == "1. France - Paris\n2. Japan - "
    assert extra(streamed[-1].choices[0], "matched_stop") == "Tok"


@pytest.mark.parametrize("separate", [True, False])
def test_what_ends_an_answer_does_not_end_the_thoughts_before_it(client: openai.OpenAI, server: ServerProcess, separate: bool) -> None:
    (capital,) = httpx.post(f"{server.url}/tokenize", json={"prompt": " capital"}).json()["tokens"]
    for name, given, said, matched in (
        ("stop", "capital", "The ", "capital"),
        ("stop_token_ids", [capital], "The", capital),
    ):
        options: dict[str, Any] = {"extra_body": {name: given, "separate_reasoning": separate}}
        choice = ask(client, **options).choices[0]
        wanted = (THOUGHT, said) if separate else (None, f"<think>\n{THOUGHT}\n</think>\n\n{said}")
        assert (extra(choice.message, "reasoning_content"), choice.message.content) == wanted
        assert (choice.finish_reason, extra(choice, "matched_stop"), extra(choice, "stop_reason")) == ("stop", matched, matched)
        streamed = chunks(client, **options)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == wanted[1]
        assert extra(streamed[-1].choices[0], "matched_stop") == matched


def test_a_stop_string_ends_the_request_in_the_engine_too(client: openai.OpenAI, server: ServerProcess) -> None:
    before = server.settled("banyan_generation_tokens_total")
    choice = ask(client, LIST, stop="France", max_tokens=1500, extra_body={**NO_THINKING, "ignore_eos": True}).choices[0]
    assert choice.message.content == "1. "
    server.eventually(lambda: server.metric("banyan_requests_running") == 0, "an empty batch", 3)
    assert server.metric("banyan_generation_tokens_total") - before < 200


def test_stop_tokens_and_limits_end_an_answer_where_they_say(client: openai.OpenAI, server: ServerProcess) -> None:
    (japan,) = httpx.post(f"{server.url}/tokenize", json={"prompt": " Japan"}).json()["tokens"]
    choice = ask(client, LIST, extra_body={**NO_THINKING, "stop_token_ids": [japan]}).choices[0]
    assert (choice.message.content, extra(choice, "matched_stop"), extra(choice, "stop_reason")) == ("1. France - Paris\n2.", japan, japan)
    longer = ask(client, extra_body={**NO_THINKING, "min_tokens": 20})
    assert longer.usage is not None
    assert longer.usage.completion_tokens >= 20
    endless = ask(client, max_tokens=40, extra_body={**NO_THINKING, "ignore_eos": True})
    assert endless.usage is not None
    assert (endless.usage.completion_tokens, endless.choices[0].finish_reason) == (40, "length")
    short = ask(client, max_tokens=40, max_completion_tokens=3, extra_body=NO_THINKING)
    assert short.usage is not None
    assert short.usage.completion_tokens == 3


def test_the_same_seed_gives_the_same_text_alone_and_in_company(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"temperature": 1.5, "seed": 42, "max_tokens": 24, "extra_body": {**NO_THINKING, "ignore_eos": True}}
    alone = ask(client, **options).choices[0].message.content
    with ThreadPoolExecutor(8) as pool:
        others = [pool.submit(ask, client, LIST, temperature=2, max_tokens=40) for _ in range(6)]
        again = [pool.submit(ask, client, **options) for _ in range(2)]
        assert [future.result().choices[0].message.content for future in again] == [alone, alone]
        for other in others:
            other.result()


def test_choices_are_several_answers_to_one_prompt_and_the_first_is_what_the_seed_gives_alone(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"temperature": 2.0, "max_tokens": 16, "extra_body": {**NO_THINKING, "ignore_eos": True}}
    several = ask(client, n=3, seed=7, **options)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    single = ask(client, seed=7, **options)
    assert several.choices[0].message.content == single.choices[0].message.content
    others = ask(client, n=3, seed=8, **options).choices
    assert len({choice.message.content for choice in (*several.choices, *others)}) == 6
    assert several.usage is not None
    assert single.usage is not None
    assert (several.usage.prompt_tokens, several.usage.completion_tokens) == (single.usage.prompt_tokens, 48)
    texts = ["", "", ""]
    for chunk in chunks(client, n=3, seed=7, **options):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [choice.message.content for choice in several.choices]


def test_without_a_seed_answers_differ(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"temperature": 2.0, "max_tokens": 16, "extra_body": {**NO_THINKING, "ignore_eos": True}}
    assert len({ask(client, **options).choices[0].message.content for _ in range(3)}) == 3


def test_a_repeated_prompt_is_reported_as_cached(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": f"Count to 10. {uuid.uuid4()}"}]
    first, second = (ask(client, messages, max_tokens=2).usage for _ in range(2))
    assert first is not None
    assert second is not None
    assert first.prompt_tokens_details is not None
    assert second.prompt_tokens_details is not None
    assert second.prompt_tokens_details.cached_tokens == second.prompt_tokens - 1 > (first.prompt_tokens_details.cached_tokens or 0)


def test_null_is_the_same_as_absent_and_unknown_fields_are_ignored_and_named(server: ServerProcess) -> None:
    nulls = dict.fromkeys(
        ["stop", "n", "stream", "temperature", "top_p", "seed", "logprobs", "tools", "stream_options", "response_format", "user", "model"]
    )
    body = {**nulls, "messages": FRANCE, "max_tokens": 4, "store": False, "made_up": {"a": 1}, "tool_choice": "none", "tools": []}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert response.status_code == 200
    assert response.headers["x-banyan-ignored"] == "made_up"
    assert response.json()["model"] == MODEL


def test_what_only_openais_servers_use_is_checked_and_named_where_it_has_no_effect(server: ServerProcess) -> None:
    silent = {"user": "u", "safety_identifier": "s", "metadata": {}}
    idle = {"prediction": {"type": "content", "content": "Paris"}, "metadata": {"a": "b"}, "prompt_cache_key": "k"}
    shape = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}, "strict": None}}
    for more, ignored in ((silent, None), (idle, "prediction, metadata, prompt_cache_key"), ({"response_format": shape}, None)):
        response = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": FRANCE, "max_tokens": 4, **more})
        assert (response.status_code, response.headers.get("x-banyan-ignored")) == (200, ignored)


def test_messages_may_be_parts_and_the_last_one_continued(client: openai.OpenAI) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "What is the capital of France?"}]}]
    assert answer(client, parts) == ANSWER
    unfinished = [*FRANCE, {"role": "assistant", "content": "<think>\n\n</think>\n\nThe capital of"}]
    body = {"continue_final_message": True, "add_generation_prompt": False}
    assert ask(client, unfinished, extra_body=body).choices[0].message.content == " France is Paris."


def test_a_request_id_of_the_clients_own_names_the_answer_and_is_used_once_at_a_time(client: openai.OpenAI, server: ServerProcess) -> None:
    body: dict[str, Any] = {**NO_THINKING, "rid": "mine", "ignore_eos": True}
    slow = {"logprobs": True, "top_logprobs": 20, "max_tokens": 1900}  # so that it goes on though this process is kept waiting
    stream = client.chat.completions.create(model=MODEL, messages=FRANCE, stream=True, extra_body=body | slow)  # type: ignore[call-overload]
    assert next(iter(stream)).id == "chatcmpl-mine"
    with pytest.raises(openai.BadRequestError) as taken:
        ask(client, extra_body=body)
    assert taken.value.param == "rid"
    stream.close()
    again = {"model": MODEL, "messages": FRANCE, "max_tokens": 2, "rid": "mine"}
    server.eventually(lambda: httpx.post(f"{server.url}/v1/chat/completions", json=again).status_code == 200, "a free id")


@pytest.mark.usefixtures("slowed")
def test_an_aborted_request_ends_with_reason_abort(client: openai.OpenAI, server: ServerProcess) -> None:
    body = {**NO_THINKING, "request_id": "doomed", "ignore_eos": True}
    started = threading.Event()
    reasons: list[str | None] = []

    def read() -> None:
        for chunk in client.chat.completions.create(model=MODEL, messages=FRANCE, stream=True, max_tokens=1900, extra_body=body):  # type: ignore[call-overload]
            started.set()
            reasons.append(chunk.choices[0].finish_reason)

    reader = threading.Thread(target=read)
    reader.start()
    assert started.wait(30)
    assert httpx.post(f"{server.url}/abort_request", json={"rid": "doom"}).status_code == 200  # no such id: nothing happens
    assert httpx.post(f"{server.url}/abort_request", json={"rid": "doomed"}).status_code == 200
    reader.join(30)
    assert reasons[-1] == "abort"


def test_every_answer_carries_the_id_of_its_request(client: openai.OpenAI, server: ServerProcess) -> None:
    raw = client.models.with_raw_response.list(extra_headers={"X-Request-Id": "abc-1"})
    assert raw.request_id == "abc-1"
    for path, status in (("/v1/models", 200), ("/nothing", 404), ("/livez", 200)):
        response = httpx.get(server.url + path, headers={"X-Request-Id": "bad id"})
        assert response.status_code == status
        assert len(response.headers["x-request-id"]) == 32


def test_models_are_listed_under_every_served_name(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL, SECOND_NAME]
    assert client.models.retrieve(SECOND_NAME).id == SECOND_NAME
    assert ask(client, max_tokens=1).model == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("qwen/other")


def test_each_request_leaves_one_line_in_the_log_and_no_text(client: openai.OpenAI, server: ServerProcess) -> None:
    canary = f"canary{uuid.uuid4().hex}"
    completion = ask(client, [{"role": "user", "content": canary}], max_tokens=3)
    lines = server.eventually(lambda: [line for line in server.lines if completion.id in line], "the finish line")
    assert len(lines) == 1
    assert "reason: length" in lines[0]
    assert canary not in server.log

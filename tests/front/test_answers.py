"""From a plan to the bytes of an answer, over real HTTP: the test makes the plan and plays the engine."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from banyan_runtime import wire
from banyan_runtime.front import event_stream
from banyan_runtime.front.plan import ChatPlan, CompletionPlan, Envelope, GenerateRequest, NativePlan
from banyan_runtime.front.text.tokenizer import Tokenizer
from banyan_runtime.wire import FinishCode
from tests.front.support import Connection, FakeEngine, Front, columns, finish, run

A, B, C = 67, 68, 69  # the letters in the byte-level vocabulary
EOS = 2
Scenario = Callable[[Front, FakeEngine, tuple[str, int]], Awaitable[None]]
Play = Callable[[Scenario], None]


@pytest.fixture
def play(tmp_path: Path, bytes_tokenizer: Tokenizer) -> Play:
    def play(scenario: Scenario) -> None:
        async def played() -> None:
            async with FakeEngine(tmp_path) as engine:
                front = Front(engine, bytes_tokenizer)
                async with front.served() as address:
                    await scenario(front, engine, address)

        run(played)

    return play


def request(*prompt: int, max_new_tokens: int = 16, **options: Any) -> GenerateRequest:
    return GenerateRequest(token_ids=wire.pack_ids(list(prompt or (A, B))), sampling=wire.Sampling(max_new_tokens), **options)


def openai(**options: Any) -> dict[str, Any]:
    """Fields of an OpenAI plan, those of its envelope among the options."""
    envelope = {name: options.pop(name) for name in Envelope.__struct_fields__ if name in options}
    return {"envelope": Envelope(**{"model": "tiny", **envelope}), "choices_per_prompt": 1, "top_logprobs": -1, **options}


def chat(*requests: GenerateRequest, **options: Any) -> ChatPlan:
    return ChatPlan(requests=requests or (request(),), **openai(**{"include_reasoning": True, **options}))


def completion(*requests: GenerateRequest, **options: Any) -> CompletionPlan:
    requests = requests or (request(),)
    return CompletionPlan(requests=requests, **openai(**{"echoes": ("",) * len(requests), "echo_logprobs": False, **options}))


def native(*requests: GenerateRequest, **options: Any) -> NativePlan:
    number = len(requests)
    plan = {
        "rids": (None,) * number, "listed": False, "stream": False, "top_logprobs": (-1,) * number, "logprobs_from": (-1,) * number,
        "text_in_logprobs": False,
    }  # fmt: skip
    return NativePlan(requests=requests, **{**plan, **options})


PATHS = {ChatPlan: "/v1/chat/completions", CompletionPlan: "/v1/completions", NativePlan: "/generate"}


async def ask(front: Front, address: tuple[str, int], plan: ChatPlan | CompletionPlan | NativePlan) -> Connection:
    front.preparer.plans.append(plan)
    return await Connection.post(address, PATHS[type(plan)])


def streaming(kind: str) -> ChatPlan | CompletionPlan | NativePlan:
    if kind == "chat":
        return chat(stream=True)
    return completion(stream=True) if kind == "completions" else native(request(), stream=True)


KINDS = ["chat", "completions", "generate"]


# --- streams begin at once ---


@pytest.mark.parametrize("kind", KINDS)
def test_the_headers_of_a_stream_leave_before_the_first_token(play: Play, kind: str) -> None:
    async def scenario(front: Front, engine: FakeEngine, address: tuple[str, int]) -> None:
        connection = await ask(front, address, streaming(kind))
        one = await engine.submitted()
        status, headers = await connection.head()
        assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        await engine.step({one: [A]}, finish(one))
        assert await connection.events()

    play(scenario)


@pytest.mark.parametrize("kind", KINDS)
def test_a_refusal_within_moments_has_a_status_of_its_own(play: Play, kind: str) -> None:
    async def scenario(front: Front, engine: FakeEngine, address: tuple[str, int]) -> None:
        connection = await ask(front, address, streaming(kind))
        await engine.send(wire.Failed(await engine.submitted(), "context_length_exceeded", "too long"))
        status, _ = await connection.head()
        assert status == 400
        assert front.rejections == ["too_long"]
        assert front.records == []

    play(scenario)


@pytest.mark.parametrize("kind", KINDS)
def test_a_later_refusal_is_an_error_event_and_counted_as_a_rejection(play: Play, kind: str) -> None:
    async def scenario(front: Front, engine: FakeEngine, address: tuple[str, int]) -> None:
        connection = await ask(front, address, streaming(kind))
        one = await engine.submitted()
        assert (await connection.head())[0] == 200
        await engine.send(wire.Failed(one, "context_length_exceeded", "too long"))
        *_, last = await connection.events()
        assert "too long" in last["error"]["message"]
        assert front.rejections == ["too_long"]
        assert front.records == []

    play(scenario)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_whose_engine_dies_says_what_happened(play: Play, kind: str) -> None:
    async def scenario(front: Front, engine: FakeEngine, address: tuple[str, int]) -> None:
        connection = await ask(front, address, streaming(kind))
        await engine.step({await engine.submitted(): [A]})
        await connection.head()
        await connection.chunk()
        engine.kill()
        front.context.client.died("the engine process ended with exit code -9")
        *_, last = await connection.events()
        assert "exit code -9" in last["error"]["message"]

    play(scenario)


# --- who owns what runs ---


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [0, 1])
def test_a_client_that_leaves_a_stream_ends_its_request(play: Play, kind: str, tokens: int) -> None:
    async def scenario(front: Front, engine: FakeEngine, address: tuple[str, int]) -> None:
        connection = await ask(front, address, streaming(kind))
        one = await engine.submitted()
        if tokens:
            await engine.step({one: [A]})
            await connection.head()
            await connection.chunk()
        connection.close()
        assert await engine.aborted() == one
        times: dict[str, Any] = {"queue_s": 0.125, "prefill_s": 0.5} if tokens else {"queue_s": None, "prefill_s": None}
        await engine.step(None, finish(one, FinishCode.ABORT, **times))
        while not front.records:  # noqa: ASYNC110  the wire has no event for it
            await asyncio.sleep(0.001)
        (record,) = front.records
        assert (record.finish_reason, record.completion_tokens) == ("abort", tokens)
        assert {"queue_s": record.queue_s, "prefill_s": record.prefill_s} == times
        assert len(front.context.live) == 0

    play(scenario)


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_that_does_not_wait_for_a_whole_answer_ends_its_request(play: Play, kind: str) -> None:
    async def scenario(front: Front, engine: FakeEngine, address: tuple[str, int]) -> None:
        plans = {"chat": chat(), "completions": completion(), "generate": native(request())}
        connection = await ask(front, address, plans[kind])
        one = await engine.submitted()
        connection.close()
        assert await engine.aborted() == one
        assert len(front.context.live) == 0

    play(scenario)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_whose_response_is_never_called_ends_its_request(play: Play, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception, a cancelled task: between handler and response anything may happen."""

    async def lost(self: event_stream.EventStream, *_: object) -> None:
        raise RuntimeError("on the way to the response")

    async def scenario(front: Front, engine: FakeEngine, address: tuple[str, int]) -> None:
        monkeypatch.setattr(event_stream.EventStream, "__call__", lost)
        await ask(front, address, streaming(kind))
        one = await engine.submitted()
        assert await engine.aborted() == one

    play(scenario)


def test_an_id_that_is_running_is_taken_until_its_request_has_ended(play: Play) -> None:
    async def scenario(front: Front, engine: FakeEngine, address: tuple[str, int]) -> None:
        first = await ask(front, address, chat(own_id="mine"))
        one = await engine.submitted()
        again = await (await ask(front, address, chat(own_id="mine"))).json()
        assert (again["error"]["param"], "already running" in again["error"]["message"]) == ("rid", True)
        other = await ask(front, address, native(request(), rids=("mine",)))
        two = await engine.submitted()
        await engine.step({one: [A], two: [A]}, finish(one), finish(two))
        assert ((await first.json())["id"], (await other.json())["meta_info"]["id"]) == ("chatcmpl-mine", "mine")
        third = await ask(front, address, chat(own_id="mine"))
        await engine.step(None, finish(await engine.submitted()))
        assert (await third.json())["id"] == "chatcmpl-mine"

    play(scenario)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_nobody_keeps_the_prompts_of_waiting_requests(play: Play, kind: str, stream: bool) -> None:
    async def scenario(front: Front, engine: FakeEngine, address: tuple[str, int]) -> None:
        prompt = wire.pack_ids(list(range(5000)))
        free = sys.getrefcount(prompt)
        asked = GenerateRequest(token_ids=prompt, sampling=wire.Sampling(4))
        plans = {"chat": chat, "completions": completion, "generate": native}
        front.preparer.plans.append(plans[kind](asked, stream=stream))
        del asked
        connection = await Connection.post(address, PATHS[type(front.preparer.plans[0])])
        await engine.submitted()
        if stream:
            await connection.head()
        gc.collect()
        assert sys.getrefcount(prompt) == free

    play(scenario)


# --- log probabilities ---


def told(*rows: tuple[int, float, int]) -> dict[str, Any]:
    """Columns of a step whose tokens are all scored: (token, value, likeliest token, whose value is -0.25)."""
    tops = [[(token, value)] if token == likeliest else [(likeliest, -0.25)] for token, value, likeliest in rows]
    return {"scored": wire.pack_ids(list(range(len(rows)))), "logprobs": columns([value for _, value, _ in rows], tops)}


SCORED = wire.LogprobRequest(output_top=1)


async def chat_logprobs(front: Front, engine: FakeEngine, address: tuple[str, int], plan: ChatPlan) -> list[Any]:
    """The `logprobs.content` of all chunks, or of the whole, after "a", two bytes of "é" in two steps, and the end."""
    first, second = front.context.text.tokenizer.encode("é", add_special_tokens=False)  # type: ignore[union-attr]
    connection = await ask(front, address, plan)
    one = await engine.submitted()
    if plan.envelope.stream:
        await connection.head()
    await engine.step({one: [A]}, **told((A, -0.25, A)))
    await engine.step({one: [first]}, **told((first, -1.5, B)))
    await engine.step({one: [second, EOS]}, finish(one, FinishCode.STOP), **told((second, -0.5, A), (EOS, -0.25, EOS)))
    if not plan.envelope.stream:
        return (await connection.json())["choices"][0]["logprobs"]["content"]
    chunks = [event["choices"][0]["logprobs"] for event in await connection.events()]
    assert all(chunk is None or chunk["refusal"] is None for chunk in chunks)
    return [entry for chunk in chunks if chunk is not None for entry in chunk["content"]]


def test_chat_tells_every_token_once_with_its_own_bytes_streamed_or_not(play: Play) -> None:
    async def scenario(front: Front, engine: FakeEngine, address: tuple[str, int]) -> None:
        def plan(stream: bool, **options: Any) -> ChatPlan:
            return chat(request(logprobs=SCORED, **options), stream=stream, top_logprobs=1)

        entries = await chat_logprobs(front, engine, address, plan(False))
        assert [(entry["token"], bytes(entry["bytes"]), entry["logprob"]) for entry in entries] == [
            ("a", b"a", -0.25), ("�", "é".encode()[:1], -1.5), ("�", "é".encode()[1:], -0.5), ("<|im_end|>", b"<|im_end|>", -0.25),
        ]  # fmt: skip
        assert [[top["token"] for top in entry["top_logprobs"]] for entry in entries] == [["a"], ["b"], ["a"], ["<|im_end|>"]]
        for interval in (0, 1, 2, 3):
            assert await chat_logprobs(front, engine, address, plan(True, stream_interval=interval)) == entries

    play(scenario)


def test_a_chat_without_logprobs_has_none(play: Play) -> None:
    async def scenario(front: Front, engine: FakeEngine, address: tuple[str, int]) -> None:
        connection = await ask(front, address, chat())
        one = await engine.submitted()
        await engine.step({one: [A]}, finish(one))
        assert (await connection.json())["choices"][0]["logprobs"] is None

    play(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_completions_echo_the_prompt_with_its_log_probabilities(play: Play, stream: bool) -> None:
    async def scenario(front: Front, engine: FakeEngine, address: tuple[str, int]) -> None:
        asked = request(A, B, C, logprobs=wire.LogprobRequest(output_top=1, prompt_from=1, prompt_top=1))
        plan = completion(asked, stream=stream, top_logprobs=1, echoes=("abc",), echo_logprobs=True)
        connection = await ask(front, address, plan)
        one = await engine.submitted()
        prompt = wire.PromptLogprobs(one, 1, columns([-0.5, -1.0], [[(B, -0.5)], [(A, -0.125)]]))
        await engine.step({one: [A]}, finish(one), prompt_logprobs=[prompt], **told((A, -2.0, C)))
        if stream:
            await connection.head()
            choices = [event["choices"][0] for event in await connection.events()]
        else:
            choices = (await connection.json())["choices"]
        assert "".join(choice["text"] for choice in choices) == "abca"
        logprobs = {name: [item for choice in choices for item in choice["logprobs"][name]] for name in choices[0]["logprobs"]}
        assert logprobs == {
            "tokens": ["a", "b", "c", "a"],
            "token_logprobs": [None, -0.5, -1.0, -2.0],
            "top_logprobs": [None, {"b": -0.5}, {"a": -0.125, "c": -1.0}, {"c": -0.25, "a": -2.0}],
            "text_offset": [0, 1, 2, 3],
        }

    play(scenario)


def test_offsets_go_on_over_the_chunks_of_a_stream(play: Play) -> None:
    async def scenario(front: Front, engine: FakeEngine, address: tuple[str, int]) -> None:
        connection = await ask(front, address, completion(request(logprobs=SCORED), stream=True, top_logprobs=0))
        one = await engine.submitted()
        await connection.head()
        offsets = []
        for token in (A, B, C):
            await engine.step({one: [token]}, **told((token, -1.0, token)))
            logprobs = json.loads((await connection.chunk()).removeprefix("data: "))["choices"][0]["logprobs"]
            assert logprobs["top_logprobs"] == [{logprobs["tokens"][0]: -1.0}]
            offsets += logprobs["text_offset"]
        assert offsets == [0, 1, 2]
        await engine.step(None, finish(one))
        (last,) = await connection.events()
        assert last["choices"][0]["logprobs"] is None

    play(scenario)


def test_a_prompt_can_be_scored_without_generating(play: Play) -> None:
    async def scenario(front: Front, engine: FakeEngine, address: tuple[str, int]) -> None:
        asked = request(A, B, max_new_tokens=0, logprobs=wire.LogprobRequest(prompt_from=1))
        connection = await ask(front, address, completion(asked, top_logprobs=0, echoes=("ab",), echo_logprobs=True))
        one = await engine.submitted()
        prompt = wire.PromptLogprobs(one, 1, columns([-0.5]))
        await engine.step(None, finish(one, prefill_s=None), prompt_logprobs=[prompt])
        (choice,) = (await connection.json())["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
        assert (choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"]) == (["a", "b"], [None, -0.5])

    play(scenario)


def test_of_tokens_with_the_same_text_the_likeliest_is_told(play: Play) -> None:
    async def scenario(front: Front, engine: FakeEngine, address: tuple[str, int]) -> None:
        first, second = front.context.text.tokenizer.encode("é", add_special_tokens=False)  # type: ignore[union-attr]
        connection = await ask(front, address, completion(request(logprobs=SCORED), top_logprobs=1))
        one = await engine.submitted()
        await engine.step({one: [first]}, finish(one), **told((first, -1.5, second)))
        assert (await connection.json())["choices"][0]["logprobs"]["top_logprobs"] == [{"�": -0.25}]

    play(scenario)


@pytest.mark.parametrize("text", [False, True])
def test_generate_tells_log_probabilities_in_sglangs_shapes(play: Play, text: bool) -> None:
    async def scenario(front: Front, engine: FakeEngine, address: tuple[str, int]) -> None:
        asked = request(A, B, C, logprobs=wire.LogprobRequest(output_top=1, prompt_from=2, prompt_top=1))
        plan = native(asked, top_logprobs=(1,), logprobs_from=(1,), text_in_logprobs=text, rids=("r",))
        connection = await ask(front, address, plan)
        one = await engine.submitted()
        prompt = wire.PromptLogprobs(one, 2, columns([-1.0], [[(A, -0.125)]]))
        await engine.step({one: [B]}, finish(one), prompt_logprobs=[prompt], **told((B, -2.0, C)))
        a, b, c = ("a", "b", "c") if text else (None, None, None)
        meta = (await connection.json())["meta_info"]
        assert {name: value for name, value in meta.items() if "logprobs" in name} == {
            "input_token_logprobs": [[None, B, b], [-1.0, C, c]],
            "input_top_logprobs": [None, [[-0.125, A, a]]],
            "output_token_logprobs": [[-2.0, B, b]],
            "output_top_logprobs": [[[-0.25, C, c]]],
            "output_token_logprobs_length": 1,
        }

    play(scenario)


def test_log_probabilities_of_a_generate_stream_are_cumulative(play: Play) -> None:
    async def scenario(front: Front, engine: FakeEngine, address: tuple[str, int]) -> None:
        plan = native(request(logprobs=wire.LogprobRequest(0)), stream=True, top_logprobs=(0,))
        connection = await ask(front, address, plan)
        one = await engine.submitted()
        await connection.head()
        for token in (A, B):
            await engine.step({one: [token]}, scored=wire.pack_ids([0]), logprobs=columns([-1.0]))
        await engine.step({one: [C]}, finish(one), scored=wire.pack_ids([0]), logprobs=columns([-1.0]))
        events = await connection.events()
        for before, after in itertools.pairwise(event["meta_info"]["output_token_logprobs"] for event in events):
            assert after[: len(before)] == before
        assert [row[1] for row in events[-1]["meta_info"]["output_token_logprobs"]] == [A, B, C]
        assert "output_top_logprobs" not in events[-1]["meta_info"]

    play(scenario)


def test_values_that_json_does_not_have_become_the_floor(play: Play) -> None:
    async def scenario(front: Front, engine: FakeEngine, address: tuple[str, int]) -> None:
        connection = await ask(front, address, chat(request(logprobs=SCORED), top_logprobs=1))
        one = await engine.submitted()
        scores = columns([float("-inf"), -1e30], [[(A, float("nan"))], [(B, -1e30)]])
        await engine.step({one: [A, B]}, finish(one), scored=wire.pack_ids([0, 1]), logprobs=scores)
        entries = (await connection.json())["choices"][0]["logprobs"]["content"]
        assert [(entry["logprob"], entry["top_logprobs"][0]["logprob"]) for entry in entries] == [(-9999.0, -9999.0)] * 2

    play(scenario)


# --- clients that do not read ---


async def stalled(front: Front, engine: FakeEngine, address: tuple[str, int], plan: Any) -> tuple[Connection, int]:
    """A stream whose client reads nothing."""
    connection = await ask(front, address, plan)
    one = await engine.submitted()
    return connection, one


def test_the_events_of_a_cumulative_stream_that_were_not_taken_become_one(play: Play) -> None:
    async def scenario(front: Front, engine: FakeEngine, address: tuple[str, int]) -> None:
        row = [[(token, -1.0) for token in range(3, 23)]]
        scored = {"scored": wire.pack_ids([0]), "logprobs": columns([-1.0], row)}
        plan = native(request(max_new_tokens=1000, logprobs=wire.LogprobRequest(20)), stream=True, top_logprobs=(20,))
        connection, one = await stalled(front, engine, address, plan)
        for _ in range(999):  # all events together: hundreds of MB
            await engine.step({one: [A]}, **scored)
            await asyncio.sleep(0.001)  # or several steps are one delta
        await engine.step({one: [B]}, finish(one), **scored)
        while not front.records:  # noqa: ASYNC110  the wire has no event for it
            await asyncio.sleep(0.001)
        await connection.head()
        events = await connection.events()
        assert 1 < len(events) < 500
        assert events[-1]["text"] == "a" * 999 + "b"
        assert len(events[-1]["meta_info"]["output_top_logprobs"]) == 1000
        for before, after in itertools.pairwise(event["output_ids"] for event in events):
            assert len(before) < len(after)

    play(scenario)


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_a_client_that_leaves_too_much_of_its_stream_unread_is_given_up(
    play: Play, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(front: Front, engine: FakeEngine, address: tuple[str, int]) -> None:
        monkeypatch.setattr(event_stream, "MAX_UNSENT", 1 << 20)
        connection, one = await stalled(front, engine, address, streaming(kind))
        aborted = asyncio.create_task(engine.aborted())
        while not aborted.done():
            await engine.step({one: [A] * 10_000})
            await asyncio.sleep(0)
        assert await aborted == one
        await engine.step(None, finish(one, FinishCode.ABORT))
        assert "a stream was cut off" in caplog.text
        await connection.head()
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError, ValueError)):
            await connection.events()
        while len(front.context.live):  # noqa: ASYNC110  the wire has no event for it
            await asyncio.sleep(0.001)

    play(scenario)


# --- whole answers that are long ---


@pytest.mark.parametrize("kind", ["chat", "completions", "generate"])
def test_a_long_answer_is_sent_in_parts(play: Play, kind: str) -> None:
    async def scenario(front: Front, engine: FakeEngine, address: tuple[str, int]) -> None:
        asked = request(max_new_tokens=5000, logprobs=SCORED)
        plans = {
            "chat": lambda: chat(asked, top_logprobs=1),
            "completions": lambda: completion(asked, top_logprobs=1),
            "generate": lambda: native(asked, top_logprobs=(1,)),
        }
        connection = await ask(front, address, plans[kind]())
        one = await engine.submitted()
        await engine.step({one: [A] * 4000}, finish(one), **told(*[(A, -0.5, B)] * 4000))
        _, headers = await connection.head()
        assert headers["content-type"] == "application/json"
        assert "content-length" not in headers
        parts = []
        while part := await connection.chunk():
            parts.append(part)
        assert len(parts) > 1
        assert max(map(len, parts)) < 3 * event_stream.PART_BYTES
        text = "".join(parts)
        assert text.count("-0.25") == 4000
        json.loads(text)

    play(scenario)


# --- several choices, usage ---


def test_the_choices_of_one_step_leave_in_one_write(play: Play) -> None:
    async def scenario(front: Front, engine: FakeEngine, address: tuple[str, int]) -> None:
        plan = chat(request(), request(), request(), choices_per_prompt=3, stream=True, include_usage=True)
        connection = await ask(front, address, plan)
        ids = [submit.id for submit in await engine.submits(3)]
        await connection.head()
        assert (await connection.chunk()).count("data: ") == 3
        await engine.step({one: [A] for one in ids})
        assert (await connection.chunk()).count("data: ") == 3
        await engine.step({one: [B] for one in ids}, *map(finish, ids))
        *_, usage = await connection.events()
        assert usage["usage"]["completion_tokens"] == 6
        assert usage["usage"]["prompt_tokens"] == 2

    play(scenario)

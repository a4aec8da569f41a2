"""Log probabilities from the engine's columns to the bytes of an answer, over real HTTP."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from banyan_runtime import wire
from banyan_runtime.front.plan import ChatPlan
from banyan_runtime.front.text.tokenizer import Tokenizer
from banyan_runtime.wire import FinishCode
from tests.front.answering import EOS, SCORED, A, B, C, Play, ask, chat, completion, native, player, request, told
from tests.front.support import FakeEngine, Front, columns, finish


@pytest.fixture
def play(tmp_path: Path, bytes_tokenizer: Tokenizer) -> Play:
    return player(tmp_path, bytes_tokenizer)


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

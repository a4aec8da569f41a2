"""Log probabilities from the engine's columns to the bytes of an answer, over real HTTP."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from banyan_runtime import wire
from banyan_runtime.front.logprobs import Cells, CompletionLogprobs
from banyan_runtime.front.plan import ChatPlan
from banyan_runtime.front.text.tokenizer import Tokenizer
from banyan_runtime.wire import FinishCode
from tests.unit.front.answering import EOS, SCORED, A, B, C, Play, ask, chat, completion, native, player, request, told
from tests.unit.front.support import FakeEngine, Front, byte_fallback, columns, finish


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


def test_completions_write_a_part_of_a_character_as_its_bytes(play: Play) -> None:
    async def scenario(front: Front, engine: FakeEngine, address: tuple[str, int]) -> None:
        first, second = front.context.text.tokenizer.encode("é", add_special_tokens=False)  # type: ignore[union-attr]
        connection = await ask(front, address, completion(request(logprobs=SCORED), top_logprobs=1))
        one = await engine.submitted()
        await engine.step({one: [first, second]}, finish(one), **told((first, -1.5, second), (second, -0.5, second)))
        logprobs = (await connection.json())["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["bytes:\\xc3", "bytes:\\xa9"]
        assert logprobs["top_logprobs"] == [{"bytes:\\xa9": -0.25, "bytes:\\xc3": -1.5}, {"bytes:\\xa9": -0.5}]

    play(scenario)


def test_of_tokens_with_the_same_text_the_others_are_told_by_their_ids(play: Play) -> None:
    async def scenario(front: Front, engine: FakeEngine, address: tuple[str, int]) -> None:
        connection = await ask(front, address, completion(request(logprobs=wire.LogprobRequest(output_top=2)), top_logprobs=2))
        one = await engine.submitted()
        tops = [[(600, -0.25), (A, -1.0)], [(600, -0.25), (601, -1.0)]]  # ids without a token have no text
        await engine.step({one: [601, A]}, finish(one), scored=wire.pack_ids([0, 1]), logprobs=columns([-2.0, -3.0], tops))
        logprobs = (await connection.json())["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["", "a"]
        assert logprobs["top_logprobs"] == [{"token_id:600": -0.25, "a": -1.0, "": -2.0}, {"": -0.25, "token_id:601": -1.0, "a": -3.0}]

    play(scenario)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("skip", [False, True])
def test_offsets_are_places_in_the_text_that_is_answered(play: Play, stream: bool, skip: bool) -> None:
    async def scenario(front: Front, engine: FakeEngine, address: tuple[str, int]) -> None:
        assert front.context.text is not None
        letters = front.context.text.needed_tokenizer.encode("🎉é", add_special_tokens=False)
        party, accent = letters[:4], letters[4:]
        prompt = [EOS, *party, A, *party[:2], B, *accent[:1]]
        echo = "<|im_end|>🎉a\ufffdb\ufffd"
        asked = request(*prompt, logprobs=wire.LogprobRequest(output_top=1, prompt_from=1), skip_special_tokens=skip)
        plan = completion(asked, stream=stream, top_logprobs=0, echoes=(echo,), echo_logprobs=True)
        connection = await ask(front, address, plan)
        one = await engine.submitted()
        scores = wire.PromptLogprobs(one, 1, columns([-0.5] * (len(prompt) - 1)))
        said = [*party, EOS, *accent, A]
        await engine.step({one: said[:2]}, prompt_logprobs=[scores], **told(*((token, -1.0, token) for token in said[:2])))
        for token in said[2:]:
            await engine.step({one: [token]}, **told((token, -1.0, token)))
        await engine.step(None, finish(one))
        if stream:
            await connection.head()
            choices = [event["choices"][0] for event in await connection.events()]
        else:
            choices = (await connection.json())["choices"]
        text = "".join(choice["text"] for choice in choices)
        assert text == echo + ("🎉éa" if skip else "🎉<|im_end|>éa")
        offsets = [offset for choice in choices if choice["logprobs"] for offset in choice["logprobs"]["text_offset"]]
        end = text.index("é")
        assert offsets[: len(prompt)] == [0, 10, 10, 10, 10, 11, 12, 12, 13, 14]
        assert offsets[len(prompt) :] == [15, 15, 15, 15, 16, end, end, end + 1]

    play(scenario)


def test_offsets_know_what_a_tokenizer_put_before_a_prompt(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(byte_fallback(tmp_path))
    ids = np.array([1, 264, 263, 264], dtype=np.int32)
    told = CompletionLogprobs(tokenizer, echo="a你 a")
    answer = json.loads(b"".join(told.parts(lambda: iter(()), lambda: iter([Cells(ids[:, None], None)]))))
    assert answer["tokens"] == ["<s>", " a", "你", " a"]
    assert answer["text_offset"] == [0, 0, 1, 2]


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

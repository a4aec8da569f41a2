"""The path of a generation where the engine misbehaves on demand: the test plays the engine, over a real wire."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from banyan_runtime import wire
from banyan_runtime.front import speech, turns
from banyan_runtime.front.chat.events import Content, Event
from banyan_runtime.front.generation import Call
from banyan_runtime.front.generation_group import GenerationGroup
from banyan_runtime.front.logprobs import PromptTokens, cells_of
from banyan_runtime.front.plan import GenerateRequest, ToolUse
from banyan_runtime.front.text.tokenizer import Tokenizer
from banyan_runtime.wire import FinishCode
from tests.unit.front.generating import A, B, C, D, E, Play, Reader, World, player, request, text
from tests.unit.front.support import columns, finish, scores


@pytest.fixture
def play(tmp_path: Path, bytes_tokenizer: Tokenizer) -> Play:
    return player(tmp_path, bytes_tokenizer)


def test_deltas_hold_as_many_tokens_as_asked_for_however_they_arrive(play: Play) -> None:
    async def scenario(world: World) -> None:
        _, reader = world.start(request(stream_interval=3))
        one = await world.engine.submitted()
        for ids in ([A], [B, C, D, E], [A, B]):
            await world.engine.step({one: ids})
        await world.engine.step({one: [C]}, finish(one))
        deltas = await reader.all()
        assert [delta.content for delta in deltas] == ["abc", "dea", "bc"]
        assert deltas[-1].finished is not None
        assert [delta.completion_tokens for delta in deltas] == [3, 6, 8]

    play(scenario)


def test_several_tokens_of_a_step_reach_their_own_streams_in_order(play: Play) -> None:
    async def scenario(world: World) -> None:
        _, reader = world.start(request(), request(), request())
        one, two, three = [submit.id for submit in await world.engine.submits(3)]
        await world.engine.step({one: [A, B, C], two: [], three: [D]})
        await world.engine.step({two: [E, A]}, finish(one), finish(two), finish(three))
        assert await reader.ended is None
        for index, expected in enumerate(("abc", "ea", "d")):
            assert text([delta for at, delta in reader.deltas if at == index]) == expected

    play(scenario)


@pytest.mark.parametrize(
    ("most", "given"), [(None, [1000, 3, 0, -100]), (3, [3, 3, 0, -100]), (0, [0, 0, 0, -100])], ids=["any", "three", "none"]
)
def test_no_request_has_a_higher_priority_than_the_server_gives_and_background_stays_behind(
    play: Play, most: int | None, given: list[int]
) -> None:
    async def scenario(world: World) -> None:
        world.context.config = dataclasses.replace(world.context.config, max_client_priority=most)
        world.start(*(request(priority=asked) for asked in (1000, 3, 0, -100)))
        assert [submit.priority for submit in await world.engine.submits(4)] == given

    play(scenario)


def test_a_stream_whose_grammar_may_be_refused_waits_with_its_status(play: Play) -> None:
    async def scenario(world: World) -> None:
        assert not world.start(request())[0].may_be_refused
        group, reader = world.start(request(constraint=wire.Constraint(wire.Grammar("regex", "a"), param="regex", what="regex")))
        assert group.may_be_refused
        _, bound = await world.engine.submits(2)
        await world.engine.send(wire.Failed(bound.id, "invalid_grammar", "it is endless."))
        error = await reader.ended
        assert error is not None
        assert (error.status, error.param, error.message) == (400, "regex", "Invalid regex in 'regex': it is endless.")

    play(scenario)


def test_the_schemas_of_tools_are_read_once_for_all_choices(play: Play) -> None:
    async def scenario(world: World) -> None:
        before = speech._schemas.cache_info().misses
        tools = [ToolUse(format="hermes", schemas=bytes(bytearray(b'{"now": {}, "then": {}}'))) for _ in range(5)]
        world.start(*(request(tools=one) for one in tools))
        await world.engine.submits(5)
        assert speech._schemas.cache_info().misses == before + 1

    play(scenario)


@pytest.mark.parametrize(("include", "expected"), [(False, "a"), (True, "ab")])
def test_a_stop_token_has_no_text_unless_it_shall_be_kept(play: Play, include: bool, expected: str) -> None:
    async def scenario(world: World) -> None:
        _, reader = world.start(request(include_stop=include))
        one = await world.engine.submitted()
        await world.engine.step({one: [A]})
        await world.engine.step({one: [B]}, finish(one, FinishCode.STOP))
        deltas = await reader.all()
        assert text(deltas) == expected
        end = deltas[-1].finished
        assert end is not None
        assert (end.reason, end.matched, deltas[-1].completion_tokens) == ("stop", B, 2)

    play(scenario)


def test_what_was_computed_beyond_a_stop_string_is_neither_shown_nor_counted(play: Play) -> None:
    async def scenario(world: World) -> None:
        _, reader = world.start(request(stops=("cd",), logprobs=wire.LogprobRequest(output_top=0)))
        one = await world.engine.submitted()
        scored = wire.pack_ids([0, 1, 2, 3, 4])
        await world.engine.step({one: [A, B, C, D, E]}, scored=scored, logprobs=columns([-1, -2, -3, -4, -5]))
        assert await world.engine.aborted() == one
        await world.engine.step(None, finish(one, FinishCode.ABORT))
        deltas = await reader.all()
        last = deltas[-1]
        assert (text(deltas), last.completion_tokens, last.token_ids) == ("ab", 4, [A, B, C, D])
        rows = [row for delta in deltas for row in delta.logprobs]
        assert [value for [(_, value)] in scores(cells_of(rows, 0))] == [-1, -2, -3, -4]
        assert last.finished is not None
        assert (last.finished.matched, last.finished.cached_tokens) == ("cd", 2)
        assert [record.finish_reason for record in world.records] == ["stop"]

    play(scenario)


def test_a_stop_string_wins_over_the_limit_that_is_reached_with_it(play: Play) -> None:
    async def scenario(world: World) -> None:
        _, reader = world.start(request(stops=("bc",)))
        one = await world.engine.submitted()
        await world.engine.step({one: [A, B, C]}, finish(one))
        (delta,) = await reader.all()
        assert delta.finished is not None
        assert (delta.content, delta.finished.reason, delta.finished.matched) == ("a", "stop", "bc")

    play(scenario)


def test_stop_strings_do_not_count_before_min_tokens(play: Play) -> None:
    async def scenario(world: World) -> None:
        _, reader = world.start(request(stops=("ab",), min_new_tokens=3))
        one = await world.engine.submitted()
        await world.engine.step({one: [A, B]})
        await world.engine.step({one: [A, B]})
        await world.engine.aborted()
        await world.engine.step(None, finish(one, FinishCode.ABORT))
        deltas = await reader.all()
        assert (text(deltas), deltas[-1].completion_tokens) == ("ab", 4)

    play(scenario)


def test_a_parser_that_fails_costs_no_text(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        reasoning_tokens = 0
        enough = False
        held = ""

        def feed(self, text: str, token_ids: Sequence[int]) -> list[Event]:
            self.held += text
            raise RuntimeError("bug")

        def finish(self) -> list[Event]:
            raise RuntimeError("bug")

        def rescue(self) -> list[Event]:
            return [Content(self.held)]

    async def scenario(world: World) -> None:
        monkeypatch.setattr(speech, "_parser", lambda *_: Broken())
        _, reader = world.start(request())
        one = await world.engine.submitted()
        await world.engine.step({one: [A, B]})
        await world.engine.step({one: [C]}, finish(one))
        assert text(await reader.all()) == "abc"

    play(scenario)


# --- very many at once ---


@pytest.mark.parametrize("after", [0, 1])
def test_a_group_has_an_id_of_its_own_by_which_all_of_it_ends(play: Play, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that were not submitted yet."""
    monkeypatch.setattr(turns, "TURN_S", 0.0)

    async def scenario(world: World) -> None:
        number = 66
        reader, live = Reader(), world.context.live
        call = Call(endpoint="other", streaming=True, received=0.0, group_id="a1")
        GenerationGroup(world.context, call, [request()] * number, [f"a1_{index}" for index in range(number)], reader)
        _, other = world.start(request())
        if after:
            await world.engine.submits(number + 1)
        live.abort("a")
        live.abort("a1")
        aborted: set[int] = set()
        while len(aborted) < number:
            match await world.engine.next():
                case wire.Abort(id=one):
                    aborted.add(one)
        await world.engine.step(None, *[finish(one, FinishCode.ABORT) for one in sorted(aborted)])
        assert await reader.ended is None
        assert {delta.finished.reason for _, delta in reader.deltas if delta.finished} == {"abort"}
        assert len(live) == 1
        assert "a1" not in live
        assert not other.ended.done()

    play(scenario)


# --- log probabilities ---


def test_log_probabilities_reach_those_who_asked_and_nobody_else(play: Play) -> None:
    async def scenario(world: World) -> None:
        _, reader = world.start(request(logprobs=wire.LogprobRequest(output_top=2)), request(), request(logprobs=wire.LogprobRequest(0)))
        one, two, three = [submit.id for submit in await world.engine.submits(3)]
        told = columns([-0.5, -1.5, -2.5], [[(A, -0.5), (D, -3.0)], [(B, -1.5), (D, -4.0)], [(E, -0.25), (A, -2.5)]])
        await world.engine.step({one: [A, B], two: [C], three: [A]}, scored=wire.pack_ids([0, 1, 3]), logprobs=told)
        await world.engine.step(None, finish(one), finish(two), finish(three))
        assert await reader.ended is None
        by_index = [[row for at, delta in reader.deltas if at == index for row in delta.logprobs] for index in range(3)]
        assert [scores(cells_of(rows, 2)) for rows in by_index] == [
            [[(A, -0.5), (A, -0.5), (D, -3.0)], [(B, -1.5), (B, -1.5), (D, -4.0)]],
            [],
            [[(A, -2.5), (E, -0.25), (A, -2.5)]],
        ]
        assert scores(cells_of(by_index[0], 1)) == [[(A, -0.5), (A, -0.5)], [(B, -1.5), (B, -1.5)]]

    play(scenario)


def test_the_log_probabilities_of_a_prompt_that_is_computed_in_chunks_come_with_the_first_delta(play: Play) -> None:
    async def scenario(world: World) -> None:
        prompt = wire.pack_ids([A, B, C, D])
        scored = GenerateRequest(token_ids=prompt, sampling=wire.Sampling(4), logprobs=wire.LogprobRequest(prompt_from=1, prompt_top=1))
        _, reader = world.start(scored)
        one = await world.engine.submitted()
        first = wire.PromptLogprobs(one, 1, columns([-1.0], [[(B, -1.0)]]))
        second = wire.PromptLogprobs(one, 2, columns([-2.0, -3.0], [[(A, -0.125)], [(D, -3.0)]]))
        await world.engine.step(None, prompt_logprobs=[first])
        await world.engine.step({one: [E]}, prompt_logprobs=[second])
        await world.engine.step({one: [A]}, finish(one))
        deltas = await reader.all()
        parts = deltas[0].prompt_logprobs
        rows = [[(A, None)], [(B, -1.0), (B, -1.0)], [(C, -2.0), (A, -0.125)], [(D, -3.0), (D, -3.0)]]
        assert scores(PromptTokens(prompt, 0).cells(parts, 1)) == rows
        assert scores(PromptTokens(prompt, 0).cells(parts, 0)) == [row[:1] for row in rows]
        assert scores(PromptTokens(prompt, 2).cells(parts, 1)) == [[(C, None)], rows[3]]
        assert scores(PromptTokens(prompt, 4).cells(parts, 1)) == []
        assert scores(PromptTokens(prompt, 1).cells((), 1)) == [[(token, None)] for token in (B, C, D)]
        assert [len(delta.prompt_logprobs) for delta in deltas[1:]] == [0] * (len(deltas) - 1)

    play(scenario)


def test_a_request_for_no_tokens_needs_the_engine_only_for_the_prompts_log_probabilities(play: Play) -> None:
    async def scenario(world: World) -> None:
        _, alone = world.start(request(max_new_tokens=0))
        (delta,) = await alone.all()
        assert delta.finished is not None
        assert (delta.finished.reason, delta.completion_tokens) == ("length", 0)
        _, scored = world.start(request(max_new_tokens=0, logprobs=wire.LogprobRequest(prompt_from=1)))
        (submit,) = await world.engine.submits()
        assert (submit.sampling.max_new_tokens, submit.logprobs) == (0, wire.LogprobRequest(prompt_from=1))
        part = wire.PromptLogprobs(submit.id, 1, columns([-1.0, -2.0]))
        await world.engine.step(None, finish(submit.id, prefill_s=None), prompt_logprobs=[part])
        (delta,) = await scored.all()
        assert delta.finished is not None
        assert (delta.finished.reason, delta.prompt_logprobs) == ("length", [part])
        assert [(record.queue_s, record.prefill_s) for record in world.records] == [(None, None), (0.25, None)]

    play(scenario)

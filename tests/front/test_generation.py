"""The path of a generation where the engine misbehaves on demand: a scripted client stands in for it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from banyan_runtime import wire
from banyan_runtime.front.chat.events import Event
from banyan_runtime.front.engine_client import EngineError, Tokens
from banyan_runtime.front.errors import ApiError
from banyan_runtime.front.generation import Delta, GenerateRequest, GenerationGroup
from banyan_runtime.front.text.detokenizer import ByteDetokenizer
from banyan_runtime.wire import FinishCode

LETTERS = [bytes([letter]) for letter in b"abcdefghij"]
Step = Tokens | EngineError


class Stream:
    """Plays its steps, then waits for ever; after an abort it ends as the engine's would."""

    first_token = None

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = list(steps)
        self.aborted = False

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Tokens:
        await asyncio.sleep(0)
        if self.aborted:
            return Tokens([9], wire.Finish(1, FinishCode.ABORT, 2, 0.0, 0.0, 0))
        if not self.steps:
            await asyncio.sleep(60)
        step = self.steps.pop(0)
        if isinstance(step, EngineError):
            raise step
        return step

    def abort(self) -> None:
        self.aborted = True


class World:
    """What a Context needs to run the scripts, one per generation."""

    def __init__(self, *scripts: Sequence[Step] | EngineError) -> None:
        self.scripts = list(scripts)
        self.streams: list[Stream] = []
        self.records: list[Any] = []
        self.live: dict[str, list[Any]] = {}
        self.client = SimpleNamespace(generate=self._generate)
        self.metrics = SimpleNamespace(request_finished=self.records.append)

    def _generate(self, ids: list[int], sampling: wire.Sampling, *, priority: int, salt: str) -> Stream:
        script = self.scripts.pop(0)
        if isinstance(script, EngineError):
            raise script
        self.streams.append(Stream(script))
        return self.streams[-1]

    def run(self, *requests: GenerateRequest) -> list[tuple[int, Delta]]:
        async def read() -> list[tuple[int, Delta]]:
            async with GenerationGroup(self, requests) as group:  # type: ignore[arg-type]
                await group.admitted()
                return [(index, delta) async for index, deltas in group for delta in deltas]

        async def bounded() -> list[tuple[int, Delta]]:
            return await asyncio.wait_for(read(), 5)

        return asyncio.run(bounded())


def request(**options: Any) -> GenerateRequest:
    limits = {"min_new_tokens": options.pop("min_tokens", 0)}
    sampling = wire.Sampling(max_new_tokens=16, **limits)
    return GenerateRequest(
        token_ids=[1, 2, 3], sampling=sampling, detokenizer=ByteDetokenizer(LETTERS, frozenset()), request_id="r", **options
    )


def end(code: FinishCode, *ids: int) -> Tokens:
    return Tokens(list(ids), wire.Finish(1, code, 2, 0.0, 0.0, 0))


def test_pieces_hold_as_many_tokens_as_asked_for_however_they_arrive() -> None:
    world = World([Tokens([0]), Tokens([1, 2, 3, 4]), Tokens([5, 6]), end(FinishCode.LENGTH, 7)])
    deltas = [delta for _, delta in world.run(request(group=3))]
    assert [delta.content for delta in deltas] == ["abc", "def", "gh"]
    assert deltas[-1].finished is not None
    assert [delta.completion_tokens for delta in deltas] == [3, 6, 8]


def test_a_stop_token_has_no_text_unless_it_shall_be_kept() -> None:
    script = [Tokens([0]), end(FinishCode.STOP, 1)]
    for include, text in ((False, "a"), (True, "ab")):
        deltas = [delta for _, delta in World(script).run(request(include_stop=include))]
        assert "".join(delta.content for delta in deltas) == text
        assert deltas[-1].finished is not None
        assert (deltas[-1].finished.reason, deltas[-1].finished.matched) == ("stop", 1)
        assert deltas[-1].completion_tokens == 2


def test_what_was_computed_beyond_a_stop_string_is_neither_shown_nor_counted() -> None:
    world = World([Tokens([0, 1, 2, 3, 4])])
    deltas = [delta for _, delta in world.run(request(stops=["cd"]))]
    assert "".join(delta.content for delta in deltas) == "ab"
    last = deltas[-1]
    assert (last.completion_tokens, last.token_ids) == (4, [0, 1, 2, 3])
    assert last.finished is not None
    assert (last.finished.matched, last.finished.cached_tokens) == ("cd", 2)
    assert world.streams[0].aborted
    assert [record.finish_reason for record in world.records] == ["stop"]


def test_a_stop_string_wins_over_the_limit_that_is_reached_with_it() -> None:
    (_, delta), *rest = World([end(FinishCode.LENGTH, 0, 1, 2)]).run(request(stops=["bc"]))
    assert not rest
    assert delta.finished is not None
    assert (delta.content, delta.finished.reason, delta.finished.matched) == ("a", "stop", "bc")


def test_stop_strings_do_not_count_before_min_tokens() -> None:
    world = World([Tokens([0, 1]), Tokens([0, 1]), end(FinishCode.LENGTH, 2)])
    deltas = [delta for _, delta in world.run(request(stops=["ab"], min_tokens=3))]
    assert "".join(delta.content for delta in deltas) == "ab"
    assert deltas[-1].completion_tokens == 4


def test_a_parser_that_fails_costs_no_text() -> None:
    class Broken:
        reasoning_tokens = 0

        def feed(self, text: str, token_ids: Sequence[int]) -> list[Event]:
            raise RuntimeError("bug")

        def finish(self) -> list[Event]:
            raise RuntimeError("bug")

    deltas = World([Tokens([0, 1]), end(FinishCode.LENGTH, 2)]).run(request(parser=Broken()))
    assert "".join(delta.content for _, delta in deltas) == "abc"


@pytest.mark.parametrize(
    ("code", "status", "retry_after"),
    [
        ("queue_full", 429, "1"),
        ("kv_exhausted", 503, "1"),
        ("unavailable", 503, "5"),
        ("internal_error", 500, None),
        ("else", 500, None),
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
def test_the_engines_refusals_become_http_errors(code: str, status: int, retry_after: str | None, at_once: bool) -> None:
    error = EngineError(code, "details of the engine")
    world = World(error if at_once else [error])
    with pytest.raises(ApiError) as raised:
        world.run(request())
    assert (raised.value.status, raised.value.headers.get("Retry-After")) == (status, retry_after)
    assert status != 500 or "details" not in raised.value.message
    assert world.live == {}


def test_only_admitted_requests_are_counted_as_requests() -> None:
    for script, reasons in (([EngineError("queue_full", "")], []), ([Tokens([0]), EngineError("kv_exhausted", "")], ["error"])):
        world = World(script)
        with pytest.raises(ApiError):
            world.run(request())
        assert [record.finish_reason for record in world.records] == reasons


def test_when_one_of_several_fails_the_others_are_aborted() -> None:
    world = World([Tokens([0])], [Tokens([0]), EngineError("kv_exhausted", "full")], [Tokens([0])])
    with pytest.raises(ApiError, match="full"):
        world.run(request(), request(), request())
    assert [stream.aborted for stream in world.streams] == [True, False, True]
    assert sorted(record.finish_reason for record in world.records) == ["abort", "abort", "error"]
    assert world.live == {}


def test_when_one_of_several_is_refused_none_runs() -> None:
    world = World([Tokens([0])], EngineError("queue_full", ""))
    with pytest.raises(ApiError, match="queue is full"):
        world.run(request(), request())
    assert [stream.aborted for stream in world.streams] == [True]
    assert world.live == {}

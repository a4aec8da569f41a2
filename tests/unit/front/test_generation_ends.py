"""How a generation ends other than by its last token: refused, failed, left, aborted, closed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from banyan_runtime import wire
from banyan_runtime.front.answers import rejection
from banyan_runtime.front.errors import ApiError
from banyan_runtime.front.submission import EngineError
from banyan_runtime.front.text.tokenizer import Tokenizer
from banyan_runtime.wire import FinishCode
from tests.unit.front.generating import A, B, C, Play, World, player, request, text
from tests.unit.front.support import finish


@pytest.fixture
def play(tmp_path: Path, bytes_tokenizer: Tokenizer) -> Play:
    return player(tmp_path, bytes_tokenizer)


# --- refusals and failures ---


@pytest.mark.parametrize(
    ("code", "retry_after"),
    [("queue_full", "1"), ("kv_exhausted", "1"), ("unavailable", "5"), ("internal_error", None), ("else", None)],
)
@pytest.mark.parametrize("at_once", [True, False])
def test_the_engines_refusals_become_http_errors(
    play: Play, monkeypatch: pytest.MonkeyPatch, code: str, retry_after: str | None, at_once: bool
) -> None:
    async def scenario(world: World) -> None:
        if at_once:
            error = EngineError(code, "details of the engine")
            monkeypatch.setattr(world.engine.client, "submit", lambda *_, **__: (_ for _ in ()).throw(error))
            with pytest.raises(ApiError) as raised:
                world.start(request())
        else:
            _, reader = world.start(request())
            await world.engine.send(wire.Failed(await world.engine.submitted(), code, "details of the engine"))
            with pytest.raises(ApiError) as raised:
                await reader.all()
        assert raised.value.headers.get("Retry-After") == retry_after
        assert (raised.value.status == 500) == (retry_after is None)
        assert raised.value.status != 500 or "details" not in raised.value.message
        assert len(world.context.live) == 0

    play(scenario)


@pytest.mark.parametrize(("again_s", "retry_after"), [(0.0, "1"), (1.0, "1"), (60.0, "60"), (1.5, "2")])
def test_when_to_come_again_behind_a_shortage_of_memory_is_the_engines_to_say(play: Play, again_s: float, retry_after: str) -> None:
    async def scenario(world: World) -> None:
        _, reader = world.start(request())
        await world.engine.send(wire.Failed(await world.engine.submitted(), "out_of_memory", "no memory", again_s))
        with pytest.raises(ApiError) as raised:
            await reader.all()
        assert (raised.value.status, raised.value.code) == (503, "out_of_memory")
        assert raised.value.headers["Retry-After"] == retry_after

    play(scenario)


def test_after_the_engines_death_the_error_says_what_happened(play: Play) -> None:
    async def scenario(world: World) -> None:
        _, reader = world.start(request())
        await world.engine.step({await world.engine.submitted(): [A]})
        await reader.heard()
        world.engine.client.died("exit code -9")
        with pytest.raises(ApiError, match="exit code -9") as raised:
            await reader.all()
        assert (raised.value.status, raised.value.code) == (500, "internal_error")
        assert [record.finish_reason for record in world.records] == ["error"]

    play(scenario)


def test_only_admitted_requests_are_counted_as_requests(play: Play) -> None:
    async def scenario(world: World) -> None:
        for code, tokens, reasons in (("queue_full", [], []), ("kv_exhausted", [A], ["error"])):
            _, reader = world.start(request())
            one = await world.engine.submitted()
            if tokens:
                await world.engine.step({one: tokens})
            await world.engine.send(wire.Failed(one, code, ""))
            with pytest.raises(ApiError):
                await reader.all()
            assert [record.finish_reason for record in world.records] == reasons

    play(scenario)


def test_each_accepted_sequence_has_one_finish_line_and_one_count_however_it_ends(play: Play, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(world: World) -> None:
        caplog.set_level("INFO", "banyan.requests")
        _, whole = world.start(request())
        first = await world.engine.submitted()
        await world.engine.step({first: [A]}, finish(first))
        await whole.all()

        _, failing = world.start(request(), request())
        one, two = [submit.id for submit in await world.engine.submits(2)]
        await world.engine.send(wire.Failed(one, "kv_exhausted", "full"))
        with pytest.raises(ApiError):
            await failing.all()
        assert await world.engine.aborted() == two
        await world.engine.step(None, finish(two, FinishCode.ABORT))

        left, _ = world.start(request())
        third = await world.engine.submitted()
        left.close()
        assert await world.engine.aborted() == third
        await world.engine.step(None, finish(third, FinishCode.ABORT))

        _, refused = world.start(request())
        await world.engine.send(wire.Failed(await world.engine.submitted(), "queue_full", ""))
        with pytest.raises(ApiError):
            await refused.all()

        _, orphaned = world.start(request())
        await world.engine.submitted()
        world.engine.client.died("exit code -9")
        with pytest.raises(ApiError):
            await orphaned.all()
        reasons = [record.finish_reason for record in world.records]
        assert sorted(reasons) == ["abort", "abort", "error", "error", "length"]
        lines = [record.getMessage() for record in caplog.records if record.name == "banyan.requests"]
        assert [line.split("reason: ")[1].split(",")[0] for line in lines] == reasons

    play(scenario)


def test_when_one_of_several_fails_the_others_are_aborted(play: Play) -> None:
    async def scenario(world: World) -> None:
        _, reader = world.start(request(), request(), request())
        one, two, three = [submit.id for submit in await world.engine.submits(3)]
        await world.engine.step({one: [A], two: [A], three: [A]})
        await world.engine.send(wire.Failed(two, "kv_exhausted", "full"))
        with pytest.raises(ApiError, match="full"):
            await reader.all()
        assert [await world.engine.aborted(), await world.engine.aborted()] == [one, three]
        await world.engine.step(None, finish(one, FinishCode.ABORT), finish(three, FinishCode.ABORT))
        _, probe = world.start(request(max_new_tokens=0))
        await probe.all()
        while world.engine.client.open_requests:  # noqa: ASYNC110  the wire has no event for it
            await asyncio.sleep(0.001)
        assert sorted(record.finish_reason for record in world.records) == ["abort", "abort", "error", "length"]
        assert len(world.context.live) == 0

    play(scenario)


def test_when_one_of_several_is_refused_none_runs(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: World) -> None:
        world.engine.client.max_open = 1
        with pytest.raises(ApiError) as raised:
            world.start(request(), request())
        assert raised.value.code == "queue_full"
        one = await world.engine.submitted()
        assert await world.engine.aborted() == one
        assert len(world.context.live) == 0

    play(scenario)


def test_a_request_of_which_one_sequence_is_refused_counts_as_refused_and_not_as_aborted(
    play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(world: World) -> None:
        caplog.set_level("INFO", "banyan.requests")
        _, reader = world.start(request(), request())
        one, two = [submit.id for submit in await world.engine.submits(2)]
        await world.engine.send(wire.Failed(two, "queue_full", ""))
        with pytest.raises(ApiError) as refused:
            await reader.all()
        assert await world.engine.aborted() == one
        await world.engine.step(None, finish(one, FinishCode.ABORT))
        _, other = world.start(request())
        third = await world.engine.submitted()
        await world.engine.step({third: [A]}, finish(third))
        await other.all()
        assert [record.finish_reason for record in world.records] == ["length"]
        assert len(caplog.records) == 1
        assert rejection(world.context, refused.value) == "queue_full"

    play(scenario)


def test_an_error_of_a_sequence_that_was_taken_on_is_no_rejection_too(play: Play) -> None:
    async def scenario(world: World) -> None:
        _, reader = world.start(request())
        await world.engine.send(wire.Failed(await world.engine.submitted(), "invalid_grammar", "it is endless"))
        with pytest.raises(ApiError) as failed:
            await reader.all()
        assert failed.value.status == 400
        assert [record.finish_reason for record in world.records] == ["error"]
        assert rejection(world.context, failed.value) is None

    play(scenario)


def test_the_line_of_a_sequence_without_a_token_tells_no_time_of_one(play: Play, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(world: World) -> None:
        caplog.set_level("INFO", "banyan.requests")
        left, _ = world.start(request(priority=-1))
        one = await world.engine.submitted()
        left.close()
        assert await world.engine.aborted() == one
        await world.engine.step(None, finish(one, FinishCode.ABORT))
        _, probe = world.start(request(max_new_tokens=0))
        await probe.all()
        while world.engine.client.open_requests:  # noqa: ASYNC110  the wire has no event for it
            await asyncio.sleep(0.001)
        assert all("first token: -, total: " in record.getMessage() for record in caplog.records)
        assert sorted((record.finish_reason, record.background) for record in world.records) == [("abort", True), ("length", False)]

    play(scenario)


def test_a_consumer_that_fails_at_the_end_ends_with_an_error(play: Play) -> None:
    async def scenario(world: World) -> None:
        _, broken = world.start(request())
        broken.add = None  # type: ignore[assignment]
        one = await world.engine.submitted()
        await world.engine.step({one: [A]}, finish(one))
        error = await broken.ended
        assert error is not None
        assert error.code == "internal_error"
        assert len(world.records) == 1

    play(scenario)


def test_a_consumer_that_fails_ends_its_own_request_alone(play: Play) -> None:
    async def scenario(world: World) -> None:
        _, broken = world.start(request())
        _, other = world.start(request())
        broken.add = None  # type: ignore[assignment]
        one, two = [submit.id for submit in await world.engine.submits(2)]
        await world.engine.step({one: [A], two: [B]})
        error = await broken.ended
        assert error is not None
        assert error.code == "internal_error"
        assert await world.engine.aborted() == one
        await world.engine.step({two: [C]}, finish(two))
        assert text(await other.all()) == "bc"

    play(scenario)


def test_the_first_token_is_counted_when_it_comes_and_that_of_background_is_not(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: World) -> None:
        seen: list[bool] = []
        monkeypatch.setattr(world.context.metrics, "first_token", lambda seconds, streaming: seen.append(streaming))
        _, late = world.start(request(priority=-1))
        _, soon = world.start(request())
        one, two = [submit.id for submit in await world.engine.submits(2)]
        for _ in range(2):
            await world.engine.step({one: [A], two: [B]})
            await late.heard()
            await soon.heard()
            assert seen == [True]

    play(scenario)


# --- the end ---


def test_a_reader_who_leaves_is_recorded_with_the_engines_own_times(play: Play) -> None:
    async def scenario(world: World) -> None:
        group, reader = world.start(request())
        one = await world.engine.submitted()
        await world.engine.step({one: [A]})
        await reader.heard()
        group.close()
        group.close()
        assert world.records == [], "the engine has not had its last word yet"
        assert "r" not in world.context.live
        assert await world.engine.aborted() == one
        await world.engine.step({one: [B]})
        await world.engine.step(None, finish(one, FinishCode.ABORT, queue_s=0.125, prefill_s=0.75))
        while not world.records:  # noqa: ASYNC110  the wire has no event for it
            await asyncio.sleep(0.001)
        (record,) = world.records
        assert (record.finish_reason, record.completion_tokens, record.queue_s, record.prefill_s) == ("abort", 1, 0.125, 0.75)
        assert len(reader.deltas) == 1

    play(scenario)


def test_a_reader_who_leaves_a_dead_engine_is_recorded_without_times(play: Play) -> None:
    async def scenario(world: World) -> None:
        group, reader = world.start(request())
        await world.engine.step({await world.engine.submitted(): [A]})
        await reader.heard()
        group.close()
        world.engine.client.died("gone")
        (record,) = world.records
        assert (record.finish_reason, record.queue_s, record.prefill_s) == ("abort", None, None)

    play(scenario)


def test_closing_ends_all_generations_also_when_the_engine_has_vanished(play: Play) -> None:
    async def scenario(world: World) -> None:
        group, reader = world.start(request(), request())
        one, two = [submit.id for submit in await world.engine.submits(2)]
        await world.engine.step({one: [A], two: [A]})
        await reader.heard()
        world.engine.kill()
        while not world.engine.client.lost:
            world.engine.client.heartbeat()
            world.engine.client._ping = None
            await asyncio.sleep(0.001)
        group.close()
        assert len(world.context.live) == 0
        world.engine.client.died("gone")
        assert [record.finish_reason for record in world.records] == ["abort", "abort"]

    play(scenario)


def test_an_abort_by_id_ends_all_choices_with_what_they_have(play: Play) -> None:
    async def scenario(world: World) -> None:
        _, reader = world.start(request(), request())
        one, two = [submit.id for submit in await world.engine.submits(2)]
        world.context.live.abort("unknown")
        world.context.live.abort("r")
        assert [await world.engine.aborted(), await world.engine.aborted()] == [one, two]
        await world.engine.step({one: [A]}, finish(one, FinishCode.ABORT), finish(two, FinishCode.ABORT))
        assert [delta.finished.reason for delta in await reader.all() if delta.finished is not None] == ["abort", "abort"]

    play(scenario)

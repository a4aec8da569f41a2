"""From a plan to the bytes of an answer, over real HTTP: the test makes the plan and plays the engine."""

from __future__ import annotations

import asyncio
import functools
import gc
import itertools
import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from banyan_runtime import wire
from banyan_runtime.front import event_stream, turns
from banyan_runtime.front.plan import GenerateRequest
from banyan_runtime.front.text.tokenizer import Tokenizer
from banyan_runtime.wire import FinishCode
from tests.unit.front.answering import KINDS, PATHS, SCORED, A, B, Play, ask, chat, completion, native, player, request, streaming, told
from tests.unit.front.support import Connection, FakeEngine, Front, columns, finish


@pytest.fixture
def play(tmp_path: Path, bytes_tokenizer: Tokenizer) -> Play:
    return player(tmp_path, bytes_tokenizer)


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


def test_a_refusal_of_a_ready_server_is_not_counted_as_one_while_loading(play: Play) -> None:
    async def scenario(front: Front, engine: FakeEngine, address: tuple[str, int]) -> None:
        for phase, reason in (("loading", "loading"), ("ready", "unavailable"), ("draining", "draining")):
            connection = await ask(front, address, streaming("chat"))
            one = await engine.submitted()
            front.context.state.phase = phase
            await engine.send(wire.Failed(one, "unavailable", "too many"))
            assert (await connection.head())[0] == 503
            assert front.rejections.pop() == reason
            front.context.state.phase = "ready"

    play(scenario)


def test_no_event_of_a_cumulative_stream_is_told_twice_however_its_writing_is_cut_up(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens come while an event is being written."""
    monkeypatch.setattr(turns, "TURN_S", 0.0)

    async def scenario(front: Front, engine: FakeEngine, address: tuple[str, int]) -> None:
        connection = await ask(front, address, native(request(), request(), request(), stream=True, listed=True))
        ids = [each.id for each in await engine.submits(3)]
        await connection.head()
        for number in range(60):
            await engine.step({one: [A] for one in ids}, *(finish(one) for one in ids if number == 59))
            for _ in range(number % 9):
                await asyncio.sleep(0)
        lengths: dict[int, list[int]] = {0: [], 1: [], 2: []}
        for event in await connection.events():
            lengths[event["index"]].append(event["meta_info"]["completion_tokens"])
        for told_so_far in lengths.values():
            assert told_so_far == sorted(set(told_so_far))
            assert told_so_far[-1] == 60

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
        front.context.client.died("exit code -9")
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
        for _ in range(100):  # the handler may have some turns of the loop left until it waits for the engine
            await asyncio.sleep(0)
        gc.collect()
        assert sys.getrefcount(prompt) == free

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


@pytest.mark.matrix(gate=1)
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
        assert [record.levelno for record in caplog.records if record.levelno >= logging.WARNING]
        await connection.head()
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError, ValueError)):
            await connection.events()
        while len(front.context.live):  # noqa: ASYNC110  the wire has no event for it
            await asyncio.sleep(0.001)

    play(scenario)


@pytest.mark.long  # unstable: counts objects of the whole process, also those that earlier connections leave late
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_request_held_is_gone_with_it(play: Play, kind: str, stream: bool, fails: bool) -> None:
    """And does not stay until the garbage collector comes by, which is seldom."""
    whole = {"chat": chat, "completions": completion, "generate": lambda: native(request())}
    plan = functools.partial(streaming, kind) if stream else whole[kind]

    async def scenario(front: Front, engine: FakeEngine, address: tuple[str, int]) -> None:
        idle = len(asyncio.all_tasks())

        async def once() -> None:
            connection = await ask(front, address, plan())
            one = await engine.submitted()
            if fails:
                await engine.send(wire.Failed(one, "context_length_exceeded", "too long"))
            else:
                await engine.step({one: [A]}, finish(one))
            await connection.head()
            if stream and not fails:
                await connection.events()
            while len(asyncio.all_tasks()) > idle:  # noqa: ASYNC110  nothing tells of their end
                await asyncio.sleep(0.001)

        await once()  # whatever is made at first
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            await once()
            gc.collect()
            left = [type(each).__qualname__ for each in gc.garbage if type(each).__module__.startswith("banyan_runtime")]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
        assert left == []

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

"""The front's end of the wire: the test plays the engine behind a real link."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from banyan_runtime import wire
from banyan_runtime.front.engine_client import EngineClient
from banyan_runtime.front.logprobs import cells_of
from banyan_runtime.front.submission import EngineError, Stream, Submission, Tokens
from tests.unit.front.support import INFO, STATS, FakeEngine, columns, finish, run, scores

GREEDY = wire.Sampling(max_new_tokens=4, temperature=0.0)
Scenario = Callable[[FakeEngine, EngineClient], Awaitable[None]]


def play(folder: Path, scenario: Scenario, **options: int) -> None:
    async def played() -> None:
        async with FakeEngine(folder, **options) as engine:
            await scenario(engine, engine.client)

    run(played)


async def until(seen: Callable[[], bool]) -> None:
    while not seen():  # noqa: ASYNC110  the wire has no event for it
        await asyncio.sleep(0.001)


async def collect(stream: Stream) -> list[Tokens]:
    return [tokens async for tokens in stream]


def test_a_stream_gives_all_tokens_in_order_and_ends_with_the_finish(tmp_path: Path) -> None:
    async def scenario(engine: FakeEngine, client: EngineClient) -> None:
        stream = client.generate([7, 8, 9], GREEDY, priority=2, salt="me")
        assert await engine.submits() == [wire.Submit(1, wire.pack_ids([7, 8, 9]), GREEDY, 2, "me")]
        for token in (7, 8):
            await engine.step({1: [token]})
        await engine.step({1: [9]}, finish(1))
        heard = await collect(stream)
        assert [token for tokens in heard for token in tokens.ids] == [7, 8, 9]
        assert [tokens.finish for tokens in heard] == [None] * (len(heard) - 1) + [finish(1)]
        assert client.open_requests == 0

    play(tmp_path, scenario)


def test_a_burst_of_steps_is_told_at_once(tmp_path: Path) -> None:
    async def scenario(engine: FakeEngine, client: EngineClient) -> None:
        stream = client.generate([1], GREEDY)
        one = await engine.submitted()
        for token in range(1000):
            await engine.step({one: [token]})
        await engine.step(None, finish(one))
        time.sleep(0.2)  # noqa: ASYNC251  the loop is busy with something else meanwhile
        heard = await collect(stream)
        assert [token for tokens in heard for token in tokens.ids] == list(range(1000))
        assert len(heard) < 20

    play(tmp_path, scenario)


def test_many_requests_of_one_step_each_get_their_own_column(tmp_path: Path) -> None:
    async def scenario(engine: FakeEngine, client: EngineClient) -> None:
        gaps: list[int] = []
        client.on_inter_token_latency = lambda gap, requests: gaps.append(requests)
        streams = [client.generate([1], GREEDY) for _ in range(50)]
        await engine.submits(50)
        ids = range(1, 51)
        await engine.step({one: [one * 10] for one in ids})
        await engine.step({one: [one * 10 + 1] for one in ids}, *map(finish, ids))
        for stream, heard in zip(streams, await asyncio.gather(*map(collect, streams)), strict=True):
            assert [token for tokens in heard for token in tokens.ids] == [stream.id * 10, stream.id * 10 + 1]
        assert gaps == [50], "requests of the same two steps share one observation"

    play(tmp_path, scenario)


def test_several_tokens_of_a_step_count_as_so_many_gaps(tmp_path: Path) -> None:
    async def scenario(engine: FakeEngine, client: EngineClient) -> None:
        gaps: list[int] = []
        client.on_inter_token_latency = lambda gap, requests: gaps.append(requests)
        streams = [client.generate([1], GREEDY) for _ in range(2)]
        await engine.submits(2)
        await engine.step({1: [10], 2: [20, 21]})
        await engine.step({1: [11, 12, 13], 2: [22]}, finish(1), finish(2))
        heard = [[token for tokens in await collect(stream) for token in tokens.ids] for stream in streams]
        assert heard == [[10, 11, 12, 13], [20, 21, 22]]
        assert sorted(gaps) == [1, 3]

    play(tmp_path, scenario)


class Slow(Stream):
    """Who takes its time over each word, on the loop, as a write to a socket does."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[list[int]] = []

    def on_tokens(self, tokens: Tokens) -> None:
        time.sleep(0.002)
        self.heard.append(tokens.ids)
        super().on_tokens(tokens)


def test_half_of_the_time_is_left_where_telling_takes_long_and_what_came_meanwhile_is_told_together(tmp_path: Path) -> None:
    async def scenario(engine: FakeEngine, client: EngineClient) -> None:
        gaps: list[tuple[float, int]] = []
        client.on_inter_token_latency = lambda gap, count: gaps.append((gap, count))
        listeners = [Slow() for _ in range(5)]  # 10 ms to tell them all
        for listener in listeners:
            listener.submission = client.submit(listener, wire.pack_ids([1]), GREEDY)
        await engine.submits(5)
        began = time.monotonic()
        for token in range(60):
            await engine.step({one: [token] for one in range(1, 6)}, *([finish(one) for one in range(1, 6)] if token == 59 else []))
            await asyncio.sleep(0.002)
        for listener in listeners:
            await collect(listener)
        took = time.monotonic() - began
        for listener in listeners:
            assert [token for ids in listener.heard for token in ids] == list(range(60))
            assert 0.002 * 5 * len(listener.heard) < 0.75 * took, "telling took half of the time, and the machine's disturbances"
        assert sum(count for _, count in gaps) == 5 * 59
        assert 0 < sum(gap * count for gap, count in gaps) / 5 <= took
        assert not any(gap == 0 for gap, _ in gaps), "tokens that are told together share the time since the last that was told"

    play(tmp_path, scenario)


def test_an_observer_of_gaps_that_fails_costs_nobody_a_token(tmp_path: Path) -> None:
    async def scenario(engine: FakeEngine, client: EngineClient) -> None:
        def failing(gap: float, count: int) -> None:
            raise RuntimeError("not today")

        client.on_inter_token_latency = failing
        stream = client.generate([1], GREEDY)
        await engine.submits(1)
        for token in (7, 8, 9):
            await engine.step({1: [token]}, *([finish(1)] if token == 9 else []))
            await asyncio.sleep(0.005)
        async with asyncio.timeout(5):
            assert [token for tokens in await collect(stream) for token in tokens.ids] == [7, 8, 9]

    play(tmp_path, scenario)


def test_an_engine_that_ends_while_nothing_is_taken_in_is_noticed(tmp_path: Path) -> None:
    async def scenario(engine: FakeEngine, client: EngineClient) -> None:
        listener = Slow()
        listener.submission = client.submit(listener, wire.pack_ids([1]), GREEDY)
        await engine.submits(1)
        await engine.step({1: [5]})
        await until(lambda: bool(listener.heard))
        engine.link.close()
        await until(lambda: client.lost)

    play(tmp_path, scenario)


def test_log_probabilities_come_with_their_tokens(tmp_path: Path) -> None:
    async def scenario(engine: FakeEngine, client: EngineClient) -> None:
        streams = [client.generate([1], GREEDY) for _ in range(3)]
        await engine.submits(3)
        told = columns([-1.0, -2.0])
        await engine.step({1: [10], 2: [20], 3: [30]}, *map(finish, (1, 2, 3)), scored=wire.pack_ids([0, 2]), logprobs=told)
        heard = [await collect(stream) for stream in streams]
        assert [scores(cells_of(tokens.logprobs, 0)) for (tokens,) in heard] == [[[(10, -1.0)]], [], [[(30, -2.0)]]]

    play(tmp_path, scenario)


def test_an_aborted_stream_still_ends_with_what_the_engine_knows_of_it(tmp_path: Path) -> None:
    async def scenario(engine: FakeEngine, client: EngineClient) -> None:
        stream = client.generate([1], GREEDY)
        one = await engine.submitted()
        await engine.step({one: [1]})
        assert await anext(stream) == Tokens([1])
        stream.abort()
        assert await engine.aborted() == one
        await engine.step(None, finish(one, wire.FinishCode.ABORT))
        assert await collect(stream) == [Tokens([], finish(one, wire.FinishCode.ABORT))]
        assert client.open_requests == 0

    play(tmp_path, scenario)


def test_leaving_the_block_of_a_stream_aborts_it(tmp_path: Path) -> None:
    async def scenario(engine: FakeEngine, client: EngineClient) -> None:
        async with client.generate([1], GREEDY) as stream:
            pass
        assert await engine.submitted() == stream.id
        assert await engine.aborted() == stream.id

    play(tmp_path, scenario)


def test_a_thousand_failing_requests_leave_no_state(tmp_path: Path) -> None:
    async def scenario(engine: FakeEngine, client: EngineClient) -> None:
        reading = asyncio.gather(*(collect(client.generate([1], GREEDY)) for _ in range(1000)), return_exceptions=True)
        await asyncio.sleep(0)
        for submit in await engine.submits(1000):
            await engine.send(wire.Failed(submit.id, "kv_exhausted", "no room"))
        assert [(type(error), str(error)) for error in await reading] == [(EngineError, "no room")] * 1000
        assert client.open_requests == 0
        assert (client._open, client._untold) == ({}, {})

    play(tmp_path, scenario)


def test_the_ids_of_a_prompt_are_not_kept_after_submission(tmp_path: Path) -> None:
    class Silent:
        def on_tokens(self, tokens: Tokens) -> None: ...

        def on_failure(self, error: EngineError) -> None: ...

    async def scenario(engine: FakeEngine, client: EngineClient) -> None:
        token_ids = wire.pack_ids(list(range(5000)))
        before = sys.getrefcount(token_ids)
        submission = client.submit(Silent(), token_ids, GREEDY)
        gc.collect()
        assert sys.getrefcount(token_ids) == before
        assert (await engine.submits())[0].token_ids == token_ids
        submission.abort()

    play(tmp_path, scenario)


def test_when_the_engine_dies_every_open_and_every_later_request_fails(tmp_path: Path) -> None:
    async def scenario(engine: FakeEngine, client: EngineClient) -> None:
        waiting = [asyncio.create_task(collect(client.generate([1], GREEDY))) for _ in range(3)]
        flush = asyncio.create_task(client.flush())
        await engine.next()
        client.died("it fell over")
        for task in (*waiting, flush):
            with pytest.raises(EngineError, match="it fell over") as caught:
                await task
            assert caught.value.code == "engine_died"
        with pytest.raises(EngineError, match="it fell over"):
            client.generate([1], GREEDY)
        assert client.open_requests == 0

    play(tmp_path, scenario)


ENGINE = """
import select, sys
from banyan_runtime import wire
from banyan_runtime.link import Link
from tests.unit.front.support import INFO
link = Link.connect(sys.argv[1])
link.send(wire.encode(wire.Ready(INFO)))
while True:
    select.select([link], [], [])
    for raw in link.receive():
        message = wire.decode_front(raw)
        if isinstance(message, wire.Submit):
            link.send(wire.encode(wire.StepOutput([message.id], wire.pack_ids([1]))))
"""


def test_a_killed_engine_makes_no_send_raise_and_the_requests_hear_why_it_ended(tmp_path: Path) -> None:
    async def scenario() -> None:
        client, address = EngineClient(), f"{tmp_path}/engine"
        client.bind(address)
        path = os.pathsep.join(sys.path)
        engine = await asyncio.create_subprocess_exec(sys.executable, "-c", ENGINE, address, env={**os.environ, "PYTHONPATH": path})
        await client.wait_ready()
        streams = [client.generate([1], GREEDY) for _ in range(10)]
        for stream in streams:
            assert (await anext(stream)).ids == [1]
        engine.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, engine.pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222 - so that the client does not know yet
        late = client.generate([1], GREEDY)
        late.abort()
        while not client.lost:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.001)
        client.heartbeat()
        streams[0].abort()
        client.died("the engine process was killed")
        for stream in (*streams, late):
            with pytest.raises(EngineError, match="was killed"):
                await anext(stream)
        client.shutdown()
        client.close()
        streams[1].abort()

    run(scenario)


def test_more_open_requests_than_the_bound_are_refused_at_once(tmp_path: Path) -> None:
    async def scenario(engine: FakeEngine, client: EngineClient) -> None:
        for _ in range(2):
            client.generate([1], GREEDY)
        with pytest.raises(EngineError) as caught:
            client.generate([1], GREEDY)
        assert caught.value.code == "queue_full"

    play(tmp_path, scenario, max_open=2)


def test_it_is_known_which_requests_the_engine_may_have_no_room_for(tmp_path: Path) -> None:
    async def scenario(engine: FakeEngine, client: EngineClient) -> None:
        def submit(tokens: int, priority: int = 0) -> Submission:
            submission = client.generate([1] * tokens, GREEDY, priority=priority).submission
            assert submission is not None
            return submission

        info = msgspec.structs.replace(INFO, max_queued_requests=3, max_queued_tokens=10)
        await engine.send(wire.Ready(info))
        await until(lambda: client.info == info)
        first, second, background = submit(50), submit(1), submit(1, -1)
        assert [each.may_be_refused for each in (first, second, background)] == [False, True, False], "where none waits any may"
        await engine.step({first.id: [7]})  # it waits no more
        await until(lambda: first.first_token is not None)
        assert [submit(tokens).may_be_refused for tokens in (5, 5, 1)] == [False, True, True]
        await engine.send(*(wire.Failed(each, "queue_full", "") for each in range(second.id, second.id + 5)))
        await until(lambda: client.open_requests == 1)
        assert [submit(tokens, level).may_be_refused for tokens, level in ((11, 0), (11, -1), (11, -1))] == [False, False, True]

    play(tmp_path, scenario)


def test_a_request_before_the_engine_is_ready_is_refused_as_unavailable() -> None:
    with pytest.raises(EngineError) as caught:
        EngineClient().generate([1], GREEDY)
    assert caught.value.code == "unavailable"


def test_the_age_of_an_unanswered_ping_grows_and_its_answer_resets_it(tmp_path: Path) -> None:
    async def scenario(engine: FakeEngine, client: EngineClient) -> None:
        client.heartbeat()
        await asyncio.sleep(0.2)
        assert client.heartbeat() >= 0.19
        ping = await engine.next()
        assert isinstance(ping, wire.Ping)
        await engine.send(wire.Pong(ping.seq))
        await until(lambda: client._ping is None)
        assert client.heartbeat() == 0.0

    play(tmp_path, scenario)


def test_flush_and_stats_arrive(tmp_path: Path) -> None:
    async def scenario(engine: FakeEngine, client: EngineClient) -> None:
        assert client.stats is None
        for ok in (True, False):
            flushing = asyncio.create_task(client.flush())
            flush = await engine.next()
            assert isinstance(flush, wire.Flush)
            await engine.send(STATS, wire.Flushed(flush.seq, ok))
            assert await flushing is ok
            assert client.stats == STATS

    play(tmp_path, scenario)


def test_a_message_that_cannot_be_handled_does_not_stop_the_others(tmp_path: Path) -> None:
    async def scenario(engine: FakeEngine, client: EngineClient) -> None:
        stream = client.generate([5], GREEDY)
        one = await engine.submitted()
        await engine.send(wire.StepOutput([one], wire.pack_ids([1, 2])), wire.StepOutput([one], wire.pack_ids([1]), counts=[2]))
        await engine.step({one: [5]}, finish(one))
        assert [token for tokens in await collect(stream) for token in tokens.ids] == [5]

    play(tmp_path, scenario)

"""The front's end of the wire, against a scripted engine behind a real ZeroMQ socket."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop
import zmq

from banyan_runtime import wire
from banyan_runtime.front.engine_client import EngineClient, EngineError, Stream, Tokens
from tests.server.test_metrics import INFO, STATS

GREEDY = wire.Sampling(max_new_tokens=4, temperature=0.0)
Script = Callable[[wire.FrontMessage], list[wire.EngineMessage]]


class Peer(threading.Thread):
    """An engine of a few lines: says Ready, then answers each message with what the script returns."""

    def __init__(self, address: str, script: Script) -> None:
        super().__init__(daemon=True)
        self._address, self._script = address, script
        self.got: list[wire.FrontMessage] = []

    def run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(self._address)
            socket.send(wire.encode(wire.StartupProgress("loading", 40, "half")))
            socket.send(wire.encode(wire.Ready(INFO)))
            while True:
                message = wire.decode_front(socket.recv())
                if isinstance(message, wire.Shutdown):
                    return
                self.got.append(message)
                for answer in self._script(message):
                    socket.send(wire.encode(answer))


@asynccontextmanager
async def connected(folder: Path, script: Script, **options: int) -> AsyncIterator[tuple[EngineClient, Peer]]:
    client = EngineClient(**options)
    address = f"ipc://{folder}/engine"
    client.bind(address)
    peer = Peer(address, script)
    peer.start()
    try:
        await asyncio.wait_for(client.wait_ready(), 10)
        yield client, peer
    finally:
        client._dead = None
        client.shutdown()
        await asyncio.to_thread(peer.join, 5)
        client.close()


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await scenario()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(bounded())


def end(request_id: int, code: wire.FinishCode = wire.FinishCode.LENGTH) -> wire.Finish:
    return wire.Finish(request_id, code, cached_tokens=5, queue_s=0.1, prefill_s=0.2, retractions=0)


def step(*pairs: tuple[int, int], finished: tuple[wire.Finish, ...] = ()) -> wire.StepOutput:
    return wire.StepOutput([pair[0] for pair in pairs], wire.pack_ids([pair[1] for pair in pairs]), list(finished))


def echo(message: wire.FrontMessage) -> list[wire.EngineMessage]:
    """Gives a prompt back token by token, one a step."""
    if not isinstance(message, wire.Submit):
        return []
    ids = wire.unpack_ids(message.token_ids).tolist()
    *head, last = [step((message.id, token)) for token in ids]
    return [*head, wire.StepOutput(last.ids, last.token_ids, [end(message.id)])]


def silent(message: wire.FrontMessage) -> list[wire.EngineMessage]:
    return []


async def until(seen: Callable[[], bool]) -> None:
    while not seen():  # noqa: ASYNC110  what is waited for happens on another thread
        await asyncio.sleep(0.01)


async def collect(stream: Stream) -> list[Tokens]:
    return [tokens async for tokens in stream]


def test_a_stream_gives_all_tokens_in_order_and_ends_with_the_finish(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected(tmp_path, echo) as (client, peer):
            deltas = await collect(client.generate([7, 8, 9], GREEDY, priority=2, salt="me"))
            assert [token for delta in deltas for token in delta.ids] == [7, 8, 9]
            assert [delta.finish is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
            assert deltas[-1].finish == end(1)
            assert peer.got == [wire.Submit(1, wire.pack_ids([7, 8, 9]), GREEDY, 2, "me")]
            assert client.open_requests == 0

    run(scenario)


def test_a_reader_that_comes_late_gets_everything_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected(tmp_path, echo) as (client, _):
            stream = client.generate(list(range(1000)), GREEDY)
            await until(lambda: client.open_requests == 0)
            assert await collect(stream) == [Tokens(list(range(1000)), end(stream.id))]

    run(scenario)


def test_many_streams_of_one_step_each_get_their_own_column(tmp_path: Path) -> None:
    async def scenario() -> None:
        def together(message: wire.FrontMessage) -> list[wire.EngineMessage]:
            if not isinstance(message, wire.Submit) or message.id < 50:
                return []
            ids = range(1, 51)
            return [step(*((one, one * 10) for one in ids)), step(*((one, one * 10 + 1) for one in ids), finished=tuple(map(end, ids)))]

        gaps: list[int] = []
        async with connected(tmp_path, together) as (client, _):
            client.on_inter_token_latency = lambda gap, requests: gaps.append(requests)
            streams = [client.generate([1], GREEDY) for _ in range(50)]
            for stream, deltas in zip(streams, await asyncio.gather(*map(collect, streams)), strict=True):
                assert [token for delta in deltas for token in delta.ids] == [stream.id * 10, stream.id * 10 + 1]
            assert gaps == [50], "requests of the same two steps share one observation"

    run(scenario)


def test_an_aborted_stream_still_ends_with_what_the_engine_knows_of_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        def until_aborted(message: wire.FrontMessage) -> list[wire.EngineMessage]:
            if isinstance(message, wire.Submit):
                return [step((message.id, 1))]
            assert isinstance(message, wire.Abort)
            return [step(finished=(end(message.id, wire.FinishCode.ABORT),))]

        async with connected(tmp_path, until_aborted) as (client, _):
            stream = client.generate([1], GREEDY)
            assert await anext(stream) == Tokens([1])
            stream.abort()
            assert await collect(stream) == [Tokens([], end(stream.id, wire.FinishCode.ABORT))]
            assert client.open_requests == 0

    run(scenario)


def test_leaving_the_block_of_a_stream_aborts_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected(tmp_path, silent) as (client, peer):
            async with client.generate([1], GREEDY) as stream:
                pass
            await until(lambda: len(peer.got) == 2)
            assert peer.got[1] == wire.Abort(stream.id)

    run(scenario)


def test_a_thousand_failing_requests_leave_no_state(tmp_path: Path) -> None:
    async def scenario() -> None:
        def fail(message: wire.FrontMessage) -> list[wire.EngineMessage]:
            assert isinstance(message, wire.Submit)
            return [wire.Failed(message.id, "kv_exhausted", "no room")]

        async with connected(tmp_path, fail) as (client, _):
            outcomes = await asyncio.gather(*(collect(client.generate([1], GREEDY)) for _ in range(1000)), return_exceptions=True)
            assert [(type(error), str(error)) for error in outcomes] == [(EngineError, "no room")] * 1000
            assert client.open_requests == 0
            assert client._streams == {}

    run(scenario)


def test_when_the_engine_dies_every_open_and_every_later_request_fails(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected(tmp_path, silent) as (client, _):
            waiting = [asyncio.create_task(collect(client.generate([1], GREEDY))) for _ in range(3)]
            flush = asyncio.create_task(client.flush())
            await asyncio.sleep(0.05)
            client.died("it fell over")
            for task in (*waiting, flush):
                with pytest.raises(EngineError, match="it fell over") as caught:
                    await task
                assert caught.value.code == "engine_died"
            with pytest.raises(EngineError, match="it fell over"):
                client.generate([1], GREEDY)
            assert client.open_requests == 0

    run(scenario)


def test_more_open_requests_than_the_bound_are_refused_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected(tmp_path, silent, max_open=2) as (client, _):
            for _ in range(2):
                client.generate([1], GREEDY)
            with pytest.raises(EngineError) as caught:
                client.generate([1], GREEDY)
            assert caught.value.code == "queue_full"

    run(scenario)


def test_a_request_before_the_engine_is_ready_is_refused_as_unavailable() -> None:
    with pytest.raises(EngineError) as caught:
        EngineClient().generate([1], GREEDY)
    assert caught.value.code == "unavailable"


def test_the_age_of_an_unanswered_ping_grows_and_its_answer_resets_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        answers = threading.Event()

        def slow(message: wire.FrontMessage) -> list[wire.EngineMessage]:
            assert isinstance(message, wire.Ping)
            answers.wait(10)
            return [wire.Pong(message.seq)]

        async with connected(tmp_path, slow) as (client, _):
            client.heartbeat()
            await asyncio.sleep(0.2)
            assert client.heartbeat() >= 0.19  # the loop wakes up to a millisecond early
            answers.set()
            await asyncio.sleep(1.5)  # on a busy machine 0.2 s was not enough for the answer to arrive
            assert client.heartbeat() == 0.0

    run(scenario)


def test_flush_and_stats_arrive(tmp_path: Path) -> None:
    async def scenario() -> None:
        def answer(message: wire.FrontMessage) -> list[wire.EngineMessage]:
            assert isinstance(message, wire.Flush)
            return [STATS, wire.Flushed(message.seq, ok=len(peers) == 0)]

        peers: list[int] = []
        async with connected(tmp_path, answer) as (client, _):
            assert client.stats is None
            assert await client.flush() is True
            assert client.stats == STATS
            peers.append(1)
            assert await client.flush() is False

    run(scenario)


def test_a_message_that_cannot_be_handled_does_not_stop_the_others(tmp_path: Path) -> None:
    async def scenario() -> None:
        def broken_first(message: wire.FrontMessage) -> list[wire.EngineMessage]:
            assert isinstance(message, wire.Submit)
            return [wire.StepOutput([message.id], wire.pack_ids([1, 2])), *echo(message)]

        async with connected(tmp_path, broken_first) as (client, _):
            deltas = await collect(client.generate([5], GREEDY))
            assert deltas[-1].ids[-1:] == [5]

    run(scenario)

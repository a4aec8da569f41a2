"""Requests of very many sequences leave others their turns on the event loop, at whatever they do. What is counted here is pieces
of work; how long turns take is measured in tests/component/server/test_event_loop.py."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from banyan_runtime.front import turns
from banyan_runtime.front.generation import Call
from banyan_runtime.front.generation_group import GenerationGroup
from banyan_runtime.front.logprobs import Cells, NativeLogprobs
from banyan_runtime.front.submission import Submission
from banyan_runtime.front.text.stops import StopMatcher
from banyan_runtime.front.text.tokenizer import Tokenizer
from tests.unit.front import answering, generating
from tests.unit.front.answering import ask, completion, native, told
from tests.unit.front.generating import A, Reader, World, request
from tests.unit.front.support import FakeEngine, Front, finish

NUMBER = 100


@pytest.fixture
def play(tmp_path: Path, bytes_tokenizer: Tokenizer) -> generating.Play:
    return generating.player(tmp_path, bytes_tokenizer)


@pytest.fixture
def play_http(tmp_path: Path, bytes_tokenizer: Tokenizer) -> answering.Play:
    return answering.player(tmp_path, bytes_tokenizer)


@pytest.fixture
def shortest_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """One piece of work is all that a turn has time for."""
    monkeypatch.setattr(turns, "TURN_S", 0.0)


@contextlib.contextmanager
def most_in_a_turn(count: Callable[[], int]) -> Iterator[list[int]]:
    """The most that `count` changes by in one turn of the event loop meanwhile, as the only item of a list."""
    found, last, over = [0], count(), False

    def watch() -> None:
        nonlocal last
        found[0], last = max(found[0], abs(count() - last)), count()
        if not over:
            asyncio.get_running_loop().call_soon(watch)

    watch()
    yield found
    over = True


async def until(seen: Callable[[], bool]) -> None:
    while not seen():  # noqa: ASYNC110  nothing tells of it
        await asyncio.sleep(0.001)


@pytest.mark.usefixtures("shortest_turns")
def test_very_many_sequences_are_submitted_and_told_in_turns(play: generating.Play) -> None:
    async def scenario(world: World) -> None:
        live, records = world.context.live, world.records
        with most_in_a_turn(lambda: len(live)) as submitted:
            world.start(*[request()] * NUMBER)
            ids = [submit.id for submit in await world.engine.submits(NUMBER)]
        with most_in_a_turn(lambda: len(records)) as ended:
            await world.engine.step({one: [A] for one in ids}, *map(finish, ids))
            await until(lambda: len(records) == NUMBER)
        assert (submitted, ended) == ([1], [1])

    play(scenario)


@pytest.mark.usefixtures("shortest_turns")
@pytest.mark.parametrize("way", ["its reader leaves", "it is aborted", "its id is aborted", "all are aborted"])
def test_very_many_sequences_end_in_turns(play: generating.Play, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    async def scenario(world: World) -> None:
        client, live = world.engine.client, world.context.live
        abort, aborted = client.abort, 0

        def counted(submission: Submission) -> None:
            nonlocal aborted
            aborted += 1
            abort(submission)

        call = Call(endpoint="other", streaming=True, received=0.0)
        group = GenerationGroup(world.context, call, [request()] * NUMBER, ["one"] * NUMBER, Reader())
        await world.engine.submits(NUMBER)
        monkeypatch.setattr(client, "abort", counted)
        with most_in_a_turn(lambda: aborted) as ended:
            ways = {"its reader leaves": group.close, "it is aborted": group.abort, "all are aborted": live.abort_all}
            ways.get(way, lambda: live.abort("one"))()
            assert len({await world.engine.aborted() for _ in range(NUMBER)}) == NUMBER
        assert ended == [1]

    play(scenario)


@pytest.mark.usefixtures("shortest_turns")
def test_a_sequence_that_is_refused_in_a_later_turn_ends_all(play: generating.Play) -> None:
    async def scenario(world: World) -> None:
        world.engine.client.max_open = 3
        _, reader = world.start(*[request()] * 5)
        error = await reader.ended
        assert error is not None
        assert error.code == "queue_full"
        ids = {submit.id for submit in await world.engine.submits(3)}
        assert {await world.engine.aborted() for _ in range(3)} == ids

    play(scenario)


def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What is written from here on, call by call: tokens themselves ("own") or the likeliest in their places, and how many."""
    found: list[tuple[str, int]] = []

    def note(name: str) -> None:
        write: Callable[[NativeLogprobs, Cells], bytes] = getattr(NativeLogprobs, name)

        def noted(form: NativeLogprobs, cells: Cells) -> bytes:
            found.append((name, len(cells.ids)))
            return write(form, cells)

        monkeypatch.setattr(NativeLogprobs, name, noted)

    note("own")
    note("tops")
    return found


def test_a_long_list_is_written_in_turns(play_http: answering.Play, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(front: Front, engine: FakeEngine, address: tuple[str, int]) -> None:
        requests = [answering.request(logprobs=answering.SCORED)] * NUMBER
        connection = await ask(front, address, native(*requests, listed=True, top_logprobs=(1,) * NUMBER))
        ids = [submit.id for submit in await engine.submits(NUMBER)]
        found = written(monkeypatch)
        monkeypatch.setattr(turns, "TURN_S", 0.0)
        with most_in_a_turn(lambda: len(found)) as most:
            await engine.step({one: [A] for one in ids}, *map(finish, ids), **told(*[(A, -0.5, A)] * NUMBER))
            assert len(await connection.json()) == NUMBER
        assert (len(found), most) == (2 * NUMBER, [1])

    play_http(scenario)


def test_a_whole_answer_is_written_while_its_client_takes_it(play_http: answering.Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """The likeliest tokens stand behind all the tokens themselves, and are not written before these are on their way."""

    async def scenario(front: Front, engine: FakeEngine, address: tuple[str, int]) -> None:
        number = 20_000
        connection = await ask(front, address, native(answering.request(logprobs=answering.SCORED), top_logprobs=(1,)))
        found = written(monkeypatch)
        one = await engine.submitted()
        await engine.step({one: [A] * number}, finish(one), **told(*[(A, -0.5, A)] * number))
        await connection.head()
        while await connection.chunk():
            pass
        names = [name for name, _ in found]
        assert names == sorted(names)
        assert [sum(tokens for name, tokens in found if name == each) for each in ("own", "tops")] == [number, number]

    play_http(scenario)


def test_prompts_that_are_echoed_are_written_in_turns(play_http: answering.Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "TURN_S", 0.0)

    async def scenario(front: Front, engine: FakeEngine, address: tuple[str, int]) -> None:
        plan = completion(*[answering.request()] * NUMBER, stream=True, echoes=("hello",) * NUMBER)
        connection = await ask(front, address, plan)
        ids = [submit.id for submit in await engine.submits(NUMBER)]
        await connection.head()
        await engine.step({one: [A] for one in ids}, *map(finish, ids))
        chunks = []
        while chunk := await connection.chunk():
            chunks.append(chunk)
        assert sum(chunk.count("hello") for chunk in chunks) == NUMBER
        assert max(chunk.count("hello") for chunk in chunks) == 1

    play_http(scenario)


@pytest.mark.long  # computing time is measured
def test_long_stop_strings_cost_no_more_than_the_text_is_long() -> None:
    """32 of a thousand characters took 5 ms for each further character of a text that might become one of them."""
    stops = ["a" * 1000, *(f"{number:02}" + "b" * 998 for number in range(31))]
    matcher = StopMatcher(stops, include=False)
    start = time.thread_time()
    for _ in range(999):
        assert matcher.feed("a") == ""
    assert time.thread_time() - start < 0.5  # 0.03 s
    assert (matcher.feed("a"), matcher.matched) == ("", stops[0])

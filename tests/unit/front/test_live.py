"""What an abort reaches: everything that came before it, however far it has got."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from banyan_runtime import wire
from banyan_runtime.front import live, turns
from banyan_runtime.front.current import begin
from banyan_runtime.front.generation import Call
from banyan_runtime.front.generation_group import GenerationGroup
from banyan_runtime.front.live import LiveRequests
from banyan_runtime.front.text.tokenizer import Tokenizer
from tests.unit.front.generating import Play, Reader, World, player, request
from tests.unit.front.support import finish


def abort_one(requests: LiveRequests) -> None:
    requests.abort("one")


WAYS = [abort_one, LiveRequests.abort_all]


@pytest.fixture
def play(tmp_path: Path, bytes_tokenizer: Tokenizer) -> Play:
    return player(tmp_path, bytes_tokenizer)


class Sequence:
    aborted = False

    def abort(self) -> None:
        self.aborted = True


def began(requests: LiveRequests, request_id: str, received: float) -> Sequence:
    sequence = Sequence()
    requests.add(request_id, sequence, received)
    return sequence


@pytest.mark.parametrize("abort", WAYS)
def test_an_abort_reaches_what_came_before_it_and_runs_later(abort: Callable[[LiveRequests], None]) -> None:
    async def scenario() -> None:
        requests = LiveRequests()
        came = time.monotonic()
        abort(requests)
        assert began(requests, "one", came).aborted
        assert began(requests, "one", came).aborted  # another choice of the same request
        assert not began(requests, "one", time.monotonic() + 0.001).aborted
        assert began(requests, "two", came).aborted == (abort is LiveRequests.abort_all)

    asyncio.run(scenario())


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(("by", "reached"), [("ada", ["ada"]), ("", ["anybody"]), (None, ["ada", "bob", "anybody", "admin"]), ("eve", [])])
def test_an_abort_reaches_what_belongs_to_who_asks(by: str | None, reached: list[str], later: bool) -> None:
    owners = {"ada": "ada", "bob": "bob", "anybody": "", "admin": None}

    async def scenario() -> None:
        requests, came = LiveRequests(), time.monotonic()
        if later:
            requests.abort("one", by)
        began_by: dict[str, Sequence] = {}
        for name, owner in owners.items():
            begin().owner = owner
            began_by[name] = began(requests, "one", came)
        if not later:
            requests.abort("one", by)
        assert [name for name, sequence in began_by.items() if sequence.aborted] == reached

    asyncio.run(scenario())


def test_of_very_many_aborted_ids_the_newest_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(live, "REMEMBERED", 3)
        requests = LiveRequests()
        came = time.monotonic()
        for request_id in ["a", "b", "c", "a", "d"]:
            requests.abort(request_id)
        assert [began(requests, request_id, came).aborted for request_id in "abcd"] == [True, False, True, True]

    asyncio.run(scenario())


@pytest.mark.parametrize("abort", WAYS)
def test_an_abort_reaches_the_sequences_of_a_request_that_are_not_submitted_yet(
    play: Play, monkeypatch: pytest.MonkeyPatch, abort: Callable[[LiveRequests], None]
) -> None:
    async def scenario(world: World) -> None:
        monkeypatch.setattr(turns, "TURN_S", 0.0)
        reader = Reader()
        call = Call(endpoint="other", streaming=True, received=time.monotonic())
        GenerationGroup(world.context, call, [request()] * 20, ["one"] * 20, reader)
        assert len(world.context.live) < 20
        abort(world.context.live)
        submitted: set[int] = set()
        ended: set[int] = set()
        while len(ended) < 20:
            message = await world.engine.next()
            assert isinstance(message, wire.Submit | wire.Abort)
            (submitted if isinstance(message, wire.Submit) else ended).add(message.id)
        assert ended == submitted
        await world.engine.step(None, *(finish(one, wire.FinishCode.ABORT) for one in ended))
        assert await reader.ended is None

    play(scenario)


class Others:
    """The claims of other processes."""

    def __init__(self, *theirs: str) -> None:
        self.theirs = set(theirs)
        self.ours: list[str] = []

    def take(self, request_id: str) -> bool:
        if request_id in self.theirs:
            return False
        self.ours.append(request_id)
        return True

    def leave(self, request_id: str) -> None:
        self.ours.remove(request_id)


def test_an_id_is_claimed_until_its_last_sequence_is_removed() -> None:
    requests = LiveRequests()
    requests.claims = others = Others()
    one, two = Sequence(), Sequence()
    with requests.starting():
        assert requests.claim("id")
        assert not requests.claim("id")  # another request of the same moment
        requests.add("id", one, 0.0)
        requests.add("id", two, 0.0)
    requests.remove("id", one)
    requests.leave("id")
    assert not requests.claim("id")
    assert others.ours == ["id"]
    requests.remove("id", two)
    assert others.ours == []
    requests.remove("id", two)  # as closing twice does


def test_what_a_request_has_claimed_that_cannot_start_is_free_again() -> None:
    requests = LiveRequests()
    requests.claims = others = Others("taken")
    running = Sequence()
    with requests.starting():
        assert requests.claim("running")
        requests.add("running", running, 0.0)

    def fails() -> None:
        with requests.starting():
            said.extend(map(requests.claim, ["first", "taken", "running"]))
            raise ValueError

    said: list[bool] = []
    with pytest.raises(ValueError):
        fails()
    assert said == [True, False, False]
    assert others.ours == ["running"]
    with requests.starting():
        assert requests.claim("first")


def test_of_many_sequences_that_never_came_to_run_the_ids_are_free_again(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long list is submitted in turns; its client may go before the last."""
    monkeypatch.setattr(turns, "TURN_S", 0.0)

    async def through(world: World) -> None:
        live = world.context.live
        live.claims = others = Others()
        ids = [f"a{index}" for index in range(6)]
        with live.starting():
            assert all(map(live.claim, ids))
            call = Call(endpoint="other", streaming=False, received=time.monotonic())
            group = GenerationGroup(world.context, call, [request()] * 6, ids, Reader())
        assert len(live) < len(ids)
        group.close()
        async with asyncio.timeout(10):
            while others.ours:  # noqa: ASYNC110  nothing tells of it
                await asyncio.sleep(0)

    play(through)

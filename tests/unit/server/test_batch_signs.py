"""When a batch host that says nothing is ended, and when it is not."""

from __future__ import annotations

import asyncio
import os

import msgspec
import pytest

from banyan_runtime.batch.host import tally as tallying
from banyan_runtime.batch.host.tally import News, Tally
from banyan_runtime.server.signs import HUNG_LOOKS, LOOK_EVERY_S, OPENING_LOOKS, STALLED_LOOKS, Signs


class Looks:
    """Looks at a host, each a little after it is due."""

    def __init__(self, *, opened: bool = True) -> None:
        self.signs = Signs(100.0)
        self.now = 100.0
        self.cpu_s = 1.0
        if opened:
            self.signs.heard()
            assert not self.look()

    def look(self, *, after_s: float = LOOK_EVERY_S + 0.1, computes: float = 0.0) -> bool:
        self.now += after_s
        self.cpu_s += computes
        return self.signs.look(self.now, self.cpu_s)

    def until_ended(self, **each: float) -> int:
        return next(count for count in range(1, 1000) if self.look(**each))


def test_a_host_that_says_and_computes_nothing_is_ended_after_a_few_looks() -> None:
    looks = Looks()
    assert looks.until_ended() == STALLED_LOOKS
    assert looks.signs.silent


def test_a_host_that_computes_has_more_time_to_say_something() -> None:
    looks = Looks()
    assert looks.until_ended(computes=0.01) == HUNG_LOOKS


def test_who_asks_a_host_that_computes_and_says_nothing_is_not_kept_waiting() -> None:
    looks = Looks()
    told = [looks.look(computes=0.5) or (looks.signs.silent, looks.signs.newly_silent) for _ in range(STALLED_LOOKS + 1)]
    assert told == [(False, False)] * (STALLED_LOOKS - 1) + [(True, True), (True, False)]
    looks.signs.heard()
    assert not looks.signs.silent


def test_a_word_now_and_then_is_enough() -> None:
    looks = Looks()
    for _ in range(100):
        assert not any(looks.look() for _ in range(STALLED_LOOKS - 1))
        looks.signs.heard()
        assert not looks.look()


def test_a_host_that_has_not_begun_to_listen_may_wait_for_its_storage() -> None:
    looks = Looks(opened=False)
    assert looks.until_ended() == OPENING_LOOKS
    assert not looks.signs.silent


def test_after_a_pause_of_the_process_that_looks_the_host_has_all_of_its_time_again() -> None:
    looks = Looks()
    assert not any(looks.look() for _ in range(STALLED_LOOKS - 1))
    assert not looks.look(after_s=3600.0)
    assert looks.until_ended() == STALLED_LOOKS


def test_a_process_that_is_always_late_ends_nobody() -> None:
    looks = Looks()
    assert not any(looks.look(after_s=2 * LOOK_EVERY_S + 0.1) for _ in range(1000))


def test_a_host_without_news_still_says_that_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tallying, "TELL_S", 0.01)
    reader, writer = os.pipe()

    async def tell() -> None:
        telling = asyncio.create_task(Tally().tell(writer))
        await asyncio.sleep(0.2)
        telling.cancel()
        await asyncio.wait([telling])

    asyncio.run(tell())
    os.close(writer)
    with open(reader, "rb") as said:
        lines = said.read().splitlines()
    assert len(lines) >= 3
    assert {msgspec.json.decode(line, type=News) == News() for line in lines} == {True}
    assert max(map(len, lines)) < 10, "it is said all day"

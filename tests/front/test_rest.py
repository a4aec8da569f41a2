"""How long the engine is not heard behind a telling: what is decided, by clocks that the test moves."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from banyan_runtime.front.rest import LONGEST_S, Rest


class Loop:
    """A thread's two clocks, and who asks a rest how long it lasts as an event loop would."""

    def __init__(self) -> None:
        self.now = self.worked = 1000.0
        self.rest = Rest(lambda: self.now, lambda: self.worked)

    def passes(self, seconds: float, worked: float) -> None:
        """So many go by, in which the thread computes for `worked`."""
        self.now += seconds
        self.worked += worked

    def rests(self, spent: float, *, busy: float = 0.0, share: float = 1.0, late: float = 0.0) -> float:
        """How long it is until the engine is heard again, behind a telling of `spent` seconds, in a loop that is busy for the first
        `busy` seconds, for `share` of the time, and whose timers are `late`."""
        began, wait = self.now, self.rest.begin(spent)
        while wait:
            wait += late
            self.passes(wait, share * max(0.0, min(wait, began + busy - self.now)))
            wait = self.rest.more()
        return self.now - began


def near(seconds: float) -> object:
    return pytest.approx(seconds, abs=1e-9)


def test_behind_a_short_telling_there_is_no_rest_however_busy_the_loop_is() -> None:
    assert Loop().rests(0.0004, busy=1.0) == 0.0


@pytest.mark.parametrize("spent", [0.0005, 0.003, 0.019])
def test_a_loop_with_idle_time_rests_as_long_as_telling_took(spent: float) -> None:
    assert Loop().rests(spent) == near(spent)
    assert Loop().rests(spent, busy=0.7 * spent) == near(spent)
    assert Loop().rests(spent, busy=1.0, share=0.7) == near(spent), "idle time between the pieces of work counts as well"


def test_a_busy_loop_rests_until_it_has_idle_time() -> None:
    assert 0.010 <= Loop().rests(0.003, busy=0.010) <= 0.012
    assert 0.010 <= Loop().rests(0.003, busy=0.010, share=0.9) <= 0.012


@pytest.mark.parametrize("spent", [0.0005, 0.003, 0.019, 0.02, 0.5])
def test_no_rest_is_longer_than_the_longest(spent: float) -> None:
    assert LONGEST_S - 0.001 <= Loop().rests(spent, busy=1.0) <= LONGEST_S + 1e-9


def test_time_by_which_timers_are_late_counts() -> None:
    assert LONGEST_S <= Loop().rests(0.003, busy=1.0, late=0.004) < LONGEST_S + 0.004
    assert Loop().rests(0.003, busy=1.0, late=0.030) == near(0.033), "the first look is the last"


def test_a_thread_that_is_given_no_processor_rests_no_longer_than_an_idle_one() -> None:
    assert Loop().rests(0.003, busy=1.0, share=0.1) == near(0.003)


def test_by_the_clocks_of_this_thread_work_is_told_from_sleep() -> None:
    rest = Rest()

    def more(pass_time: Callable[[], None]) -> float:
        rest.begin(0.001)
        pass_time()
        return rest.more()

    def work() -> None:
        end = time.perf_counter() + 0.001
        while time.perf_counter() < end:
            pass

    assert more(lambda: time.sleep(0.001)) == 0.0
    assert any(more(work) > 0.0 for _ in range(1000)), "others have the processor now and then"


def test_each_rest_is_judged_by_its_own_time() -> None:
    loop = Loop()
    assert loop.rests(0.003, busy=1.0) >= LONGEST_S - 0.001
    loop.passes(1.0, 1.0)
    assert loop.rests(0.003) == near(0.003)
    loop.passes(1.0, 0.0)
    assert loop.rests(0.003, busy=1.0) >= LONGEST_S - 0.001

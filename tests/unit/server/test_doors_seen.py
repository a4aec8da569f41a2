"""What the first process concludes from what its doors say, and from their silence."""

from __future__ import annotations

from banyan_runtime.front.metrics import Elsewhere
from banyan_runtime.server.doors.messages import Report
from banyan_runtime.server.doors.seen import HUNG_S, LATE_S, OPEN_S, Seen, least_busy


def report(seq: int, connections: int = 0, under_way: int = 0, *, sought: bool = False) -> Report:
    return Report(seq, connections, under_way, sought, 0, Elsewhere(), [])


def opened() -> Seen:
    seen = Seen(0.0)
    seen.open = True
    return seen


def test_the_door_with_the_fewest_connections_gets_the_next_one() -> None:
    one, other = opened(), opened()
    one.reported(report(1, connections=5), 1.0)
    other.reported(report(1, connections=3), 1.0)
    for _ in range(2):
        assert least_busy((one, other), 2.0) is other
        other.given(2.0)
    assert (one.load, other.load) == (5, 5)
    other.taken(4)
    other.reported(report(2, connections=4), 2.1)  # which crosses one that it is still to take
    assert other.load == 5
    other.taken(5)
    assert other.load == 5


def test_a_door_that_says_nothing_of_what_it_was_given_gets_no_more_until_it_does() -> None:
    still, other = opened(), opened()
    other.reported(report(1, connections=50), 1.0)
    still.given(1.0)
    assert least_busy((still, other), 1.0 + LATE_S) is still
    assert least_busy((still, other), 1.1 + LATE_S) is other
    assert least_busy((still,), 1.1 + LATE_S) is None
    still.taken(1)
    assert least_busy((still, other), 1.1 + LATE_S) is still


def test_a_door_that_is_not_open_or_can_prepare_nothing_gets_none() -> None:
    closed, lacking = Seen(0.0), opened()
    lacking.lack = "no process can be started"
    assert least_busy((closed, lacking), 1.0) is None
    lacking.lack = ""
    assert least_busy((closed, lacking), 1.0) is lacking


def test_a_drain_waits_for_who_has_not_answered_since() -> None:
    door = opened()
    door.reported(report(4), 1.0)
    assert (door.under_way(4), door.sought(4)) == (0, False)
    assert (door.under_way(5), door.sought(5)) == (1, True)
    door.reported(report(5, under_way=3, sought=True), 1.1)
    assert (door.under_way(5), door.sought(5)) == (3, True)
    door.reported(report(6), 1.2)
    door.given(1.2)
    assert (door.under_way(6), door.sought(6)) == (1, True)


def test_a_silent_door_is_ended_at_the_second_look_and_a_pause_of_our_own_ends_none() -> None:
    door = opened()
    door.reported(report(1), 10.0)
    assert not door.look(10.0 + HUNG_S)
    assert not door.look(11.0 + HUNG_S)
    assert door.hung
    assert door.look(13.0 + HUNG_S)
    door.reported(report(2), 13.5 + HUNG_S)
    assert not door.look(14.0 + HUNG_S)
    assert not door.hung
    starting = Seen(0.0)
    assert not starting.look(OPEN_S - 1)
    assert not starting.hung
    assert not starting.look(OPEN_S + 1)
    assert starting.look(OPEN_S + 3)

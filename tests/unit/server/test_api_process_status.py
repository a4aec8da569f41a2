"""What the first process concludes from what another one says, and from its silence."""

from __future__ import annotations

from banyan_runtime.front.metrics import Elsewhere
from banyan_runtime.server.api_processes.manager import HUNG_S, OPEN_S, Status
from banyan_runtime.server.api_processes.messages import Report


def report(seq: int, under_way: int = 0, *, sought: bool = False) -> Report:
    return Report(seq, under_way, sought, 0, Elsewhere(), [])


def opened() -> Status:
    status = Status(0.0)
    status.open = True
    return status


def test_a_drain_waits_for_who_has_not_answered_since() -> None:
    process = opened()
    process.reported(report(4), 1.0)
    assert (process.under_way(4), process.sought(4)) == (0, False)
    assert (process.under_way(5), process.sought(5)) == (1, True)
    process.reported(report(5, under_way=3, sought=True), 1.1)
    assert (process.under_way(5), process.sought(5)) == (3, True)


def test_a_silent_process_is_ended_at_the_second_look_and_a_pause_of_our_own_ends_none() -> None:
    process = opened()
    process.reported(report(1), 10.0)
    assert not process.look(10.0 + HUNG_S)
    assert not process.look(11.0 + HUNG_S)
    assert process.hung
    assert process.look(13.0 + HUNG_S)
    process.reported(report(2), 13.5 + HUNG_S)
    assert not process.look(14.0 + HUNG_S)
    assert not process.hung
    starting = Status(0.0)
    assert not starting.look(OPEN_S - 1)
    assert not starting.hung
    assert not starting.look(OPEN_S + 1)
    assert starting.look(OPEN_S + 3)

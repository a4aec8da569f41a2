"""Background work (a priority below 0) beside online requests."""

from __future__ import annotations

from itertools import groupby

import numpy as np
import pytest

from banyan_runtime.engine.limits import BackgroundLimits
from banyan_runtime.step import Step
from banyan_runtime.wire import FinishCode
from tests.unit.engine import invariants
from tests.unit.engine.cost import lines_run
from tests.unit.engine.fake import FakeHandle
from tests.unit.engine.session import LOOPS, Session, limits

BATCH = -10


def flooded(count: int, *, max_new: int = 60, turns: int = 6, seconds: float = 0.01, **changes: object) -> Session:
    """So many background requests, which have had so many turns."""
    session = Session(limits(**({"pool_tokens": 4000, "chunk": 256} | changes)))
    for number in range(count):
        session.submit([number % 50, number // 50, 7], max_new, priority=BATCH)
    for _ in range(turns):
        session.turn(seconds)
    return session


class Watch:
    """What each step had: its phase, rows online, rows of background."""

    def __init__(self, session: Session) -> None:
        self.steps: list[tuple[str, int, int]] = []
        self._tables = session.engine.memory.tables
        session.runner.watch = self._step

    def _step(self, step: Step) -> None:
        behind = int(np.count_nonzero(self._tables.level[step.rows] < 0))
        self.steps.append((step.mode, len(step.rows) - behind, behind))


@LOOPS
def test_an_online_request_is_computed_in_the_step_after_its_arrival(overlap: bool) -> None:
    session = flooded(200, turns=2, overlap=overlap, max_running=256, chunk=64, pool_tokens=20_000)
    assert session.engine.scheduler.queue
    watch = Watch(session)
    online = session.submit([1, 2, 3], 5)
    while not session.outputs[online]:
        session.turn()
    # nothing of background is in the step, though there is room for it
    assert watch.steps[0] == ("prefill", 1, 0)
    session.drain()
    session.check_texts()
    invariants.check(session.engine)


@LOOPS
@pytest.mark.parametrize("lacking", ["rows", "memory"])
def test_background_makes_way_for_many_at_once_newest_first(overlap: bool, lacking: str) -> None:
    scarce: dict[str, object] = {"max_running": 24} if lacking == "rows" else {"pool_tokens": 24 * 64, "max_running": 200}
    session = flooded(40, turns=8, overlap=overlap, conservativeness=1.0, **scarce)
    running = [id for id, request in session.engine.requests.items() if request.row >= 0]
    watch = Watch(session)
    online = [session.submit([number, 3, 3], 50) for number in range(12)]
    session.turn()
    if overlap:
        session.turn()  # rows of the step in flight are free when it is through
    assert all(session.engine.requests[id].row >= 0 for id in online), "all in one step"
    assert ("prefill", 12, 0) in watch.steps
    left = [id for id in running if session.engine.requests[id].row >= 0]
    assert left == running[: len(left)], "the newest went"
    session.drain()
    session.check_texts()
    invariants.check(session.engine)


@LOOPS
def test_few_rows_of_background_decode_beside_online_ones_and_the_others_keep_their_memory(overlap: bool) -> None:
    session = flooded(40, turns=10, overlap=overlap, max_running=64)
    held = [id for id, request in session.engine.requests.items() if request.row >= 0]
    before = {id: len(session.outputs[id]) for id in held}
    watch = Watch(session)
    online = session.submit([1, 2, 3], 30)
    while not session.ended(online):
        session.turn()
    beside = session.limits.background.rows_beside
    assert {row for phase, online_rows, row in watch.steps if phase == "decode" and online_rows} == {beside}
    assert sum(len(session.outputs[id]) - before[id] > 5 for id in held) == beside, "the first of them went on"
    assert all(not session.engine.requests[id].retractions for id in held if not session.ended(id))
    session.drain()
    session.check_texts()


def test_background_prompts_are_computed_after_so_many_online_decode_steps_and_only_for_rows_that_may_decode() -> None:
    session = flooded(4, max_new=20, max_running=64, background=BackgroundLimits(prefill_every=16, rows_beside=2))
    watch = Watch(session)
    online = session.submit([1, 2, 3], 400)
    for number in range(50):
        session.submit([number, 9], 4, priority=BATCH)
    while not session.ended(online):
        session.turn()
    phases = [(phase, sum(1 for _ in steps)) for phase, steps in groupby(phase for phase, _, _ in watch.steps)]
    assert phases[0] == ("prefill", 1)
    assert all(count == 1 for phase, count in phases if phase == "prefill")
    assert min(count for phase, count in phases[:-1] if phase == "decode") >= 16
    assert len(session.finishes) > 10, "it is not shut out"
    assert max(rows for _, _, rows in watch.steps[1:]) <= 2


@LOOPS
def test_a_long_background_prompt_stops_for_an_online_request_and_goes_on_where_it_was(overlap: bool) -> None:
    session = Session(limits(pool_tokens=9000, chunk=64, context_len=9000, overlap=overlap))
    long = session.submit([token % 50 for token in range(3000)], 5, priority=BATCH)
    for _ in range(10):
        session.turn()
    computed = session.prefilled
    online = session.submit([9] * 100, 5)
    while not session.ended(online):
        session.turn()
    assert session.prefilled - computed == 100, "nothing of the long prompt meanwhile"
    session.drain()
    assert session.prefilled <= 3000 + 100 + 64
    assert session.finishes[long].code is FinishCode.LENGTH
    session.check_texts()


def test_the_last_piece_of_a_background_prompt_waits_too_though_it_would_fit_in() -> None:
    session = Session(limits(pool_tokens=9000, chunk=64, context_len=9000))
    session.submit([token % 50 for token in range(5 * 64 + 20)], 5, priority=BATCH)
    for _ in range(5):
        session.turn()
    watch = Watch(session)
    online = session.submit([9] * 10, 5)
    while not session.ended(online):
        session.turn()
    assert watch.steps == [("prefill", 1, 0), *[("decode", 1, 0)] * 4]


def test_an_online_prompt_with_the_prefix_of_a_background_one_does_not_wait_for_it() -> None:
    session = Session(limits(pool_tokens=9000, chunk=64, context_len=9000))
    shared = [token % 50 for token in range(3000)]
    session.submit(shared, 5, priority=BATCH)
    for _ in range(10):
        session.turn()
    before = session.prefilled
    online = session.submit([*shared[:1000], 1], 3)
    while not session.ended(online):
        session.turn()
    assert session.prefilled - before == 1001 - 640, "what was computed of the prefix is used, the rest is its own"


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_no_age_lifts_background_above_online_requests(policy: str) -> None:
    session = Session(limits(max_running=1, ageing_batches=1, policy=policy))
    batch = session.submit([1], 3, priority=-1)
    session.turn()
    for number in range(300):
        session.submit([number % 50], 1)
        session.turn()
        assert session.engine.scheduler.queue.aged(session.engine.requests[batch]) == -1
    while len(session.finishes) < 300:
        session.turn()
    assert not session.ended(batch)
    session.drain()
    session.check_texts()


@LOOPS
def test_online_requests_come_in_the_same_order_with_and_without_background(overlap: bool) -> None:
    def first_tokens(background: int) -> list[int]:
        session = flooded(background, turns=40, seconds=0, overlap=overlap, max_running=8, pool_tokens=600)
        online = list[int]()
        for number in range(40):
            online.append(session.submit([number, 5] * 10, 6 + number % 9, priority=number % 3))
            for _ in range(3):
                session.turn(0)
        while session.engine.requests.keys() & set(online):
            session.turn(0)
        return [id - background for id in session.started if id in online]

    assert first_tokens(100) == first_tokens(0)


def test_without_online_requests_background_has_everything() -> None:
    session = flooded(100, max_running=64, pool_tokens=8000, turns=0)
    watch = Watch(session)
    session.drain()
    assert max(rows for _, _, rows in watch.steps) == 64
    assert all(online == 0 for _, online, _ in watch.steps)


def test_while_online_requests_come_now_and_then_steps_of_background_alone_are_short() -> None:
    session = Session(limits(pool_tokens=60_000, max_running=256, chunk=2048, context_len=60_000))
    seconds: list[tuple[float, float]] = []  # (when, how long)
    launch = session.runner.launch

    def timed(step: Step) -> FakeHandle:
        took = 0.05 + 0.004 * len(step.token_ids)
        seconds.append((session.now, took))
        session.now += took
        return launch(step)

    session.runner.launch = timed  # type: ignore[method-assign]
    for number in range(3000):
        session.submit([(number * token) % 47 for token in range(200)], 40, priority=BATCH)
    for _ in range(20):
        session.turn()
    assert 0.5 < max(took for _, took in seconds[3:]) < 1.2, "nobody online, nothing to be very short for"
    began = session.now
    while session.now < began + 60:
        session.submit([(number := number + 1) % 50, *range(20)], 2)
        until = session.now + 4
        while session.now < until:
            session.turn()
    settled = [took for when, took in seconds if when > began + 20]
    assert max(settled) < 0.05 + 0.004 * 64 + 0.01, "the fewest tokens that a chunk may have"
    decodes = sorted(took for took in settled if took < 0.2)
    longest = session.limits.background.step_s
    assert 0.7 * longest < decodes[len(decodes) // 2] < 1.1 * longest, "as many rows as there is time for"
    quiet = session.now + session.limits.background.lately_s
    while session.now < quiet + 10:
        session.turn()
    assert max(took for when, took in seconds if when > quiet) > 0.5, "and all of it again when nobody has come for a while"


@pytest.mark.parametrize("background_first", [True, False])
def test_background_and_online_requests_fill_queues_of_their_own(background_first: bool) -> None:
    session = Session(limits(max_queued=4, max_running=1))
    ids: dict[int, list[int]] = {}
    for priority in (BATCH, 0) if background_first else (0, BATCH):
        ids[priority] = [session.submit([number, 1], 3, priority=priority) for number in range(8)]
    session.drain()
    for priority in (BATCH, 0):
        assert [session.failures[id].code for id in ids[priority] if id in session.failures] == ["queue_full"] * 4
    for background in (False, True):
        left = session.engine.scheduler.queue.uninvited(background=background)
        assert (left.requests, left.tokens) == (0, 0)


def test_background_is_counted_apart_in_the_statistics() -> None:
    session = flooded(10, max_running=4)
    session.submit([1, 2], 30)
    session.turn(1.0)
    stats = session.stats[-1]
    assert (stats.running, stats.background_running) == (4, 3)
    assert (stats.waiting, stats.background_waiting) == (7, 7)


def test_cancelling_costs_the_same_for_each_request_however_many_there_are() -> None:
    def cost(count: int) -> float:
        session = flooded(count, max_running=64)
        ids = list(session.engine.requests)
        lines = lines_run(lambda: [session.abort(id) for id in ids])
        session.turn()
        assert all(session.finishes[id].code is FinishCode.ABORT for id in ids)
        return lines / count

    assert cost(5_000) <= 1.2 * cost(500)


def test_an_online_request_runs_at_once_behind_the_cancel_of_thousands() -> None:
    session = flooded(5_000, max_running=64, turns=20)
    watch = Watch(session)
    for id in list(session.engine.requests):
        session.abort(id)
    online = session.submit([1, 2, 3], 5)
    session.turn()
    assert session.outputs[online]
    assert watch.steps == [("prefill", 1, 0)]
    session.drain()
    invariants.check(session.engine)

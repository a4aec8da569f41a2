"""What went wrong in other engines, and must not here."""

from __future__ import annotations

import sys
from itertools import pairwise

import pytest

from banyan_runtime.engine.report import BROKEN_ROWS_EVERY_S
from banyan_runtime.wire import FinishCode
from tests.unit.engine import invariants
from tests.unit.engine.fake import NAN_SEED, continuation
from tests.unit.engine.replay import Replay
from tests.unit.engine.session import LOOPS, PAGES, Session, limits


@LOOPS
@PAGES
@pytest.mark.parametrize("after", range(6))
def test_an_abort_between_the_chunks_of_a_prompt_leaks_nothing(overlap: bool, page: int, after: int) -> None:
    session = Session(limits(overlap=overlap, page_size=page, chunk=16), lazy=True)
    victim = session.submit(list(range(50)) + list(range(30)))
    neighbour = session.submit([1, 2, 3])
    for _ in range(after):
        session.turn()
    session.abort(victim)
    invariants.check(session.engine)
    session.drain()
    invariants.check(session.engine)
    assert session.finishes[victim].code is FinishCode.ABORT
    assert len(session.outputs[neighbour]) == 8
    session.check_texts()


@LOOPS
def test_rows_of_short_requests_are_not_reused_under_a_running_step(overlap: bool) -> None:
    session = Session(limits(overlap=overlap, max_running=2, pool_tokens=64), lazy=True)
    for number in range(60):
        session.submit([number % 50, number % 7, 3], max_new=1 + number % 3)
    session.drain()
    session.check_texts()
    assert [len(session.outputs[id]) for id in session.sent] == [1 + number % 3 for number in range(60)]


@LOOPS
@PAGES
@pytest.mark.parametrize("radix", [True, pytest.param(False, marks=pytest.mark.long)], ids=["radix", "no-radix"])
@pytest.mark.parametrize("context", [100, pytest.param(128, marks=pytest.mark.long), 4096])
def test_what_is_promised_runs_to_its_end_and_one_token_more_is_refused_at_once(
    overlap: bool, page: int, radix: bool, context: int
) -> None:
    bounds = limits(overlap=overlap, page_size=page, pool_tokens=128, radix=radix, context_len=context, chunk=32)
    longest = bounds.max_model_len
    assert longest == min(context, 128)
    for prompt_len in (1, 2, 31, 32, 33, longest - 1, longest):
        session = Session(bounds)
        session.submit([7] * 20, max_new=3)
        session.drain()
        fits = session.submit([7] * prompt_len, max_new=longest - prompt_len)
        behind = session.submit([7] * prompt_len, max_new=longest - prompt_len)
        too_long = session.submit([7] * prompt_len, max_new=longest - prompt_len + 1)
        session.turn()
        assert session.failures[too_long].code == "context_length_exceeded"
        assert f" {longest} tokens" in session.failures[too_long].message
        assert ("KV" in session.failures[too_long].message) == (context > 128)
        session.drain()
        for id in (fits, behind):
            assert session.finishes[id].code is FinishCode.LENGTH
            assert prompt_len + len(session.outputs[id]) == longest
        session.check_texts()


@PAGES
def test_requests_that_together_want_the_whole_pool_all_run(page: int) -> None:
    for prompt_len in range(1, 120, 7):
        session = Session(limits(page_size=page, pool_tokens=128, chunk=16 * page))
        ids = [session.submit([number] * prompt_len, max_new=128 - prompt_len) for number in range(3)]
        session.drain()
        assert all(session.finishes[id].code is FinishCode.LENGTH for id in ids)
        session.check_texts()


def test_a_prompt_beyond_the_context_names_the_context() -> None:
    session = Session(limits(context_len=100))
    refused = session.submit([1] * 93)
    session.turn()
    assert session.failures[refused].code == "context_length_exceeded"
    assert " 100 tokens" in session.failures[refused].message


@LOOPS
def test_aborting_all_that_run_lets_the_queue_in(overlap: bool) -> None:
    session = Session(limits(overlap=overlap, pool_tokens=64))
    running = [session.submit([number] * 10, max_new=20) for number in range(2)]
    waiting = [session.submit([10 + number] * 10, max_new=30) for number in range(2)]
    for _ in range(3):
        session.turn()
    assert not session.outputs[waiting[0]]
    for id in running:
        session.abort(id)
    session.drain()
    assert all(len(session.outputs[id]) == 30 for id in waiting)
    session.check_texts()


@LOOPS
def test_when_the_pool_is_full_and_nobody_can_leave_the_request_fails_and_the_engine_lives(overlap: bool) -> None:
    session = Session(limits(pool_tokens=64, overlap=overlap))
    id = session.submit([1] * 10, max_new=40)
    session.turn()
    stolen = session.engine.memory.pages.take(30)  # nothing else can bring this about
    session.engine.memory.total -= 30
    session.drain()
    assert session.failures[id].code == "kv_exhausted"
    session.engine.memory.pages.give(stolen)
    session.engine.memory.total += 30
    again = session.submit([1] * 10, max_new=40)
    session.drain()
    assert len(session.outputs[again]) == 40
    invariants.check(session.engine)


def test_a_prompt_that_is_only_scored_does_not_fail_the_one_that_runs_beside_it() -> None:
    for turns in range(1, 30):
        session = Session(limits(pool_tokens=64, page_size=16, overlap=True, conservativeness=0.01), lazy=True)
        runs = session.submit([1] * 18, 28)
        for _ in range(turns):
            session.turn()
        session.submit([2] * 19, 0)
        session.drain()
        assert len(session.outputs[runs]) == 28
        session.check_texts()


@LOOPS
def test_a_victim_whose_text_and_full_length_exceed_the_pool_is_admitted_when_alone(overlap: bool) -> None:
    session = Session(limits(pool_tokens=64, conservativeness=0.05, overlap=overlap))
    ids = [session.submit([1] * 4, max_new=45)]
    session.turn()
    session.turn()
    ids.append(session.submit([2] * 4, max_new=45))
    session.drain()
    assert sum(session.finishes[id].retractions for id in ids) == 1
    assert all(len(session.outputs[id]) == 45 for id in ids)
    session.check_texts()


def test_a_chunk_in_the_way_of_the_last_running_request_is_put_off() -> None:
    session = Session(limits(pool_tokens=64, chunk=1, conservativeness=0.01))
    first = session.submit([1] * 4, max_new=40)
    while not session.outputs[first]:
        session.turn()
    second = session.submit([2] * 40, max_new=1)
    session.drain()
    assert (session.finishes[first].retractions, session.finishes[second].retractions) == (0, 1)
    assert len(session.outputs[first]) == 40
    assert len(session.outputs[second]) == 1
    session.check_texts()


@LOOPS
def test_a_long_prompt_lets_those_that_run_have_a_token_after_each_chunk(overlap: bool) -> None:
    session = Session(limits(pool_tokens=4000, max_running=40, chunk=64, overlap=overlap))
    running = [session.submit([number], max_new=60) for number in range(32)]
    session.turn()
    session.turn()
    session.submit([7] * 2000, max_new=1)
    start = len(session.runner.log)
    while not session.ended(running[0]):
        session.turn()
    kinds = [phase for phase, _, _ in session.runner.log[start:]]
    assert kinds.count("prefill") >= 30
    assert all(not (a == b == "prefill") for a, b in pairwise(kinds)), "never two chunks in a row"
    session.drain()


@LOOPS
def test_a_stream_of_arrivals_does_not_stop_those_that_run(overlap: bool) -> None:
    session = Session(limits(pool_tokens=4000, max_running=64, overlap=overlap))
    patient = session.submit([1, 2, 3], max_new=20)
    turns = 0
    while not session.ended(patient):
        session.submit([turns % 50, 5, 5], max_new=2)
        session.turn()
        turns += 1
    assert turns <= 2 * 20 + 3, "at most one prefill for each of its tokens"
    session.drain()


@pytest.mark.matrix(gate=1)
@pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])
def test_victims_of_retraction_wait_a_bounded_time_under_a_load_that_never_ends(overlap: bool) -> None:
    replay = Replay(limits(context_len=32_768, pool_tokens=20_480, max_running=200, chunk=8192, vocab_size=20_000, overlap=overlap))
    entered: dict[int, int] = {}
    for number in range(2000):
        if number == 32:
            replay.turn()  # the first ones are ahead of the others, so the pool fills up before anybody is done
        entered[replay.submit([1, 2, 3, 4, 5, *[10_000 + number] * 30])] = number
    replay.drain()
    order = sorted(replay.done, key=lambda id: replay.done[id][0])
    victims = [id for id in order if replay.done[id][1]]
    assert victims, "the pool was full"
    assert max(order.index(id) - entered[id] for id in victims) <= 2 * 137


def test_a_pool_for_a_little_less_than_the_demand_does_not_thrash() -> None:
    # 16 requests of 8 + 56 tokens want 1,024; the pool holds a tenth less
    session = Session(limits(pool_tokens=930, conservativeness=0.3))
    for number in range(400):
        session.submit([number % 50] * 8, max_new=56)
        session.turn()
    session.drain()
    decodes = sum(phase == "decode" for phase, _, _ in session.runner.log)
    retractions = sum(finish.retractions for finish in session.finishes.values())
    assert 0 < retractions < 10 * decodes / 1000
    session.check_texts()


@pytest.mark.long
def test_a_turn_does_not_walk_a_queue_of_fifty_thousand() -> None:
    calls = []
    for waiting in (1_000, 50_000):
        session = Session(limits(max_queued=100_000, max_running=4))
        for number in range(waiting):
            session.submit([number % 50, 1, 2], max_new=4)
        count = 0

        def profile(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += 1

        sys.setprofile(profile)
        for _ in range(20):
            session.engine.turn()
        sys.setprofile(None)
        calls.append(count)
    assert calls[1] <= calls[0] * 1.01


@LOOPS
@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_a_row_of_nan_fails_alone_and_its_neighbours_keep_their_text(overlap: bool, policy: str) -> None:
    session = Session(limits(overlap=overlap, policy=policy), lazy=True)
    good = [session.submit([number, 2, 3], max_new=30) for number in range(5)]
    bad = [session.submit([number, 4, 5], max_new=30, seed=NAN_SEED + number) for number in range(5)]
    session.drain()
    assert all(len(session.outputs[id]) == 30 for id in good)
    failed = [id for id in bad if id in session.failures]
    assert len(failed) >= 3
    for id in failed:
        assert session.failures[id].code == "internal_error"
        assert list(continuation(*session.sent[id])) == [*session.outputs[id], -1]
    session.check_texts()
    invariants.check(session.engine)
    told = [line for line in session.lines if "computed NaN" in line]
    assert len(told) == 1, "one line says it of all that fail in the same seconds"
    assert "#failed_reqs: 1." in told[0]
    session.now += BROKEN_ROWS_EVERY_S
    for number in range(5):
        session.submit([number, 4, 5], max_new=30, seed=NAN_SEED + number)
    session.drain()
    assert f"#failed_reqs: {len(failed)}." in [line for line in session.lines if "computed NaN" in line][1], "the others, and one more"


def test_every_request_beyond_the_queue_is_told_so() -> None:
    session = Session(limits(max_queued=4, max_running=2))
    ids = [session.submit([number % 50, 1], max_new=3) for number in range(100)]
    session.drain()
    assert all(session.ended(id) for id in ids)
    refused = [id for id in ids if id in session.failures]
    assert len(refused) == 96
    assert {session.failures[id].code for id in refused} == {"queue_full"}


@pytest.mark.parametrize("held", [False, True])
def test_prompts_that_wait_are_bounded_in_tokens_too_and_one_alone_may_be_longer(held: bool) -> None:
    session = Session(limits(max_queued_tokens=100, max_running=1))
    first = session.submit([1] * 300, max_new=3, held=held)
    assert [session.submit([number, *[2] * 49], max_new=3) for number in range(4)] == [2, 3, 4, 5]
    session.turn()
    assert {id: failure.code for id, failure in session.failures.items()} == dict.fromkeys((2, 3, 4, 5), "queue_full")
    if held:
        session.proceed(first)
    session.turn()  # it is admitted: it waits no more
    accepted = [session.submit([number, *[3] * 49], max_new=3) for number in range(3)]
    background = session.submit([1] * 50, max_new=3, priority=-1)
    session.drain()
    assert set(session.failures) == {2, 3, 4, 5, accepted[2]}
    assert all(session.ended(id) for id in (first, *accepted, background))
    for of_background in (False, True):
        left = session.engine.scheduler.queue.uninvited(background=of_background)
        assert (left.requests, left.tokens) == (0, 0)
    assert session.stats[-1].queued_tokens == 0


def test_a_thousand_invalid_requests_leave_nothing_behind() -> None:
    session = Session(limits())
    for _ in range(500):
        session.submit([1] * 600)
        session.submit([50])
    session.drain()
    assert len(session.failures) == 1000
    assert {failure.code for failure in session.failures.values()} == {"context_length_exceeded", "invalid_value"}
    assert not session.engine.requests
    assert not session.engine.scheduler.queue


def test_memory_of_the_prefix_cache_is_bounded_by_the_pool() -> None:
    session = Session(limits(pool_tokens=256))
    for number in range(1000):
        session.submit([number % 50, number % 47, number % 43, 1], max_new=3, salt=f"tenant {number}")
        session.drain()
    tree = session.engine.memory.prefixes
    assert tree.evictable <= 256
    assert sum(1 for _ in tree.nodes()) <= 256
    assert tree.salts <= 256 // 6 + 1


def test_lost_memory_is_said_and_repaired_when_the_engine_is_idle() -> None:
    session = Session(limits(pool_tokens=64))
    first = session.submit([1, 2, 3])
    session.turn()
    session.engine.memory.pages.take(5)
    session.drain()
    assert len(session.outputs[first]) == 8
    assert sum("off balance by 5 tokens" in line for line in session.lines) == 1
    assert session.engine.memory.pages.free_tokens == 64
    invariants.check(session.engine)
    session.submit([1, 2, 3])
    session.drain()
    session.check_texts()

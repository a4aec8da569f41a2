"""How a request ends, what memory it is given and taken, and what is told of it."""

from __future__ import annotations

from itertools import islice

import pytest

from banyan_runtime.wire import (
    Abort,
    EngineMessage,
    FinishCode,
    FrontMessage,
    LogprobRequest,
    Ping,
    Pong,
    Sampling,
    Shutdown,
    Stats,
    StepOutput,
    Submit,
    pack_ids,
)
from tests.unit.engine import invariants
from tests.unit.engine.cost import lines_run
from tests.unit.engine.fake import continuation
from tests.unit.engine.replay import Replay
from tests.unit.engine.session import LOOPS, PAGES, Session, limits


def text_after(prompt: list[int], count: int, **sampling: int) -> list[int]:
    session = Session(limits())
    session.submit(prompt, count, **sampling)
    return list(islice(continuation(*session.sent[1]), count))


# --- how a request ends ---


@LOOPS
def test_a_request_ends_at_its_length_or_at_a_stop_id_whichever_comes_first(overlap: bool) -> None:
    text = text_after([1, 2, 3], 30)
    stop = next(token for token in text[5:] if token not in text[:5])
    session = Session(limits(overlap=overlap))
    by_length = session.submit([1, 2, 3], 5, stop_token_ids=(stop,))
    by_stop = session.submit([1, 2, 3], 30, stop_token_ids=(stop,))
    session.drain()
    assert session.finishes[by_length].code is FinishCode.LENGTH
    assert session.outputs[by_length] == text[:5]
    assert session.finishes[by_stop].code is FinishCode.STOP
    assert session.outputs[by_stop] == text[: text.index(stop) + 1]


def test_a_stop_id_as_the_last_allowed_token_is_a_stop() -> None:
    text = text_after([1, 2, 3], 4)
    session = Session(limits())
    id = session.submit([1, 2, 3], text.index(text[3]) + 1, stop_token_ids=(text[3],))
    session.drain()
    assert session.finishes[id].code is FinishCode.STOP


def test_any_of_many_stop_ids_ends_a_request() -> None:
    text = text_after([1, 2, 3], 10)
    others = [token for token in range(50) if token not in text]
    session = Session(limits())
    id = session.submit([1, 2, 3], 10, stop_token_ids=(*others, text[9]))
    session.drain()
    assert session.finishes[id].code is FinishCode.STOP
    assert session.outputs[id] == text[: text.index(text[9]) + 1]


@LOOPS
def test_stop_ids_are_banned_until_the_shortest_allowed_length(overlap: bool) -> None:
    session = Session(limits(overlap=overlap))
    everything = tuple(range(0, 50, 2))
    id = session.submit([1, 2, 3], 30, stop_token_ids=everything, min_new_tokens=10)
    session.drain()
    assert len(session.outputs[id]) > 10
    assert all(token % 2 for token in session.outputs[id][:10])
    session.check_texts()


@LOOPS
def test_penalties_see_every_token_so_far(overlap: bool) -> None:
    session = Session(limits(overlap=overlap, pool_tokens=120))
    for number in range(6):
        session.submit([number] * 10, 30, presence_penalty=0.5 if number % 2 else 0.0)
    session.drain()
    session.check_texts()


@LOOPS
@pytest.mark.parametrize("turns", [0, 1, 2, 5])
def test_an_aborted_request_ends_at_once_in_any_phase(overlap: bool, turns: int) -> None:
    session = Session(limits(overlap=overlap))
    id = session.submit([1, 2, 3], 100)
    for _ in range(turns):
        session.turn()
    session.abort(id)
    session.turn()
    assert session.finishes[id].code is FinishCode.ABORT
    session.drain()
    session.check_texts()
    invariants.check(session.engine)


def test_an_unknown_id_is_not_worth_an_abort() -> None:
    session = Session(limits())
    session.engine.handle(Abort(id=77))
    assert not session.engine.has_work


def test_an_id_can_be_used_again_after_its_end() -> None:
    session = Session(limits())
    first = session.submit([1, 2, 3], 9)
    session.drain()
    text = session.outputs.pop(first)
    del session.sent[first], session.finishes[first]
    assert session.submit([1, 2, 3], 9) == first
    session.drain()
    assert session.outputs[first] == text


@LOOPS
def test_penalties_do_not_keep_steps_from_overlapping(overlap: bool) -> None:
    session = Session(limits(overlap=overlap), lazy=True)
    launched_early = []
    launch = session.runner.launch
    session.runner.launch = lambda step: (launched_early.append(bool((step.token_ids < 0).any())), launch(step))[1]  # type: ignore[method-assign]
    session.submit([1, 2, 3], 10, repetition_penalty=1.1)
    session.drain()
    assert any(launched_early) == overlap
    session.check_texts()


def test_a_history_is_given_once_an_admission() -> None:
    session = Session(limits(pool_tokens=64, conservativeness=0.05))
    given = []
    launch = session.runner.launch
    session.runner.launch = lambda step: (given.append(0 if step.histories is None else len(step.histories.rows)), launch(step))[1]  # type: ignore[method-assign]
    ids = []
    for number in range(3):
        ids.append(session.submit([number] * 4, 30, presence_penalty=0.5))
        session.turn()
    session.drain()
    retractions = sum(session.finishes[id].retractions for id in ids)
    assert retractions > 0
    assert sum(given) == 3 + retractions
    session.check_texts()


# --- memory ---


@LOOPS
@PAGES
@pytest.mark.parametrize("radix", [True, False], ids=["radix", "no-radix"])
def test_a_retracted_request_continues_with_the_same_text(overlap: bool, page: int, radix: bool) -> None:
    session = Session(limits(overlap=overlap, page_size=page, pool_tokens=256, radix=radix, conservativeness=0.05))
    ids = []
    for number in range(12):
        ids.append(session.submit([number] * 5, 60))
        session.turn(0)
    session.drain()
    assert any(session.finishes[id].retractions for id in ids)
    assert any(line.startswith("KV cache pool is full. Retract requests. #retracted_reqs: ") for line in session.lines)
    assert all(len(session.outputs[id]) == 60 for id in ids)
    session.check_texts()
    invariants.check(session.engine)


def test_a_snapshot_tells_how_many_of_those_that_wait_have_run_before() -> None:
    session = Session(limits(pool_tokens=256, conservativeness=0.05))
    most = 0
    for number in range(1000):
        if number < 12:
            session.submit([number] * 5, 60)
        session.turn()
        stats, waiting = session.engine.stats(session.now), session.engine.scheduler.queue
        assert stats.retracted == sum(session.engine.requests[id].retractions > 0 for id in waiting.victims) <= stats.waiting
        most = max(most, stats.retracted)
    assert most > 0
    assert stats.retracted == 0


def test_with_overlap_a_step_is_launched_before_the_one_before_it_is_read() -> None:
    session = Session(limits(overlap=True), lazy=True)
    unknown = []
    launch = session.runner.launch
    session.runner.launch = lambda step: (unknown.append(bool((step.token_ids < 0).any())), launch(step))[1]  # type: ignore[method-assign]
    session.submit([1, 2, 3], 10)
    session.drain()
    assert unknown == [False, *[True] * 10], "one decode step more than needed, since the end is seen a step later"
    session.check_texts()


def test_a_step_more_than_the_last_is_not_counted_as_output() -> None:
    session = Session(limits(overlap=True))
    session.submit([1, 2, 3], 10)
    session.drain()
    assert session.stats[-1].generation_tokens == 10


@LOOPS
@PAGES
@pytest.mark.parametrize("asking", [False, True], ids=["plain", "penalties and log probabilities"])
def test_a_decode_step_runs_no_python_per_row_and_none_per_token_of_context(overlap: bool, page: int, asking: bool) -> None:
    costs = []
    for rows, prompt in ((16, 32), (256, 32), (16, 2048)):
        replay = Replay(limits(pool_tokens=1 << 17, max_running=256, page_size=page, overlap=overlap, vocab_size=1000))
        for number in range(rows):
            wishes = {"penalty": 1.1, "logprobs": LogprobRequest(output_top=5)} if number % 2 and asking else {}
            replay.submit([number] * prompt, max_new=100, **wishes)  # type: ignore[arg-type]
        for _ in range(20):
            replay.turn()
        costs.append(lines_run(replay.engine.turn))
    assert len(set(costs)) == 1


# --- what is told ---


def test_the_loop_answers_pings_at_once_serves_and_ends_with_shutdown() -> None:
    session = Session(limits())
    sampling = Sampling(max_new_tokens=3)
    script = iter([[Ping(seq=9)], [Submit(id=1, token_ids=pack_ids([1, 2]), sampling=sampling), Ping(seq=10)], []])
    waits, sent = list[bool](), list[EngineMessage]()

    def receive(wait: bool) -> list[FrontMessage]:
        waits.append(wait)
        return next(script, [Shutdown()] if wait else [])

    session.engine.run(receive, sent.append)
    assert waits == [True, True, False, False, True]
    kinds = [type(message) for message in sent]
    assert kinds == [Pong, Pong, StepOutput, StepOutput, StepOutput, Stats]
    assert [message.seq for message in sent if isinstance(message, Pong)] == [9, 10]


def test_the_end_tells_how_long_a_request_waited_and_how_long_its_prompt_took() -> None:
    session = Session(limits(max_running=1, chunk=16))
    session.submit([1], 10)
    session.turn(1.0)
    second = session.submit([2] * 40, 2)
    while not session.ended(second):
        session.turn(1.0)
    finish = session.finishes[second]
    assert finish.queue_s == 11.0  # ten tokens, and a turn that finds nobody running any more
    assert finish.prefill_s == 2.0
    assert finish.retractions == 0


def test_stats_come_ten_times_a_second_while_busy_and_once_when_idle_begins() -> None:
    session = Session(limits())
    session.submit([1, 2, 3], 100)
    for _ in range(90):
        session.turn(0.02)
    busy = len(session.stats)
    assert 14 <= busy <= 18
    session.drain()
    session.turn()
    assert len(session.stats) == busy + 1
    last = session.stats[-1]
    assert (last.running, last.waiting, last.kv_used) == (0, 0, 0)
    assert last.kv_evictable + last.kv_free == 512
    assert (last.prompt_tokens_computed, last.prompt_tokens_cached, last.generation_tokens) == (3, 0, 100)
    assert (last.prefill.steps, last.decode.steps) == (1, 99)
    assert sum(last.decode.seconds.counts) == sum(last.decode.tokens.counts) == 99
    assert last.decode.tokens.counts[0] == 99
    assert last.prefill.tokens.sum == 3


@LOOPS
@PAGES
def test_each_token_of_a_prompt_is_counted_once_whatever_the_page_size_and_however_often_it_is_computed(overlap: bool, page: int) -> None:
    session = Session(limits(overlap=overlap, page_size=page, pool_tokens=256, chunk=16, conservativeness=0.05))
    prompts = [[number] * 21 for number in (1, 2, 3, 4, 5, 6, 1, 2)]
    ids = []
    for prompt in prompts:
        ids.append(session.submit(prompt, 60))
        session.turn()
    session.drain()
    assert any(session.finishes[id].retractions for id in ids)
    last = session.stats[-1]
    assert last.prompt_tokens_computed + last.prompt_tokens_cached == sum(map(len, prompts))
    assert last.prompt_tokens_cached == sum(session.finishes[id].cached_tokens for id in ids)


def test_stats_count_who_runs_and_who_waits() -> None:
    session = Session(limits(max_running=2, chunk=16))
    for number in range(5):
        session.submit([number] * 10, 20)
    while not session.stats:
        session.turn()
    stats = session.stats[0]
    assert (stats.running, stats.waiting) == (2, 3)
    assert stats.kv_used == session.engine.memory.used


def test_throughput_is_of_the_time_in_which_there_was_work() -> None:
    session = Session(limits(decode_log_interval=40))
    session.submit([1, 2, 3], 21)
    while session.engine.has_work:
        session.turn(0.1)
    session.now += 3600
    session.submit([1, 2, 3], 31)
    while session.engine.has_work:
        session.turn(0.1)
    line = next(line for line in session.lines if line.startswith("Decode batch."))
    rate = float(line.split("gen throughput (token/s): ")[1].split(",")[0])
    assert rate == pytest.approx(40 / 4.2, abs=0.5)
    assert any(stats.gen_throughput > 0 for stats in session.stats)
    assert session.stats[-1].gen_throughput == 0  # nobody is being answered

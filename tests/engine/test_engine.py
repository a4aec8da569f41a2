from __future__ import annotations

from itertools import islice

import pytest

from banyan_runtime.engine.policy import OVERDUE_BATCHES
from banyan_runtime.wire import (
    Abort,
    EngineMessage,
    FinishCode,
    Flush,
    Flushed,
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
from tests.engine import invariants
from tests.engine.cost import lines_run
from tests.engine.fake import continuation
from tests.engine.replay import Replay
from tests.engine.session import Session, limits

LOOPS = pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])
PAGES = pytest.mark.parametrize("page", [1, 16])


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


# --- sharing ---


@LOOPS
@PAGES
def test_a_prompt_seen_before_is_cached_but_for_its_last_token(overlap: bool, page: int) -> None:
    session = Session(limits(overlap=overlap, page_size=page))
    for _ in range(2):
        id = session.submit(list(range(33)), 3)
        session.drain()
    assert session.finishes[id].cached_tokens == 32
    assert session.prefilled == 33 + 1


def test_the_next_turn_of_a_conversation_finds_the_answer_before_it_cached() -> None:
    session = Session(limits())
    first = session.submit([1, 2, 3, 4], 10)
    session.drain()
    second = session.submit([1, 2, 3, 4, *session.outputs[first], 5, 6], 3)
    session.drain()
    # the last token of an answer was sampled but never computed
    assert session.finishes[second].cached_tokens == 4 + 10 - 1
    session.check_texts()


def test_with_the_cache_disabled_nothing_is_shared() -> None:
    session = Session(limits(radix=False))
    for _ in range(3):
        session.submit([1] * 40)
    session.drain()
    assert session.prefilled == 3 * 40
    session.check_texts()


@LOOPS
@PAGES
def test_equal_prompts_that_arrive_together_are_computed_once(overlap: bool, page: int) -> None:
    session = Session(limits(overlap=overlap, page_size=page))
    ids = [session.submit(list(range(33)), 5, seed=seed) for seed in range(8)]
    session.drain()
    assert session.prefilled == 33 + 7 * 1
    assert [session.finishes[id].cached_tokens for id in ids] == [0, *[32] * 7]
    assert len({tuple(session.outputs[id]) for id in ids}) > 1, "each with its own seed"
    session.check_texts()


@LOOPS
def test_a_long_prefix_that_requests_share_is_computed_once(overlap: bool) -> None:
    session = Session(limits(overlap=overlap))
    common = [token % 50 for token in range(100)]
    for number in range(8):
        session.submit([*common, number, 1, 2], 5)
    session.drain()
    assert session.prefilled == 100 + 8 * 3
    session.check_texts()


@LOOPS
def test_a_long_prefix_in_chunks_is_computed_once_too(overlap: bool) -> None:
    session = Session(limits(overlap=overlap, chunk=32))
    common = [token % 50 for token in range(150)]
    for number in range(4):
        session.submit([*common, number, 1, 2], 5)
    session.drain()
    assert session.prefilled == 150 + 4 * 3
    session.check_texts()


def test_a_short_common_prefix_is_not_worth_a_step() -> None:
    session = Session(limits())
    for number in range(4):
        session.submit([*range(20), number, 1, 2], 5)
    session.turn()
    assert session.runner.log[0] == ("prefill", 4, 4 * 23)


def test_waiting_for_a_prefix_does_not_hold_up_the_others() -> None:
    session = Session(limits())
    common = [token % 50 for token in range(100)]
    session.submit([*common, 1], 3)
    session.submit([*common, 2], 3)
    session.submit([7, 7, 7], 3)
    session.turn()
    assert session.runner.log[0] == ("prefill", 2, 101 + 3)


def test_when_the_one_that_computes_is_aborted_another_takes_over() -> None:
    session = Session(limits(chunk=16))
    common = [token % 50 for token in range(100)]
    leader = session.submit([*common, 1], 3)
    follower = session.submit([*common, 2], 3)
    session.turn()
    session.abort(leader)
    session.drain()
    assert len(session.outputs[follower]) == 3
    session.check_texts()


@LOOPS
def test_other_salts_never_share(overlap: bool) -> None:
    session = Session(limits(overlap=overlap))
    ids = [session.submit([1] * 80, 3, salt=salt) for salt in ("", "a", "b", "a")]
    session.drain()
    assert [session.finishes[id].cached_tokens for id in ids] == [0, 0, 0, 79]


def test_a_flush_empties_the_cache_and_is_refused_while_anybody_is_there() -> None:
    session = Session(limits())
    session.submit([1] * 40)
    session.engine.handle(Flush(seq=1))
    session.drain()
    assert session.stats[-1].kv_evictable > 0
    session.engine.handle(Flush(seq=2))
    session.drain()
    assert session.stats[-1].kv_evictable == 0, "what is measured is not as it was before"
    assert session.others == [Flushed(seq=1, ok=False), Flushed(seq=2, ok=True)]
    again = session.submit([1] * 40)
    session.drain()
    assert session.finishes[again].cached_tokens == 0


def test_requests_share_by_their_prefix_ids_where_they_have_some() -> None:
    session = Session(limits())
    prompt = [5] * 40
    hashes = [-1000 - position for position in range(20)]
    ids = []
    for prefix_ids in ((), [*hashes, *prompt[20:]], [*prompt[:20], *hashes], [*hashes, *prompt[20:]]):
        ids.append(session.submit(prompt, 6, prefix_ids=prefix_ids))
        session.drain()
    assert [session.finishes[id].cached_tokens for id in ids] == [0, 0, 20, 39]
    follow_up = session.submit([*prompt, *session.outputs[ids[1]], 3], 2, prefix_ids=[*hashes, *prompt[20:], *session.outputs[ids[1]], 3])
    session.drain()
    assert session.finishes[follow_up].cached_tokens == 40 + 5, "the output is cached behind the prefix ids"
    session.check_texts()
    invariants.check(session.engine)


def test_a_retracted_request_keeps_its_prefix_ids() -> None:
    session = Session(limits(pool_tokens=64, conservativeness=0.05))
    ids = []
    for number in range(3):
        ids.append(session.submit([7] * 4, 30, prefix_ids=[-1 - number] * 4, seed=number))
        session.turn()
    session.drain()
    assert any(session.finishes[id].retractions for id in ids)
    assert [session.finishes[id].cached_tokens for id in ids] == [0, 0, 0]
    session.check_texts()


@pytest.mark.parametrize("prefix_ids", [[1, 2], [1, 2, 4], [1, 2, 3, 4]])
def test_prefix_ids_that_another_request_could_have_by_accident_are_refused(prefix_ids: list[int]) -> None:
    session = Session(limits())
    id = session.submit([1, 2, 3], 6, prefix_ids=prefix_ids)
    session.turn()
    assert session.failures[id].code == "invalid_value"


# --- memory ---


@LOOPS
@PAGES
@pytest.mark.parametrize("rules", ["fair", "sglang"])
@pytest.mark.parametrize("radix", [True, False], ids=["radix", "no-radix"])
def test_a_retracted_request_continues_with_the_same_text(overlap: bool, page: int, rules: str, radix: bool) -> None:
    session = Session(limits(overlap=overlap, page_size=page, pool_tokens=256, scheduling_rules=rules, radix=radix, conservativeness=0.05))
    ids = []
    for number in range(12):
        ids.append(session.submit([number] * 5, 60))
        session.turn()
    session.drain()
    assert any(session.finishes[id].retractions for id in ids)
    assert any(line.startswith("KV cache pool is full. Retract requests. #retracted_reqs: ") for line in session.lines)
    assert all(len(session.outputs[id]) == 60 for id in ids)
    session.check_texts()
    invariants.check(session.engine)


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


# --- order ---


def started(session: Session) -> list[int]:
    return list(session.outputs)


def test_first_come_is_first_served() -> None:
    session = Session(limits(max_running=1))
    for number in range(5):
        session.submit([number, 1], 2)
    session.drain()
    assert started(session) == [1, 2, 3, 4, 5]


def test_longest_prefix_match_takes_what_is_cached_first() -> None:
    session = Session(limits(max_running=1, policy="lpm"))
    session.submit([7] * 40, 2)
    session.drain()
    session.submit([1, 2, 3], 2)
    session.submit([7] * 20, 2)
    session.submit([7] * 30, 2)
    session.drain()
    assert started(session)[1:] == [4, 3, 2]


def test_longest_prefix_match_lets_one_of_a_family_go_ahead_of_the_rest() -> None:
    session = Session(limits(max_running=2, policy="lpm"))
    family = list(range(40))
    session.submit([*family, 1], 2)
    session.submit([*family, 2], 2)
    session.submit([45, 46], 2)
    session.drain()
    assert started(session) == [1, 3, 2]


def test_longest_prefix_match_serves_a_long_queue_in_the_order_of_arrival() -> None:
    session = Session(limits(max_running=1, policy="lpm"))
    session.submit([7] * 40, 2)
    session.drain()
    for number in range(129):
        session.submit([number % 50, 1], 1)
    session.submit([7] * 30, 1)
    session.turn()
    session.turn()
    assert started(session)[1] == 2


def test_longest_prefix_match_starves_nobody() -> None:
    session = Session(limits(max_running=1, policy="lpm"))
    session.submit([7] * 40, 1)
    session.drain()
    unlucky = session.submit([1, 2, 3], 1)
    batches = 0
    while not session.ended(unlucky):
        while len(session.engine.scheduler.queue) < 3:
            session.submit([7] * 30, 1)
        session.turn()
        batches += 1
        assert batches < 3 * OVERDUE_BATCHES
    assert batches > OVERDUE_BATCHES


@pytest.mark.parametrize("rules", ["fair", "sglang"])
def test_decode_steps_may_run_in_a_row_before_prompts_are_looked_at(rules: str) -> None:
    session = Session(limits(continuous_decodes=5, scheduling_rules=rules))
    session.submit([1], 40)
    session.turn()
    session.turn()
    for number in range(3):
        session.submit([2 + number], 40)
        for _ in range(6):
            session.turn()
    kinds = "".join(phase[0] for phase, _, _ in session.runner.log)
    assert kinds.startswith("pdddddpdddddpdddddp")


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
    session.submit([1, 2, 3], 21)
    while session.engine.has_work:
        session.turn(0.1)
    line = next(line for line in session.lines if line.startswith("Decode batch."))
    rate = float(line.split("gen throughput (token/s): ")[1].split(",")[0])
    assert rate == pytest.approx(40 / 4.2, abs=0.5)

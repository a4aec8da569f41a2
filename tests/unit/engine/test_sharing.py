"""Prefixes that requests share: what is cached, what is waited for, who may never share."""

from __future__ import annotations

import pytest

from banyan_runtime.wire import Flush, Flushed
from tests.unit.engine import invariants
from tests.unit.engine.session import LOOPS, PAGES, Session, limits


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

"""Several decode steps at a stretch: the same texts in fewer turns, and nobody who waits for it."""

from __future__ import annotations

from typing import Any

import pytest

from banyan_runtime.engine.rounds import MOST, ROWS, SECONDS, Rounds
from banyan_runtime.wire import Abort, FinishCode, LogprobRequest
from tests.unit.engine.fake import NAN_SEED
from tests.unit.engine.session import PAGES, Session, limits

WISHES: list[dict[str, Any]] = [{"prompt": [1, 2, 3, 4], "max_new": 60, "seed": seed} for seed in (5, 60, 7)]


def played(changes: dict[str, Any], wishes: list[dict[str, Any]]) -> Session:
    session = Session(limits(**changes))
    for wish in wishes:
        session.submit(**wish)
    session.drain()
    session.check_texts()
    return session


def decodes(session: Session) -> int:
    return sum(phase == "decode" for phase, _, _ in session.runner.log)


@PAGES
def test_the_text_is_the_same_in_fewer_steps(page: int) -> None:
    plain = played({"page_size": page}, WISHES)
    rounds = played({"page_size": page, "rounds": True}, WISHES)
    assert rounds.outputs == plain.outputs
    waits = page == 1  # for a prefix that is just being computed, and then for a step of decoding
    assert decodes(plain) == 59 + waits
    assert decodes(rounds) == 1 + -(-58 // MOST) + 2 * waits, "and once more for a text that ends before the others"


@PAGES
def test_a_stop_id_in_the_middle_ends_the_text_there(page: int) -> None:
    """And only what was said is cached."""
    wish = WISHES[0]
    said = played({}, [wish]).outputs[1]
    stop = next(token for token in said if said.index(token) >= 20 and (said.index(token) - 2) % MOST == 3)
    session = played({"page_size": page, "rounds": True}, [wish | {"stop_token_ids": (stop,)}])
    assert session.outputs[1] == said[: said.index(stop) + 1]
    assert session.finishes[1].code is FinishCode.STOP
    cached = 4 + len(session.outputs[1]) - 1
    assert session.engine.memory.prefixes.evictable == cached // page * page


@pytest.mark.parametrize("max_new", range(1, 14))
def test_never_more_is_said_than_was_asked_for(max_new: int) -> None:
    session = played({"rounds": True}, [WISHES[0] | {"max_new": max_new}, WISHES[1]])
    assert [len(session.outputs[1]), len(session.outputs[2])] == [max_new, 60]


def test_a_context_is_filled_to_its_end() -> None:
    assert len(played({"context_len": 64, "rounds": True}, WISHES[:1]).outputs[1]) == 60


@PAGES
def test_a_full_pool_takes_nobodys_place(page: int) -> None:
    """As many slots as the texts take: what rounds would take beyond that they leave."""
    changes = {"page_size": page, "pool_tokens": 3 * 64, "conservativeness": 0.1}
    session = played(changes | {"rounds": True}, WISHES)
    assert session.outputs == played(changes, WISHES).outputs
    assert not any(finish.retractions for finish in session.finishes.values())


@pytest.mark.parametrize(
    "wish",
    [
        {"repetition_penalty": 1.2},
        {"presence_penalty": 0.5},
        {"min_new_tokens": 60, "stop_token_ids": (3,)},
        {"logprobs": LogprobRequest(0, -1, 0)},
    ],
    ids=lambda wish: next(iter(wish)),
)
def test_what_changes_from_token_to_token_is_decided_for_each(wish: dict[str, Any]) -> None:
    assert decodes(played({"rounds": True}, [WISHES[0] | wish])) == 59


def test_no_stop_id_may_come_too_early_and_then_rounds_begin() -> None:
    session = played({"rounds": True}, [WISHES[0] | {"min_new_tokens": 20, "stop_token_ids": (VOCAB_END,)}])
    assert 20 < decodes(session) < 30


VOCAB_END = 1 << 20  # an id that is never drawn


def test_a_row_that_fails_in_the_middle_keeps_what_it_said() -> None:
    wishes = [WISHES[0] | {"seed": NAN_SEED | 5}, WISHES[1]]
    plain, session = Session(limits()), Session(limits(rounds=True))
    for one in (plain, session):
        for wish in wishes:
            one.submit(**wish)
        one.drain()
    assert session.outputs == plain.outputs
    assert session.failures.keys() == plain.failures.keys() == {1}
    assert len(session.outputs[1]) > 2, "it fails later than in its first step"


@pytest.mark.parametrize("held", [0, 2])
def test_who_waits_is_not_kept_waiting(held: int) -> None:
    """While a prompt is computed in chunks, or one waits for room, each step is one round, however many wait for a grammar."""
    session = Session(limits(rounds=True, max_running=1))
    first = session.submit([1, 2, 3], max_new=30, seed=1)
    session.submit([4, 5, 6], max_new=30, seed=2)
    others = [session.submit([7, 8, 9], held=True) for _ in range(held)]
    while first not in session.finishes:
        session.turn()
    assert decodes(session) == 29
    for other in others:
        session.abort(other)
    session.drain()
    assert decodes(session) < 29 + 10


def test_an_aborted_request_leaves_nothing_behind() -> None:
    session = Session(limits(rounds=True))
    id = session.submit([1, 2, 3], max_new=200, seed=1)
    for _ in range(5):
        session.turn()
    said = len(session.outputs[id])
    assert said > MOST
    session.engine.handle(Abort(id=id))
    session.drain()
    assert session.finishes[id].code is FinishCode.ABORT
    assert session.engine.memory.prefixes.evictable == 3 + said - 1


def test_a_step_is_as_long_as_the_limit_at_most() -> None:
    rounds = Rounds()
    assert rounds.choose(1) == 1, "nothing is known"
    rounds.learn(1, 1, SECONDS / 3.5)
    assert [rounds.choose(1), rounds.choose(3), rounds.choose(4)] == [3, 1, 1]
    rounds.learn(4, 1, SECONDS / 100)
    assert [rounds.choose(1), rounds.choose(4), rounds.choose(ROWS)] == [MOST, MOST, MOST]
    assert rounds.choose(ROWS + 1) == 1, "many rows cost more, noted one by one, than rounds save"
    rounds.learn(4, 8, 2.0)
    assert rounds.choose(4) == 1
    rounds.learn(2, 2, 0.0)
    assert rounds.choose(2) == MOST, "another number of rows is known from its last step alone"
    rounds.learn(2, 8, 8 * SECONDS / 2)
    assert rounds.choose(2) == 2, "what takes longer is believed at once"
    rounds.learn(2, 2, 2 * SECONDS / 100)
    assert rounds.choose(2) == 2, "what takes less is not"


def test_a_text_that_comes_later_is_measured_anew() -> None:
    """It may be far longer, and a round over it too."""
    session = Session(limits(rounds=True))
    for number in range(2):
        session.submit([1, 2, 3 + number], max_new=40, seed=number)
        session.turn()  # its prompt
        before = len(session.outputs[number + 1])
        session.turn()
        assert len(session.outputs[number + 1]) - before == 1
        session.turn()
        assert len(session.outputs[number + 1]) - before == 1 + MOST
        session.drain()


def test_background_is_computed_a_step_at_a_time_while_somebody_online_may_come() -> None:
    session = Session(limits(rounds=True))
    session.submit([1, 2, 3], max_new=2, seed=1)
    session.submit([1, 2, 4], max_new=60, seed=2, priority=-1)
    session.drain()
    assert decodes(session) > 50
    session.now += 60
    session.submit([1, 2, 5], max_new=60, seed=3, priority=-1)
    before = decodes(session)
    session.drain()
    assert decodes(session) - before < 12


def test_the_counters_tell_of_tokens() -> None:
    session = played({"rounds": True, "decode_log_interval": 4}, WISHES)
    session.now += 1
    stats = session.engine.stats(session.now)
    assert stats.generation_tokens == 180
    assert stats.decode.steps == decodes(session)
    assert stats.decode.tokens.sum == 3 * 59
    assert stats.accept_len in (0.0, 1.0)
    assert not any("accept" in line for line in session.lines)

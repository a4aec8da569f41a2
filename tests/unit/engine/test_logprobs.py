from __future__ import annotations

import pytest

from banyan_runtime.wire import FinishCode, LogprobRequest, pack_ids
from tests.unit.engine import invariants
from tests.unit.engine.session import LOOPS, PAGES, Session, limits

CHUNKS = pytest.mark.parametrize("chunk", [None, 16])


@LOOPS
@PAGES
@CHUNKS
def test_log_probabilities_come_to_those_who_asked(overlap: bool, page: int, chunk: int | None) -> None:
    session = Session(limits(overlap=overlap, page_size=page, chunk=chunk), lazy=True)
    wishes = [
        None, LogprobRequest(output_top=0), None, LogprobRequest(output_top=3), LogprobRequest(0, 1, 2), LogprobRequest(-1, 7, 0),
        LogprobRequest(output_top=0, named=pack_ids([5, 2])), LogprobRequest(1, 1, 2, pack_ids([7])),
        LogprobRequest(-1, 3, 0, pack_ids([4, 1, 4])),
    ]  # fmt: skip
    ids = [session.submit([number] * 20, 4 + number, logprobs=wish) for number, wish in enumerate(wishes)]
    session.drain()
    assert [len(session.scores[id].prompt) for id in ids] == [0, 0, 0, 0, 19, 13, 0, 19, 17]
    session.check_texts()


@LOOPS
@CHUNKS
def test_a_cached_prompt_is_computed_again_from_where_it_is_scored(overlap: bool, chunk: int | None) -> None:
    session = Session(limits(overlap=overlap, chunk=chunk))
    prompt = list(range(40))
    session.submit(prompt)
    session.drain()
    ids = [session.submit(prompt, logprobs=LogprobRequest(prompt_from=start)) for start in (1, 30, 39, 40)]
    session.drain()
    assert [session.finishes[id].cached_tokens for id in ids] == [0, 29, 38, 39]
    session.check_texts()
    invariants.check(session.engine)


@LOOPS
def test_no_prompt_score_is_sent_twice_after_a_retraction(overlap: bool) -> None:
    session = Session(limits(overlap=overlap, pool_tokens=64, chunk=8, conservativeness=0.01))
    ids = []
    for number in range(4):
        ids.append(session.submit([number] * 6, 40, logprobs=LogprobRequest(output_top=1, prompt_from=2, prompt_top=1)))
        session.turn()
    session.drain()
    assert any(session.finishes[id].retractions for id in ids)
    session.check_texts()


@LOOPS
@PAGES
@CHUNKS
def test_a_request_for_no_tokens_computes_and_scores_its_prompt(overlap: bool, page: int, chunk: int | None) -> None:
    session = Session(limits(overlap=overlap, page_size=page, chunk=chunk))
    prompt = [token % 50 for token in range(64)]
    running = session.submit([9] * 3, 30)
    plain = session.submit(prompt, 0)
    scored = session.submit(prompt, 0, logprobs=LogprobRequest(prompt_from=1, prompt_top=1))
    session.drain()
    for id in (plain, scored):
        assert session.finishes[id].code is FinishCode.LENGTH
        assert session.finishes[id].queue_s is not None
        assert session.finishes[id].prefill_s is None
        assert not session.outputs[id]
    again = session.submit([*prompt, 1], 1)
    session.drain()
    assert session.finishes[again].cached_tokens == 64, "it is cached as others are"
    assert len(session.outputs[running]) == 30
    session.check_texts()
    invariants.check(session.engine)

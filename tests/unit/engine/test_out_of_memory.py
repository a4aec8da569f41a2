"""Steps that the device has no memory for: who is in them fails, everybody else goes on, and what follows is smaller."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

from banyan_runtime.engine.chunk_size import SMALLEST_CHUNK
from banyan_runtime.engine.out_of_memory import SOON_S, WINDOW_S, StepBounds
from banyan_runtime.errors import DeviceFull
from banyan_runtime.step import Step
from banyan_runtime.wire import EngineMessage, Failed, Sampling, Submit, pack_ids
from tests.unit.engine import invariants
from tests.unit.engine.fake import VOCAB
from tests.unit.engine.grammars import Rules, constraint
from tests.unit.engine.session import LOOPS, Session, limits

PROMPT = list(range(20))


def misses(session: Session, wanted: Callable[[Step], bool], times: int = 1) -> list[Step]:
    """Have the next such steps miss memory. They are in the list when they have."""
    met: list[Step] = []

    def missed(step: Step) -> bool:
        if len(met) >= times or not wanted(step):
            return False
        met.append(step)
        return True

    session.runner.misses = missed
    return met


def served(session: Session, *ids: int) -> None:
    session.drain()
    for id in ids:
        assert session.finishes[id]
    session.check_texts()
    invariants.check(session.engine)


@LOOPS
@pytest.mark.parametrize("lazy", [False, True])
def test_a_prompt_without_memory_fails_and_who_runs_goes_on(overlap: bool, lazy: bool) -> None:
    session = Session(limits(overlap=overlap), lazy)
    first = session.submit(PROMPT, 30)
    session.turn()
    session.turn()
    met = misses(session, lambda step: step.mode == "prefill")
    second, third = session.submit([7] * 40), session.submit([9] * 40)
    session.turn()
    assert len(met) == 1
    assert {id: failure.code for id, failure in session.failures.items()} == {second: "out_of_memory", third: "out_of_memory"}
    assert session.engine.memory.imbalance() == 0
    again = session.submit([7] * 40)
    served(session, first, again)
    assert len(session.outputs[first]) == 30
    assert "Out of memory in a prefill step. #new-token: 80, #failed_reqs: 2. 64 KiB" in session.lines
    assert {failure.again_s for failure in session.failures.values()} == {WINDOW_S}, "no smaller step is made for them"
    assert session.stats[-1].out_of_memory_steps == 1


@LOOPS
def test_decode_steps_without_memory_fail_with_all_their_rows_and_none_that_waits(overlap: bool) -> None:
    session = Session(limits(overlap=overlap, max_running=2), lazy=True)
    running = [session.submit([id] * 10, 30) for id in (1, 2)]
    waiting = session.submit([3] * 10, 30)
    for _ in range(4):
        session.turn()
    known = {id: len(session.outputs[id]) for id in running}
    met = misses(session, lambda step: step.mode == "decode")
    session.turn()
    assert len(met) == 1
    assert set(session.failures) == set(running)
    for id in running:  # what was computed before is told
        assert len(session.outputs[id]) == known[id] + overlap
        assert session.failures[id].again_s == SOON_S
    assert any("#failed_reqs: 2, max_running_requests: 1. 64 KiB" in line for line in session.lines)
    again = [session.submit([id] * 10, 30) for id in (1, 2)]
    served(session, waiting, *again)
    assert max(rows for _, rows, _ in session.runner.log[-60:]) == 1, "one after another"


@LOOPS
def test_who_ends_with_the_step_before_has_ended_well(overlap: bool) -> None:
    """Only with a step in flight is it in the one that is missed, too."""
    session = Session(limits(overlap=overlap))
    short, long = session.submit([1] * 10, 8, stop_token_ids=tuple(range(VOCAB))), session.submit([2] * 10, 30)
    misses(session, lambda step: step.mode == "decode")
    session.drain()
    assert set(session.finishes) == {short}
    assert set(session.failures) == {long}
    session.check_texts()


@LOOPS
def test_a_chunk_without_memory_ends_its_prompt_and_shares_nothing(overlap: bool) -> None:
    session = Session(limits(overlap=overlap, chunk=16))
    met = misses(session, lambda step: int(step.kv_lens[0]) > 20)
    first = session.submit(list(range(50)), 4)
    session.drain()
    assert len(met) == 1
    assert session.failures[first].code == "out_of_memory"
    second = session.submit(list(range(50)), 4)
    served(session, second)
    assert session.finishes[second].cached_tokens <= 16


def test_a_mask_that_finds_no_memory_fails_the_step_in_flight() -> None:
    session = Session(limits(overlap=True), lazy=True, grammars=Rules(VOCAB))
    those = [session.submit([id] * 10, 30, constraint=constraint(id)) for id in (1, 2)]
    for _ in range(3):
        session.turn()
    those = [id for id in those if not session.ended(id)]
    asked: list[bool] = []

    def misses_second(step: Step) -> bool:  # when it is launched, then when its mask is told
        asked.append(step.mask_later)
        return asked[-2:] == [True, True]

    session.runner.misses = misses_second
    free = session.submit([3] * 10, 5)
    session.drain()
    assert {session.failures[id].code for id in those} == {"out_of_memory"}
    session.runner.misses = lambda step: False
    later = session.submit([1] * 10, 5)
    session.drain()
    assert session.ended(free)
    assert session.outputs[later] == session.expected(later) != []
    invariants.check(session.engine)


@LOOPS
def test_a_second_shortage_within_a_minute_is_the_end_where_nothing_can_be_made_smaller(overlap: bool) -> None:
    session = Session(limits(overlap=overlap))
    met = misses(session, lambda step: step.mode == "prefill" and int(step.token_ids[0]) != 9, times=3)
    first = session.submit(PROMPT)
    session.drain()
    session.now += WINDOW_S + 1
    second = session.submit(PROMPT)
    session.drain()
    session.now += WINDOW_S / 2
    assert session.engine.given_up is None
    other = session.submit([9] * 10, 4)
    session.turn()
    third = session.submit(PROMPT)
    while not session.ended(third):
        session.turn()
    assert {id: failure.code for id, failure in session.failures.items()} == dict.fromkeys((first, second, third), "out_of_memory")
    assert session.outputs[other] == session.expected(other) != [], "what was computed is told"
    assert re.search(r"second step within 60 s, .*\(64 KiB\).*--chunked-prefill-size", str(session.engine.given_up))
    assert session.engine._report.out_of_memory_steps == len(met) == 3


def test_the_loop_ends_when_it_is_given_up_and_tells_before() -> None:
    session = Session(limits())
    misses(session, lambda step: True, times=2)
    sent: list[EngineMessage] = []
    asked = [[Submit(id=id, token_ids=pack_ids(PROMPT), sampling=Sampling(max_new_tokens=3))] for id in (1, 2)]
    with pytest.raises(DeviceFull):
        session.engine.run(lambda wait: asked.pop(0) if asked else [], sent.append)
    assert [message.id for message in sent if isinstance(message, Failed)] == [1, 2]


@LOOPS
@pytest.mark.parametrize("length", [20, 2000])
def test_who_comes_back_as_he_is_told_ends_nothing(overlap: bool, length: int) -> None:
    """A prompt that there never is memory for, and a crowd of whom there is memory for three."""
    session = Session(limits(overlap=overlap, pool_tokens=8192, context_len=8192))
    session.runner.misses = lambda step: len(step.rows) > 3 if step.mode == "decode" else 7 in step.token_ids.tolist()
    due = [(session.now, [7] * length, 2), *((session.now + 330, [id, id, id], 20) for id in range(8, 20))]
    passed = refused = 0
    while session.now < 1000:
        ids = {session.submit(prompt, new): (prompt, new) for at, prompt, new in due if at <= session.now}
        due = [each for each in due if each[0] > session.now]
        session.drain()
        session.now += 0.5
        assert session.engine.given_up is None
        for id, (prompt, new) in ids.items():
            if id in session.finishes:
                passed += 1
            else:
                refused += 1
                due.append((session.now + session.failures[id].again_s, prompt, new))
    assert passed == 12
    assert refused > 12


def prefill(tokens: int) -> Step:
    session = Session(limits(pool_tokens=1 << 20))
    met = misses(session, lambda step: True)
    session.submit([1] * tokens, 1)
    session.drain()
    return met[0]


def decode(rows: int) -> Step:
    session = Session(limits(max_running=rows))
    met = misses(session, lambda step: step.mode == "decode")
    for id in range(rows):
        session.submit([id], 3)
    session.drain()
    return met[0]


def test_steps_are_halved_down_to_the_smallest() -> None:
    bounds = StepBounds(page_size=16)
    assert bounds.halve(prefill(2010), 0.0) == SOON_S
    assert bounds.tokens == 992
    assert bounds.halve(decode(5), 1.0) == SOON_S
    assert (bounds.tokens, bounds.rows) == (992, 2)
    assert bounds.halve(decode(2), 2.0) == SOON_S
    assert bounds.rows == 1
    assert bounds.halve(prefill(SMALLEST_CHUNK), 3.0) == WINDOW_S
    assert bounds.halve(decode(1), 4 + WINDOW_S) == WINDOW_S
    assert bounds.halve(decode(1), 4 + 1.5 * WINDOW_S) is None
    assert (bounds.tokens, bounds.rows) == (992, 1)


def test_prompts_are_computed_in_smaller_steps_behind_a_shortage() -> None:
    session = Session(limits(pool_tokens=4096, chunk=None, max_prefill_tokens=16_384), lazy=False)
    misses(session, lambda step: True)
    session.submit((np.arange(1024) % VOCAB).tolist(), 1)
    session.drain()
    session.runner.log.clear()
    id = session.submit((np.arange(1024) % 37).tolist(), 1)
    served(session, id)
    assert [tokens for _, _, tokens in session.runner.log] == [512, 512]
    assert any("chunked_prefill_size: 512. 64 KiB" in line for line in session.lines)

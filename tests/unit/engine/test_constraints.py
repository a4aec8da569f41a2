"""Grammars, logit_bias and pooling as the engine sees them: what waits, what a step says, how a request ends or fails alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from banyan_runtime.engine.constraints import Matcher
from banyan_runtime.grammar.errors import GrammarBusy, GrammarError
from banyan_runtime.step import U32, Pooling, Step
from banyan_runtime.wire import Constraint, FinishCode, Grammar, pack_ids
from tests.unit.engine.fake import VOCAB
from tests.unit.engine.grammars import each_filled
from tests.unit.engine.session import LOOPS, Session, limits

CONSTRAINT = Constraint(Grammar("count", "3"))


@dataclass
class Counting:
    """Admits the numbers from `next` on, one after another, and after `left` of them nothing more."""

    next: int
    left: int
    stop_ids: tuple[int, ...] = ()
    fails_at: str = ""  # "fill" or "accept"
    accepted: list[int] = field(default_factory=list)

    def fill(self, words: U32) -> None:
        if self.fails_at == "fill" and self.accepted:
            raise GrammarError("too much to look at")
        words[:] = 0
        for id in [self.next] if self.left else self.stop_ids:
            words[id // 32] |= np.uint32(1 << (id % 32))

    def accept(self, token_id: int) -> bool:
        if self.fails_at == "accept" and self.accepted:
            raise GrammarError("too long")
        assert token_id == self.next
        self.accepted.append(token_id)
        self.next, self.left = (self.next + 1) % VOCAB, self.left - 1
        return True

    @property
    def is_terminated(self) -> bool:
        return self.left == 0 and not self.stop_ids


@dataclass
class Ticket:
    answer: Matcher | GrammarError | None

    def ready(self) -> Matcher | GrammarError | None:
        return self.answer


@dataclass
class Grammars:
    """Gives out what `make` makes; None: it is not ready before the test says so."""

    make: Callable[[tuple[int, ...]], Matcher | GrammarError | None]
    tickets: list[Ticket] = field(default_factory=list)

    def request(self, constraint: Constraint, stop_ids: tuple[int, ...]) -> Ticket:
        self.tickets.append(Ticket(self.make(stop_ids)))
        return self.tickets[-1]

    def fill(self, matchers: Sequence[Matcher], words: U32) -> list[GrammarError | None]:
        return each_filled(matchers, words)


def counting(left: int = 3, fails_at: str = "") -> Grammars:
    return Grammars(lambda stop_ids: Counting(7, left, stop_ids, fails_at))


@LOOPS
def test_an_output_obeys_its_grammar_and_ends_with_it_while_others_are_as_ever(overlap: bool) -> None:
    session = Session(limits(overlap=overlap), grammars=counting())
    free = session.submit([1, 2, 3], 12)
    bound = session.submit([4, 5], 12, constraint=CONSTRAINT)
    session.drain()
    assert session.outputs[bound] == [7, 8, 9]
    assert session.finishes[bound].code is FinishCode.COMPLETE
    assert session.outputs[free] == session.expected(free)
    assert session.finishes[free].code is FinishCode.LENGTH


@LOOPS
def test_a_grammar_with_a_stop_token_ends_by_it_however_many_tokens_were_asked_for(overlap: bool) -> None:
    session = Session(limits(overlap=overlap), grammars=counting())
    id = session.submit([4, 5], 12, constraint=CONSTRAINT, stop_token_ids=(40,), min_new_tokens=9)
    session.drain()
    assert session.outputs[id] == [7, 8, 9, 40]
    assert session.finishes[id].code is FinishCode.STOP


def test_a_step_is_launched_before_it_is_known_what_its_grammars_admit() -> None:
    """Whoever obeys one or not: the device computes while their tokens are noted."""
    session = Session(limits(overlap=True), grammars=counting(left=10))
    flying: list[tuple[bool, int]] = []
    watch = session.runner.watch
    session.runner.watch = lambda step: (flying.append((step.mask_later, len(session.engine._in_flight))), watch(step))[1]
    session.submit([1, 2, 3], 30)
    bound = session.submit([4, 5], 30, constraint=CONSTRAINT)
    session.drain()
    assert session.outputs[bound] == list(range(7, 17))
    later = [count for is_later, count in flying if is_later]
    assert later == [1] * 10, "and one that its end made needless"
    assert all(count == 1 for _, count in flying[1:])


class Extensible(Counting):
    """May end at any time."""

    def fill(self, words: U32) -> None:
        super().fill(words)
        for id in self.stop_ids:
            words[id // 32] |= np.uint32(1 << (id % 32))


@LOOPS
@pytest.mark.parametrize("least", [0, 3, 9])
def test_min_tokens_hold_back_an_end_for_as_long_as_the_grammar_admits_anything_else(overlap: bool, least: int) -> None:
    session = Session(limits(overlap=overlap), grammars=Grammars(lambda stop_ids: Extensible(7, 5, stop_ids)))
    ids = [
        session.submit([4, seed], 12, constraint=CONSTRAINT, stop_token_ids=(40,), min_new_tokens=least, seed=seed) for seed in range(12)
    ]
    session.drain()
    numbers = [7, 8, 9, 10, 11]
    lengths = set()
    for id in ids:
        *text, end = session.outputs[id]
        assert (end, session.finishes[id].code) == (40, FinishCode.STOP)
        assert text == numbers[: len(text)]
        lengths.add(len(text))
    assert min(lengths) == min(least, len(numbers))


@LOOPS
def test_an_output_that_is_cut_off_at_its_length_says_so(overlap: bool) -> None:
    session = Session(limits(overlap=overlap), grammars=counting(left=10))
    id = session.submit([4, 5], 2, constraint=CONSTRAINT)
    session.drain()
    assert session.outputs[id] == [7, 8]
    assert session.finishes[id].code is FinishCode.LENGTH


def test_a_request_waits_for_its_grammar_and_holds_nobody_up() -> None:
    grammars = Grammars(lambda stop_ids: None)
    session = Session(limits(), grammars=grammars)
    bound = session.submit([4, 5], 12, constraint=CONSTRAINT)
    free = session.submit([1, 2, 3], 4)
    session.drain()
    assert session.ended(free)
    assert not session.outputs[bound]
    assert not session.engine.has_work, "it would turn for nothing"
    grammars.tickets[0].answer = Counting(7, 3)
    session.turn()
    session.drain()
    assert session.outputs[bound] == [7, 8, 9]


def test_a_request_whose_grammar_cannot_be_compiled_fails_alone() -> None:
    grammars = Grammars(lambda stop_ids: GrammarError("no such thing"))
    session = Session(limits(), grammars=grammars)
    bound, free = session.submit([4], 3, constraint=CONSTRAINT), session.submit([1, 2], 3)
    session.turn()
    session.drain()
    assert (session.failures[bound].code, session.failures[bound].message) == ("invalid_grammar", "no such thing")
    assert session.outputs[free] == session.expected(free)


def test_a_request_whose_grammar_nobody_gets_to_may_come_again() -> None:
    session = Session(limits(), grammars=Grammars(lambda stop_ids: GrammarBusy("no time")))
    bound = session.submit([4], 3, constraint=CONSTRAINT)
    session.turn()
    session.drain()
    assert (session.failures[bound].code, session.failures[bound].message) == ("unavailable", "no time")


def test_a_request_that_ends_while_its_grammar_is_compiled_is_forgotten() -> None:
    grammars = Grammars(lambda stop_ids: None)
    session = Session(limits(), grammars=grammars)
    bound = session.submit([4], 3, constraint=CONSTRAINT)
    session.abort(bound)
    session.drain()
    assert session.finishes[bound].code is FinishCode.ABORT
    grammars.tickets[0].answer = Counting(7, 3)
    session.turn()
    session.drain()
    assert not session.outputs[bound]


@LOOPS
@pytest.mark.parametrize("where", ["fill", "accept"])
def test_a_grammar_that_fails_on_the_way_fails_its_request_alone(where: str, overlap: bool) -> None:
    session = Session(limits(overlap=overlap), grammars=counting(fails_at=where))
    bound, free = session.submit([4], 9, constraint=CONSTRAINT), session.submit([1, 2], 9)
    session.drain()
    assert session.failures[bound].code == "invalid_grammar"
    assert "too " in session.failures[bound].message
    assert session.outputs[free] == session.expected(free)
    assert len(session.outputs[free]) == 9


@LOOPS
def test_a_retracted_request_goes_on_in_its_grammar(overlap: bool) -> None:
    session = Session(limits(pool_tokens=256, conservativeness=0.05, overlap=overlap), grammars=counting(left=60))
    ids = []
    for number in range(12):
        ids.append(session.submit([number] * 5, 60, constraint=CONSTRAINT))
        session.turn(0)
    session.drain()
    assert any(session.finishes[id].retractions for id in ids), "the pool was large enough"
    for id in ids:
        assert session.outputs[id] == [(7 + step) % VOCAB for step in range(60)]


def test_biases_reach_every_step_that_draws_for_their_request() -> None:
    session = Session(limits())
    steps: list[Step] = []
    watch = session.runner.watch
    session.runner.watch = lambda step: (steps.append(step), watch(step))[1]
    values = np.array([2.5, -100], dtype="<f4").tobytes()
    biased = session.submit([1, 2], 4, bias_ids=pack_ids([3, 9]), bias_values=values)
    plain = session.submit([5], 4)
    session.drain()
    assert session.outputs[plain] == session.expected(plain)
    assert session.outputs[biased] != session.expected(biased)
    for step in steps:
        assert step.bias is not None
        lists = [step.bias.ids[index].tolist() for index in range(len(step.rows))]
        assert sorted(lists) == [[], [3, 9]]
        assert step.bias.values.tolist() == [2.5, -100]


@LOOPS
@pytest.mark.parametrize("pooling", [Pooling.LAST, Pooling.MEAN, Pooling.CLS])
def test_a_pooled_request_gets_the_vector_of_its_whole_prompt(pooling: int, overlap: bool) -> None:
    session = Session(limits(chunk=16, overlap=overlap))
    prompt = [number % VOCAB for number in range(40)]
    session.submit(prompt, 4)  # its beginning is cached
    session.drain()
    computed = session.prefilled
    id = session.submit(prompt, 0, pooling=pooling)
    session.drain()
    assert session.finishes[id].code is FinishCode.LENGTH
    assert session.outputs[id] == []
    how, length, _ = session.vectors[id]
    assert (how, length) == (pooling, 40)
    assert session.prefilled - computed == (1 if pooling == Pooling.LAST else 40)


def test_what_the_runner_cannot_compute_is_refused() -> None:
    session = Session(limits())
    id = session.submit([1], 2, constraint=CONSTRAINT)
    session.drain()
    assert session.failures[id].code == "unsupported"

"""Grammars compiled beside the engine's loop."""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from banyan_runtime.grammar import pool as pool_module
from banyan_runtime.grammar.errors import GrammarBusy, GrammarError
from banyan_runtime.grammar.llguidance import LlguidanceBackend, LlguidanceCompiled
from banyan_runtime.grammar.matcher import Matcher
from banyan_runtime.grammar.pool import KEPT, GrammarPool, Ticket
from banyan_runtime.wire import Constraint, Grammar
from tests.unit.grammar.walks import Language

PATIENCE_S = 30.0


class Slow:
    """A backend whose grammars wait for `go`."""

    def __init__(self, backend: LlguidanceBackend) -> None:
        self.backend = backend
        self.go = threading.Event()
        self.compiled: list[Grammar] = []

    def compile(self, grammar: Grammar) -> LlguidanceCompiled:
        self.compiled.append(grammar)
        assert self.go.wait(PATIENCE_S)
        return self.backend.compile(grammar)


class Loop:
    """The engine's: sleeps until it is woken."""

    def __init__(self) -> None:
        self.woken: queue.SimpleQueue[None] = queue.SimpleQueue()

    def wake(self) -> None:
        self.woken.put(None)

    def answer(self, ticket: Ticket) -> Matcher | GrammarError:
        while (answer := ticket.ready()) is None:
            self.woken.get(timeout=PATIENCE_S)
        return answer


@pytest.fixture
def slow(tiny: Language) -> Iterator[Slow]:
    backend = Slow(tiny.backend)
    yield backend
    backend.go.set()


def pool_of(language: Language, backend: Any, loop: Loop, **more: Any) -> GrammarPool:
    return GrammarPool(lambda: language.vocabulary, lambda _: backend, loop.wake, **more)


def regex(text: str, **more: Any) -> Constraint:
    return Constraint(Grammar("regex", text), **more)


def test_a_ticket_becomes_a_matcher_of_its_own(tiny: Language) -> None:
    loop = Loop()
    pool = pool_of(tiny, tiny.backend, loop)
    first, second = (loop.answer(pool.request(regex("ab"), (tiny.eos,))) for _ in range(2))
    assert not isinstance(first, GrammarError)
    assert not isinstance(second, GrammarError)
    assert tiny.follow(first, "ab") == "ab"
    assert first.is_terminated
    assert not second.is_terminated


def test_many_requests_wait_for_one_compilation(tiny: Language, slow: Slow) -> None:
    loop = Loop()
    pool = pool_of(tiny, slow, loop)
    tickets = [pool.request(regex("ab"), (tiny.eos,)) for _ in range(20)]
    assert [ticket.ready() for ticket in tickets] == [None] * 20
    slow.go.set()
    assert not any(isinstance(loop.answer(ticket), GrammarError) for ticket in tickets)
    assert slow.compiled == [Grammar("regex", "ab")]


def test_a_wrong_grammar_fails_alone_and_is_not_compiled_again(tiny: Language, slow: Slow) -> None:
    slow.go.set()
    loop = Loop()
    pool = pool_of(tiny, slow, loop)
    for _ in range(2):
        failed = loop.answer(pool.request(regex("("), ()))
        assert isinstance(failed, GrammarError)
        assert "unclosed group" in str(failed)
    assert not isinstance(loop.answer(pool.request(regex("a"), ())), GrammarError)
    assert len(slow.compiled) == 2


def test_nobody_waits_beyond_the_deadline_and_the_loop_is_woken(tiny: Language, slow: Slow) -> None:
    loop = Loop()
    pool = pool_of(tiny, slow, loop, deadline_s=0.05, patience_s=0.3)
    failed = loop.answer(pool.request(regex("ab"), ()))
    assert isinstance(failed, GrammarBusy), "it has not computed"
    assert isinstance(loop.answer(pool.request(regex("ab"), ())), GrammarError)
    slow.go.set()
    while isinstance(loop.answer(pool.request(regex("ab"), ())), GrammarError):  # until it is through
        loop.woken.get(timeout=PATIENCE_S)
    assert slow.compiled == [Grammar("regex", "ab")]


def test_a_grammar_is_to_blame_for_what_it_makes_a_thread_compute(tiny: Language) -> None:
    over = threading.Event()

    class Endless:
        def compile(self, grammar: Grammar) -> LlguidanceCompiled:
            while grammar.text == "endless" and not over.is_set():
                hashlib.pbkdf2_hmac("sha256", b"", b"", 10_000)
            return tiny.backend.compile(grammar)

    loop = Loop()
    pool = pool_of(tiny, Endless(), loop, threads=1, deadline_s=0.2, patience_s=PATIENCE_S)
    endless, other = (pool.request(regex(text), ()) for text in ("endless", "ab"))
    failed = loop.answer(endless)
    assert isinstance(failed, GrammarError)
    assert not isinstance(failed, GrammarBusy)
    assert " 0.2 s" in str(failed)
    assert other.ready() is None, "its time has not begun"
    over.set()
    assert not isinstance(loop.answer(other), GrammarError)


def test_where_too_many_wait_nothing_is_said_against_a_grammar(tiny: Language, slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "MAX_WAITING", 3)
    loop = Loop()
    pool = pool_of(tiny, slow, loop, threads=1)
    tickets = [pool.request(regex(f"a{{{number + 1}}}"), ()) for number in range(9)]
    refused = [ticket for ticket in tickets if isinstance(ticket.ready(), GrammarBusy)]
    assert len(refused) >= 5
    slow.go.set()
    for ticket in tickets:
        if ticket not in refused:
            assert not isinstance(loop.answer(ticket), GrammarError)
    assert not isinstance(loop.answer(pool.request(refused[-1].constraint, ())), GrammarError)


def test_what_was_used_longest_ago_is_forgotten(tiny: Language, slow: Slow) -> None:
    slow.go.set()
    loop = Loop()
    pool = pool_of(tiny, slow, loop)
    for number in range(KEPT + 1):
        loop.answer(pool.request(regex(f"a{{{number + 1}}}"), ()))
        loop.answer(pool.request(regex("a{1}"), ()))
    before = len(slow.compiled)
    loop.answer(pool.request(regex("a{1}"), ()))
    assert len(slow.compiled) == before
    loop.answer(pool.request(regex("a{2}"), ()))
    assert len(slow.compiled) == before + 1


def test_a_backend_that_cannot_be_made_fails_each_request(tiny: Language) -> None:
    def open_backend(_: object) -> LlguidanceBackend:
        raise GrammarError("no such tokenizer")

    loop = Loop()
    pool = GrammarPool(lambda: tiny.vocabulary, open_backend, loop.wake)
    failed = loop.answer(pool.request(regex("ab"), ()))
    assert isinstance(failed, GrammarError)
    assert str(failed) == "no such tokenizer"


def test_a_backend_that_could_not_be_made_in_time_is_made_for_the_next_one(tiny: Language) -> None:
    answers = [GrammarBusy("no memory"), GrammarBusy("no memory")]

    def open_backend(_: object) -> LlguidanceBackend:
        if answers:
            raise answers.pop()
        return tiny.backend

    loop = Loop()
    pool = GrammarPool(lambda: tiny.vocabulary, open_backend, loop.wake, threads=1)  # which tries once for nobody
    assert isinstance(loop.answer(pool.request(regex("ab"), ())), GrammarBusy)
    assert not isinstance(loop.answer(pool.request(regex("ab"), ())), GrammarError)


def test_a_bug_in_the_making_of_a_backend_is_said_against_no_grammar(tiny: Language) -> None:
    def broken(_: object) -> LlguidanceBackend:
        raise ZeroDivisionError

    loop = Loop()
    pool = GrammarPool(lambda: tiny.vocabulary, broken, loop.wake)
    for _ in range(2):
        assert isinstance(loop.answer(pool.request(regex("ab"), ())), GrammarBusy)


def test_a_bug_in_a_backend_fails_its_request_alone(tiny: Language) -> None:
    class Broken:
        def compile(self, grammar: Grammar) -> LlguidanceCompiled:
            if grammar.text == "bug":
                raise ZeroDivisionError
            return tiny.backend.compile(grammar)

    loop = Loop()
    pool = pool_of(tiny, Broken(), loop, threads=1)
    assert isinstance(loop.answer(pool.request(regex("bug"), ())), GrammarError)
    assert not isinstance(loop.answer(pool.request(regex("ab"), ())), GrammarError)


def test_constraints_behind_reasoning_have_a_gate(qwen3: Language) -> None:
    loop = Loop()
    pool = pool_of(qwen3, qwen3.backend, loop)
    added = qwen3.vocabulary.added
    constraint = regex("ab", after=added["</think>"], opens=added["<think>"])
    for text in ("<think>x</think>\n\nab", "ab"):
        matcher = loop.answer(pool.request(constraint, (qwen3.eos,)))
        assert not isinstance(matcher, GrammarError)
        assert qwen3.follow(matcher, text) == text
        assert matcher.is_terminated


def test_one_thread_looks_after_the_deadlines_of_all(tiny: Language, slow: Slow) -> None:
    loop = Loop()
    pool = pool_of(tiny, slow, loop, patience_s=0.5)
    before = threading.active_count()
    tickets = [pool.request(regex(f"a{{{number + 1}}}"), ()) for number in range(100)]
    assert threading.active_count() == before
    assert all(isinstance(loop.answer(ticket), GrammarError) for ticket in tickets)


def test_a_backend_that_a_passing_want_kept_from_being_made_is_made_later(tiny: Language, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "AGAIN_S", 0.0)
    wants = [OSError(24, "Too many open files")] * 2

    def open_backend(_: object) -> LlguidanceBackend:
        if wants:
            raise wants.pop()
        return tiny.backend

    loop = Loop()
    pool = GrammarPool(lambda: tiny.vocabulary, open_backend, loop.wake, threads=1)  # which tries once for nobody
    assert isinstance(loop.answer(pool.request(regex("ab"), ())), GrammarBusy)
    assert not isinstance(loop.answer(pool.request(regex("ab"), ())), GrammarError)


def test_what_it_takes_to_make_a_backend_is_no_grammars_fault(tiny: Language) -> None:
    tries = 0

    def open_backend(_: object) -> LlguidanceBackend:
        nonlocal tries
        tries += 1
        if tries == 1:  # for nobody
            raise GrammarBusy("no memory")
        begun = time.thread_time()
        while time.thread_time() - begun < 1.0:
            hashlib.pbkdf2_hmac("sha256", b"", b"", 10_000)
        return tiny.backend

    loop = Loop()
    pool = GrammarPool(lambda: tiny.vocabulary, open_backend, loop.wake, threads=1, deadline_s=0.5)
    assert not isinstance(loop.answer(pool.request(regex("ab"), ())), GrammarError)

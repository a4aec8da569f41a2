"""Masks of several outputs, computed side by side, are those that each of them has alone."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Sequence
from random import Random
from typing import Any

import llguidance
import numpy as np
import pytest

from banyan_runtime.grammar import masks as masks_module
from banyan_runtime.grammar.errors import GrammarError
from banyan_runtime.grammar.masks import ALONE, FEW, FEW_THREADS, MaskFiller
from banyan_runtime.grammar.matcher import Masks, Matcher, SideBySide
from banyan_runtime.grammar.reasoning_gate import ReasoningGate
from banyan_runtime.wire import Grammar
from tests.unit.grammar.walks import Language

GRAMMARS = [
    Grammar("json_schema", '{"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}'),
    Grammar("json_object", ""),
    Grammar("regex", "[a-z]{2,9}[0-9]*"),
    Grammar("choice", '["one", "another one", "two"]'),
]


class Counted:
    """How many masks were computed on threads."""

    def __init__(self, language: Language, threads: int) -> None:
        compute = language.backend.side_by_side(threads)
        assert compute is not None
        self._compute: SideBySide = compute
        self.masks = 0

    def __call__(self, those: Sequence[tuple[Any, int]], masks: Masks) -> None:
        self.masks += len(those)
        self._compute(those, masks)


def alone(matcher: Matcher, words: int) -> tuple[list[int], str | None]:
    mask = np.zeros(words, np.uint32)
    try:
        matcher.fill(mask)
    except GrammarError as error:
        return [], str(error)
    return mask.tolist(), None


def outputs(language: Language, seed: int, count: int) -> list[Matcher]:
    """Some at their beginning, some that have ended or that reason still, and each in the middle of something else."""
    dice, found = Random(seed), list[Matcher]()
    for _ in range(count):
        matcher = language.matcher(dice.choice(GRAMMARS))
        ids, _ = language.walk(matcher.copy(), dice, free=10, most=40)
        taken = ids[: dice.randint(0, len(ids))]
        for token_id in taken:
            assert matcher.accept(token_id)
        if not taken and dice.random() < 0.5:
            matcher = ReasoningGate(matcher, -1, *language.ids("b"), frozenset({language.eos}), frozenset())
            assert matcher.accept(language.ids(dice.choice("ab"))[0])
        found.append(matcher)
    return found


@pytest.mark.matrix(gate=4)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("threads", [1, 4, 7])
def test_masks_do_not_depend_on_who_computes_them(smol: Language, seed: int, threads: int) -> None:
    words, matchers = -(-smol.vocabulary.size // 32), outputs(smol, seed, 24)
    masks = np.full((len(matchers), words), 7, np.uint32)
    counted = Counted(smol, threads)
    failed = MaskFiller(lambda count: counted, cores=threads).fill([matcher.copy() for matcher in matchers], masks)
    assert counted.masks > FEW if threads >= FEW_THREADS else not counted.masks
    for matcher, mask, error in zip(matchers, masks, failed, strict=True):
        expected, wrong = alone(matcher, words)
        assert (None if error is None else str(error)) == wrong
        if error is None:
            assert mask.tolist() == expected


def test_a_grammar_that_fails_does_so_alone(smol: Language) -> None:
    words = -(-smol.vocabulary.size // 32)
    matchers = [smol.matcher(GRAMMARS[0]) for _ in range(6)]
    matchers[2].library.consume_tokens([smol.ids("]")[0]] * 3)  # the library's own state is broken
    masks = np.zeros((6, words), np.uint32)
    failed = MaskFiller(smol.backend.side_by_side, cores=4).fill(matchers, masks)
    assert [error is not None for error in failed] == [False, False, True, False, False, False]
    expected, _ = alone(smol.matcher(GRAMMARS[0]), words)
    assert all(mask.tolist() == expected for mask, error in zip(masks, failed, strict=True) if error is None)


def test_what_the_library_stumbles_over_fails_nobody_else(smol: Language) -> None:
    calls = []

    def panics(those: Sequence[tuple[Any, int]], masks: Masks) -> None:
        calls.append(len(those))
        masks[:] = 7
        raise GrammarError("the grammar library fails on it.")

    words = -(-smol.vocabulary.size // 32)
    filler = MaskFiller(lambda threads: panics, cores=8)
    for _ in range(2):
        matchers = outputs(smol, 5, 8)
        masks = np.zeros((8, words), np.uint32)
        assert not any(filler.fill(matchers, masks))
        assert [mask.tolist() for mask in masks] == [alone(matcher, words)[0] for matcher in matchers]
    assert len(calls) == 1


def test_a_head_of_fewer_rows_than_there_are_tokens_has_masks_of_its_own(smollm2: Any) -> None:
    small = Language.load(smollm2, padding=-100)
    words, matchers = -(-small.vocabulary.size // 32), outputs(small, 1, 8)
    assert all(matcher.library is None for matcher in matchers)
    masks = np.zeros((8, words), np.uint32)
    assert MaskFiller(small.backend.side_by_side, cores=4).fill(matchers, masks) == [None] * 8
    assert [mask.tolist() for mask in masks] == [alone(matcher, words)[0] for matcher in matchers]


def test_where_no_threads_can_be_had_masks_come_one_after_another(
    smol: Language, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def none(num_threads: int) -> None:
        tried.append(num_threads)
        raise RuntimeError("Resource temporarily unavailable")

    monkeypatch.setattr(llguidance, "LLExecutor", none)
    words = -(-smol.vocabulary.size // 32)
    filler = MaskFiller(smol.backend.side_by_side, cores=64)
    for _ in range(2):
        matchers = outputs(smol, 3, 8)
        masks = np.zeros((8, words), np.uint32)
        assert not any(filler.fill(matchers, masks))
        assert [mask.tolist() for mask in masks] == [alone(matcher, words)[0] for matcher in matchers]
    assert tried == [8]
    assert caplog.text.count("8 threads cannot be had") == 1


def walked(language: Language, grammar: Grammar, most: int) -> tuple[int, str]:
    """How many masks there were for an output of nothing but a's, and why there was no further one."""
    matcher, words = language.matcher(grammar), np.zeros(-(-language.vocabulary.size // 32), np.uint32)
    (token,) = language.ids("a")
    for count in range(most):
        try:
            matcher.fill(words)
        except GrammarError as error:
            return count, str(error)
        matcher = matcher.copy()
        assert matcher.accept(token)
    return most, ""


@pytest.mark.matrix(gate=1)
@pytest.mark.parametrize("rule", ['s s | s s s | "a" | "b" | ""', 's s | "a" | ""'])
def test_a_grammar_of_which_a_text_can_come_in_too_many_ways_is_given_up(smol: Language, rule: str) -> None:
    """Its masks take a hundred times as long as others', and all who generate wait for them."""
    _, why = walked(smol, Grammar("ebnf", f"root ::= s\ns ::= {rule}"), 3000)
    assert "too long" in why or "too complex" in why


@pytest.mark.parametrize(("seconds", "masks"), [(0.009, 100), (0.02, 15), (1.0, 0)])
def test_masks_may_take_so_long_together(tiny: Language, seconds: float, masks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0.0, seconds)
    monkeypatch.setattr(time, "thread_time", lambda: next(clock))
    assert walked(tiny, Grammar("regex", "a+"), 100)[0] == pytest.approx(masks, abs=1)


@pytest.mark.parametrize(("seconds", "tokens"), [(0.009, 100), (0.036, 12)])
def test_so_may_the_tokens_behind_masks_that_others_computed(
    tiny: Language, seconds: float, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    clock = itertools.count(0.0, seconds)
    monkeypatch.setattr(time, "thread_time", lambda: next(clock))
    matcher, words = tiny.matcher(Grammar("regex", "a+")), np.zeros(-(-tiny.vocabulary.size // 32), np.uint32)
    (token,) = tiny.ids("a")
    accepted = 0
    with contextlib.suppress(GrammarError):
        while accepted < 100:
            words[:] = 1
            matcher.fill(words, computed=True)
            accepted += matcher.accept(token)
    assert accepted == tokens


def test_after_masks_that_took_long_side_by_side_they_are_computed_one_by_one(smol: Language, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it shows whose take that long."""
    monkeypatch.setattr(masks_module, "SLOW_S", -1.0)
    words, counted = -(-smol.vocabulary.size // 32), Counted(smol, 4)
    filler = MaskFiller(lambda count: counted, cores=4)
    asked = []
    for _ in range(2 + ALONE):
        before = counted.masks
        matchers = outputs(smol, 3, 8)
        filler.fill(matchers, np.zeros((8, words), np.uint32))
        asked.append(counted.masks > before)
    assert asked == [True, *[False] * ALONE, True]

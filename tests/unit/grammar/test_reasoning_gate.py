"""A grammar for what comes behind reasoning."""

from __future__ import annotations

import pytest

from banyan_runtime.grammar.errors import GrammarError
from banyan_runtime.grammar.reasoning_gate import ReasoningGate
from banyan_runtime.wire import Grammar
from tests.unit.grammar.walks import Language

OBJECT = Grammar("json_object", "")


def gate(language: Language, *, after: int, opens: int = -1) -> ReasoningGate:
    vocabulary = language.vocabulary
    return ReasoningGate(language.matcher(OBJECT), opens, after, frozenset(vocabulary.eos_ids), vocabulary.blanks)


def think(language: Language, name: str = "</think>") -> int:
    return language.vocabulary.added[name]


@pytest.mark.parametrize("blank", ["", "\n", "\n\n"])
def test_reasoning_is_free_and_the_output_behind_it_obeys(qwen3: Language, blank: str) -> None:
    matcher = gate(qwen3, after=think(qwen3))
    assert qwen3.follow(matcher, "Hm. {not JSON").startswith("Hm.")
    assert not matcher.is_completed
    assert qwen3.follow(matcher, f"</think>{blank}") == f"</think>{blank}"
    assert not matcher.accept(qwen3.ids("Hm")[0])
    assert qwen3.follow(matcher, '{"a": 1}') == '{"a": 1}'
    assert matcher.is_terminated


def test_an_output_does_not_end_within_reasoning(qwen3: Language) -> None:
    matcher = gate(qwen3, after=think(qwen3))
    assert qwen3.eos not in qwen3.admitted(matcher)
    assert not matcher.accept(qwen3.eos)


def test_only_one_blank_line_comes_behind_reasoning(qwen3: Language) -> None:
    matcher = gate(qwen3, after=think(qwen3))
    assert qwen3.follow(matcher, "</think>\n\n") == "</think>\n\n"
    assert not qwen3.vocabulary.blanks & set(qwen3.admitted(matcher).tolist())


def test_reasoning_may_begin_or_not(qwen3: Language) -> None:
    opens = think(qwen3, "<think>")
    without = gate(qwen3, after=think(qwen3), opens=opens)
    assert qwen3.follow(without, '{"a": 1}') == '{"a": 1}'
    assert without.is_terminated
    matcher = gate(qwen3, after=think(qwen3), opens=opens)
    assert not matcher.accept(qwen3.ids("Hm")[0])
    assert qwen3.follow(matcher, '<think>\nHm\n</think>\n\n{"a": 1}') == '<think>\nHm\n</think>\n\n{"a": 1}'
    assert matcher.is_terminated


def test_it_begins_only_at_the_beginning(qwen3: Language) -> None:
    matcher = gate(qwen3, after=think(qwen3), opens=think(qwen3, "<think>"))
    assert matcher.accept(qwen3.ids("{")[0])
    assert not matcher.accept(think(qwen3, "<think>"))


def test_taking_back_goes_through_the_gate(qwen3: Language) -> None:
    matcher = gate(qwen3, after=think(qwen3))
    ids = qwen3.ids('Hm.</think>\n\n{"a": 1}')
    for token_id in ids:
        assert matcher.accept(token_id)
    other = matcher.copy()
    for back in range(1, len(ids) + 1):
        other.rollback(back)
        assert not other.is_terminated
        for token_id in ids[-back:]:
            assert other.accept(token_id)
        assert other.is_terminated
    with pytest.raises(GrammarError):
        other.rollback(len(ids) + 1)
    assert matcher.is_terminated

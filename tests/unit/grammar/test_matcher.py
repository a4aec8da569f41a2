"""A matcher follows one output: what may come, what ends it, and what is taken back."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import llguidance
import numpy as np
import pytest

from banyan_runtime.grammar.errors import GrammarError
from banyan_runtime.wire import Grammar
from tests.unit.grammar.walks import Language, words

OBJECT = Grammar("json_object", "")
TEXT = Grammar("json_schema", '{"type":"string"}')


def test_special_tokens_are_never_admitted_in_strings(qwen3: Language) -> None:
    matcher = qwen3.matcher(TEXT)
    assert qwen3.follow(matcher, '"now ') == '"now '
    admitted = set(qwen3.admitted(matcher).tolist())
    assert len(admitted) > 100_000
    assert not admitted & set(qwen3.vocabulary.added.values())


@pytest.mark.parametrize("name", ["<|im_end|>", "<|im_start|>", "</think>"])
@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json_schema", '{"const":"xNAMEy"}'),
        Grammar("json_schema", '{"type":"string","pattern":"^aNAME$"}'),
        Grammar("choice", '["NAME"]'),
        Grammar("regex", "aNAME"),
        Grammar("ebnf", 'root ::= "NAME"'),
        Grammar("structural_tag", '{"type":"json_schema","json_schema":{"const":"xNAMEy"}}'),
    ],
)
def test_the_name_of_a_special_token_in_a_text_is_text(qwen3: Language, grammar: Grammar, name: str) -> None:
    bar = {"regex": "\\|", "json_schema": "\\\\|" if "pattern" in grammar.text else "|"}.get(grammar.kind, "|")
    matcher = qwen3.matcher(Grammar(grammar.kind, grammar.text.replace("NAME", name.replace("|", bar))))
    ids = []
    while not matcher.is_terminated:
        ids.append(int(qwen3.admitted(matcher)[-1]))
        assert matcher.accept(ids[-1])
    assert name in qwen3.text(ids)
    assert not set(ids) & set(qwen3.vocabulary.added.values())


def test_rows_without_a_token_are_never_admitted(tiny: Language) -> None:
    matcher = tiny.matcher(TEXT)
    assert tiny.follow(matcher, '"a') == '"a'
    assert max(tiny.admitted(matcher)) < tiny.vocabulary.tokens < tiny.vocabulary.size


def test_an_end_is_admitted_only_where_the_output_is_complete(smol: Language) -> None:
    matcher = smol.matcher(Grammar("regex", "[a-z]{2,4}"))
    for text, complete in (("a", False), ("b", True), ("c", True)):
        assert (smol.eos in smol.admitted(matcher)) == matcher.is_completed
        assert matcher.accept(smol.ids(text)[0])
        assert matcher.is_completed == complete
        assert not matcher.is_terminated
    assert matcher.accept(smol.eos)
    assert matcher.is_terminated
    assert not matcher.accept(smol.ids("d")[0])


def test_an_output_that_cannot_go_on_is_terminated_without_an_end(tiny: Language) -> None:
    matcher = tiny.matcher(OBJECT)
    assert tiny.follow(matcher, '{"a": 1}') == '{"a": 1}'
    assert matcher.is_terminated
    assert tiny.admitted(matcher).tolist() == [tiny.eos]


def test_each_request_has_ends_of_its_own(smol: Language) -> None:
    dot = smol.ids(".")[0]
    matcher = smol.matcher(Grammar("regex", "[a-z]+"), [dot])
    assert not matcher.accept(dot)
    assert matcher.accept(smol.ids("a")[0])
    assert dot in smol.admitted(matcher)
    assert smol.eos not in smol.admitted(matcher)
    assert not matcher.accept(smol.eos)
    assert matcher.accept(dot)
    assert matcher.is_terminated


def test_a_stop_token_that_is_text_may_be_text(smol: Language) -> None:
    dot = smol.ids(".")[0]
    matcher = smol.matcher(TEXT, [dot])
    assert smol.follow(matcher, '"a.') == '"a.'
    assert not matcher.is_terminated


def test_without_any_end_a_grammar_goes_on_as_long_as_it_can(smol: Language) -> None:
    matcher = smol.matcher(Grammar("regex", "a{1,3}"), [])
    for _ in range(3):
        assert smol.eos not in smol.admitted(matcher)
        assert matcher.accept(smol.ids("a")[0])
    assert matcher.is_terminated


def test_a_refused_token_changes_nothing(smol: Language) -> None:
    matcher = smol.matcher(OBJECT)
    assert smol.follow(matcher, '{"a": ') == '{"a": '
    before = smol.admitted(matcher)
    for refused in (smol.ids("]")[0], smol.eos, -1, 10**6):
        assert not matcher.accept(refused)
    assert np.array_equal(before, smol.admitted(matcher))


@pytest.mark.parametrize("seed", range(10))
def test_what_is_taken_back_has_never_been(tiny: Language, seed: int) -> None:
    dice = Random(seed)
    matcher = tiny.matcher(OBJECT)
    masks = []
    ids: list[int] = []
    for _ in range(40):
        admitted = tiny.admitted(matcher)
        masks.append(admitted)
        ids.append(int(dice.choice(admitted)))
        assert matcher.accept(ids[-1])
        if matcher.is_terminated:
            break
    back = dice.randrange(1, len(ids) + 1)
    matcher.rollback(back)
    for token_id, mask in zip(ids[-back:], masks[-back:], strict=True):
        assert np.array_equal(tiny.admitted(matcher), mask)
        assert matcher.accept(token_id)


def test_more_than_there_was_cannot_be_taken_back(tiny: Language) -> None:
    matcher = tiny.matcher(OBJECT)
    assert matcher.accept(tiny.ids("{")[0])
    with pytest.raises(GrammarError, match="2 tokens"):
        matcher.rollback(2)
    matcher.rollback(1)
    assert tiny.takes(OBJECT, "{}")


def test_a_copy_goes_its_own_way(tiny: Language) -> None:
    matcher = tiny.matcher(OBJECT)
    assert tiny.follow(matcher, '{"a":') == '{"a":'
    here = tiny.admitted(matcher)
    other = matcher.copy()
    assert tiny.follow(other, "[1, 2]}") == "[1, 2]}"
    assert other.is_terminated
    assert np.array_equal(tiny.admitted(matcher), here)
    assert not matcher.is_completed
    other.rollback(1)
    assert not other.is_terminated


@pytest.mark.parametrize("text", ['"é"', '"日本語"', '"👩‍🚀🚀"', '"नमस्ते"', '"ä\\n\\"ö\\""', '"‮"'])
def test_strings_take_any_language(qwen3: Language, text: str) -> None:
    assert qwen3.takes(TEXT, text)


def test_masks_lie_in_the_words_as_the_step_wants_them(smol: Language) -> None:
    matcher = smol.matcher(Grammar("choice", '["a"]'))
    mask = words(smol.vocabulary)
    mask[:] = 0xFFFFFFFF
    matcher.fill(mask)
    token_id = smol.ids("a")[0]
    assert mask[token_id // 32] >> (token_id % 32) & 1
    assert mask.sum(dtype=np.uint64) == 1 << (token_id % 32)


@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 10**15}, [1, 10**14], [0, 10**15]),
        ({"minimum": 2**53 - 1, "maximum": 2**53 - 1}, [2**53 - 1], [2**53]),
        ({"const": 10**15}, [10**15], [10**15 + 1]),
    ],
)
@pytest.mark.parametrize("kind", ["integer", "number"])
@pytest.mark.parametrize("tagged", [False, True])
def test_large_numbers_stay_within_their_bounds(
    smol: Language, schema: dict[str, Any], taken: list[int], refused: list[int], kind: str, tagged: bool
) -> None:
    text = json.dumps({"type": kind, **schema})
    grammar = Grammar("structural_tag", f'{{"type":"json_schema","json_schema":{text}}}') if tagged else Grammar("json_schema", text)
    assert [number for number in taken if not smol.takes(grammar, str(number))] == []
    assert [number for number in refused if smol.takes(grammar, str(number))] == []


def test_a_grammar_that_the_library_stumbles_over_is_refused(smol: Language, monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):  # as the library's
        pass

    def panic(*_: object, **__: object) -> None:
        raise PanicException("called `Option::unwrap()` on a `None` value")

    monkeypatch.setattr(llguidance, "LLMatcher", panic)
    with pytest.raises(GrammarError):
        smol.backend.compile(Grammar("regex", "a"))

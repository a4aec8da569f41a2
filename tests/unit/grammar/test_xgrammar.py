"""The second backend keeps the same rules."""

from __future__ import annotations

import contextlib
import json
import resource
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest

from banyan_runtime.grammar import schema
from banyan_runtime.grammar.errors import GrammarBusy, GrammarError
from banyan_runtime.wire import Grammar
from tests.unit.grammar.schemas import some_schema
from tests.unit.grammar.test_calls import HERMES, NOW, ROME
from tests.unit.grammar.test_fuzz import assert_valid
from tests.unit.grammar.walks import Language

pytest.importorskip("xgrammar", reason="xgrammar is not installed (it brings triton along): pip install 'banyan-runtime[xgrammar]'")
import xgrammar
from xgrammar.testing import _is_grammar_accept_string

from banyan_runtime.grammar.backends.xgrammar import LocalXgrammar, XgrammarBackend

pytestmark = pytest.mark.matrix(gate=1)
TEXT = Grammar("json_schema", '{"type":"string"}')


@pytest.fixture(scope="module")
def small(tiny_chat: Path) -> Language:
    return Language.load(tiny_chat, LocalXgrammar, padding=100)


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("regex", r"[a-z]+/\d", "ab/1", "ab/x"),
        ("choice", '["yes","no","é🚀\\n"]', "é🚀\n", "y"),
        ("ebnf", 'root ::= "a" [0-9]+', "a12", "a"),
        ("json_object", "", '{"a": [1, 2.5, "é", null, true]}', "[1]"),
        ("json_schema", '{"type":"array","items":{"type":"integer"}}', "[1, 2]", '["a"]'),
    ],
)
def test_a_notation_admits_what_it_says(small: Language, kind: str, text: str, good: str, bad: str) -> None:
    assert small.takes(Grammar(kind, text), good)
    assert not small.takes(Grammar(kind, text), bad)


def test_special_tokens_are_never_admitted_in_strings(small: Language) -> None:
    matcher = small.matcher(TEXT)
    assert small.follow(matcher, '"now ') == '"now '
    assert not set(small.admitted(matcher).tolist()) & set(small.vocabulary.added.values())


def test_calls_are_forced_and_triggered(small: Language) -> None:
    assert small.takes(HERMES.forced(), f"{ROME}\n{NOW}")
    assert not small.takes(HERMES.forced(), "It is sunny.")
    assert small.takes(HERMES.triggered("<tool_call>"), f"Let me see.\n{ROME}")
    assert not small.takes(HERMES.triggered("<tool_call>"), ROME.replace('"Rome"', "7"))


def test_an_end_comes_only_where_the_output_is_complete_and_can_be_taken_back(small: Language) -> None:
    matcher = small.matcher(Grammar("regex", "[a-z]{2,4}"))
    assert small.eos not in small.admitted(matcher)
    assert not matcher.accept(small.eos)
    assert small.follow(matcher, "a") == "a"
    assert not matcher.is_completed
    assert small.follow(matcher, "b") == "b"
    assert matcher.is_completed
    other = matcher.copy()
    assert matcher.accept(small.eos)
    assert matcher.is_terminated
    assert not matcher.accept(small.eos)
    assert not other.is_terminated
    matcher.rollback(2)
    assert not matcher.is_completed
    with pytest.raises(GrammarError):
        matcher.rollback(9)


@pytest.mark.parametrize(
    ("value", "keyword"),
    [
        ({"oneOf": [{"type": "string"}]}, "oneOf"),
        ({"allOf": [{"type": "string"}, {"minLength": 2}]}, "allOf"),
        ({"type": "number", "multipleOf": 0.5}, "multipleOf"),
        ({"type": "string", "pattern": "^a+$", "minLength": 3}, "pattern"),
        ({"type": "string", "pattern": "a"}, "pattern"),
        ({"type": "object", "required": ["a"]}, "required"),
        ({"$ref": "#/$defs/a", "minLength": 2, "$defs": {"a": {"type": "string"}}}, r"\$ref"),
    ],
)
def test_what_it_would_pass_over_is_refused(small: Language, value: dict[str, Any], keyword: str) -> None:
    with pytest.raises(GrammarError, match=f"^'{keyword}'"):
        small.backend.compile(Grammar("json_schema", schema.prepare(value)))


NUMBER = {"type": "integer"}
PASSED_OVER: list[tuple[dict[str, Any], str, str]] = [  # schemas, outputs that xgrammar would admit, and what is refused
    ({"type": "string", "pattern": '^a"b$'}, '"a"b"', "pattern"),
    ({"type": "string", "pattern": r"^a\\b$"}, r'"a\b"', "pattern"),
    ({"type": "string", "pattern": r"^a\tb$"}, '"a\tb"', "pattern"),
    ({"type": "string", "pattern": "^a\tb$"}, '"a\tb"', "pattern"),
    ({"type": "string", "pattern": r"^\x22$"}, '"""', "pattern"),
    ({"type": "string", "pattern": r"^\u0022$"}, '"""', "pattern"),
    ({"type": "string", "pattern": '^["]{2}$'}, '""""', "pattern"),
    ({"type": "string", "pattern": r"^[\\]$"}, '"\\"', "pattern"),
    ({"type": "string", "pattern": r"^[^\x00-!#-\u{10ffff}]$"}, '"""', "pattern"),
    ({"type": "object", "patternProperties": {'^a"b$': NUMBER}, "additionalProperties": False}, '{"a"b": 1}', "patternProperties"),
    ({"const": "a", "enum": ["b"]}, '"a"', "const"),
    ({"enum": [1, 2, 3], "minimum": 3}, "1", "enum"),
    ({"enum": ["a", "bbb"], "minLength": 2}, '"a"', "enum"),
    ({"const": 5, "type": "integer", "minimum": 9}, "5", "const"),
    ({"type": "integer", "enum": ["b", 1]}, '"b"', "enum"),
    ({"type": "integer", "const": True}, "true", "const"),
    ({"type": ["integer", "string"], "enum": ["b", 1, None]}, "null", "enum"),
    ({"type": "integer", "minimum": 5, "anyOf": [{"type": "integer", "maximum": 3}]}, "1", "anyOf"),
    ({"type": "integer", "anyOf": [{"type": "string"}]}, '"a"', "anyOf"),
    ({"type": "integer", "minimum": 5, "allOf": [{"maximum": 7}]}, "9", "allOf"),
    (
        {"properties": {"a": NUMBER}, "required": ["a"], "anyOf": [{"type": "object", "properties": {"b": NUMBER}, "required": ["b"]}]},
        '{"b": 1}',
        "anyOf",
    ),
    ({"type": "integer", "multipleOf": 7, "minimum": 10, "maximum": 40}, "42", "multipleOf"),
    ({"type": "integer", "multipleOf": 2000}, "6001", "multipleOf"),
    ({"type": "integer", "multipleOf": 2.5}, "4", "multipleOf"),
    ({"minimum": 5}, "1", "minimum"),
    ({"multipleOf": 5}, "3", "multipleOf"),
    ({"minLength": 2}, '"a"', "minLength"),
    ({"pattern": "^a$"}, '"b"', "pattern"),
    ({"format": "date"}, '"b"', "format"),
    ({"minItems": 2}, "[1]", "minItems"),
    ({"minProperties": 2}, '{"a": 1}', "minProperties"),
    ({"patternProperties": {"^a$": NUMBER}}, '{"a": "x"}', "patternProperties"),
    ({"type": "array", "prefixItems": [NUMBER], "additionalItems": False}, '[1, "a"]', "additionalItems"),
    ({"type": "number", "minimum": 0.1234564}, "", "minimum"),
    ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.000001}, "", "exclusiveMaximum"),
]


@pytest.mark.parametrize(("value", "wrong", "keyword"), PASSED_OVER)
def test_what_it_passes_over_is_refused_by_its_name(small: Language, value: dict[str, Any], wrong: str, keyword: str) -> None:
    if wrong and keyword != "multipleOf":
        its_own = xgrammar.Grammar.from_json_schema(json.dumps(value), strict_mode=False)
        assert _is_grammar_accept_string(its_own, wrong)  # else it holds to that now, and it may be let through
    with pytest.raises(GrammarError, match=f"^'{keyword}'"):
        small.backend.compile(Grammar("json_schema", schema.prepare(value)))


@pytest.mark.parametrize(
    ("value", "good", "bad"),
    [
        ({"type": "string", "pattern": "^[!-z]{2,5}$"}, ['"ab"'], ['""""', r'"\\"']),
        ({"type": "string", "pattern": "^[^a-c]+$"}, ['"d"'], ['"""', '"\n"', '"\\"', '"a"']),
        ({"type": "string", "pattern": "^.$"}, ['"d"'], ['"""', '"\n"', '"\\"']),
        ({"type": "string", "pattern": r"^\s\S\W$"}, ['" a-"'], ['"\ta-"', '" "-"', '" a""']),
        ({"type": "integer", "multipleOf": 500}, ["1500", "0"], ["1501"]),
        ({"type": "number", "minimum": 1.5, "exclusiveMaximum": 1.7}, ["1.5", "1.69999"], ["1.4", "1.7"]),
        ({"type": ["integer", "string"], "minimum": 5}, ["6", '"a"'], ["1"]),
        ({"type": ["string", "null"], "enum": ["a", None]}, ['"a"', "null"], ['"b"']),
        ({"items": NUMBER, "minItems": 2}, ["[1, 2]"], ["[1]", "1"]),
        ({"properties": {"a": NUMBER}, "minProperties": 1}, ['{"a": 1}'], ["{}"]),
        ({"anyOf": [NUMBER, {"type": "null"}], "default": None, "title": "A"}, ["1", "null"], ['"a"']),
        ({"type": "string", "minLength": 1, "maxLength": 2**32 + 1}, ['"ab"'], ['""']),
    ],
)
def test_what_it_holds_to_is_let_through(small: Language, value: dict[str, Any], good: list[str], bad: list[str]) -> None:
    grammar = Grammar("json_schema", schema.prepare(value))
    assert [text for text in good if not small.takes(grammar, text)] == []
    assert [text for text in bad if small.takes(grammar, text)] == []


@pytest.mark.parametrize("text", ["(a", "(?=a)", r"\bx"])
def test_a_wrong_regex_is_refused(small: Language, text: str) -> None:
    with pytest.raises(GrammarError):
        small.backend.compile(Grammar("regex", text))


@pytest.mark.long
def test_outputs_are_valid(small: Language) -> None:
    ended = 0
    for seed in range(150):
        dice = Random(seed)
        wanted = some_schema(dice)
        try:
            matcher = small.matcher(Grammar("json_schema", schema.prepare(wanted)))
        except GrammarError:
            continue
        ids, complete = small.walk(matcher, dice, free=25, most=160)
        if complete:
            ended += 1
            assert_valid(small.text(ids), wanted, seed)
    assert ended > 50, json.dumps(ended)


ENDLESS = {"type": "object", "properties": {f"p{number}": {"type": "string", "maxLength": 3000 + number} for number in range(9)}}


@pytest.mark.long
def test_a_grammar_that_computes_too_long_is_given_up_with_its_process_and_others_are_not(small: Language) -> None:
    backend = XgrammarBackend(small.vocabulary, cpu_s=1)
    with pytest.raises(GrammarError, match=" 1 s") as given_up:
        backend.compile(Grammar("json_schema", schema.prepare(ENDLESS)))
    assert not isinstance(given_up.value, GrammarBusy)
    assert children() == []
    matcher = backend.compile(TEXT).matcher((small.eos,))
    assert small.follow(matcher, '"a"') == '"a"'


@pytest.fixture
def dumping() -> Iterator[None]:
    """A process that leaves a dump of its memory, as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))


@pytest.mark.long
def test_the_end_of_the_process_is_nobodys_fault_and_leaves_no_dump(small: Language, dumping: None) -> None:
    backend = XgrammarBackend(small.vocabulary)
    for child in children():
        assert child.rlimit(psutil.RLIMIT_CORE)[0] == 0
        child.kill()
        child.wait()
    assert small.follow(backend.compile(TEXT).matcher((small.eos,)), '"a"') == '"a"'


@pytest.mark.long
def test_where_the_process_does_not_get_on_nothing_is_said_against_a_grammar(small: Language) -> None:
    backend = XgrammarBackend(small.vocabulary, patience_s=0.5)
    for child in children():
        child.suspend()
    with pytest.raises(GrammarBusy):
        backend.compile(TEXT)
    assert small.follow(backend.compile(TEXT).matcher((small.eos,)), '"a"') == '"a"'


def children() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # one of another test's that has ended
            if "banyan_runtime.grammar.compiler" in child.cmdline():
                found.append(child)
    return found

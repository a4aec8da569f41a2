"""Tokens beside the vocabulary proper: part of an output only where its grammar names them, whatever else may be said there."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from msgspec.structs import replace

from banyan_runtime.front.chat.tools.llama3 import LLAMA3
from banyan_runtime.front.openai.tools import Tool
from banyan_runtime.front.prepare.forced import strict
from banyan_runtime.grammar import structural
from banyan_runtime.grammar.structural import AnyText, Json, Node, Parameters, Regex, Sequence, Star, Tag, Text, Token, TriggeredTags
from banyan_runtime.wire import Grammar
from tests.unit.grammar.harmony import speaking_harmony
from tests.unit.grammar.walks import Language

NUMBER = Json({"type": "integer"})
SOME = Json({"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}}, "required": ["a"]})
XML = Parameters(
    {"type": "object", "properties": {"p": {"type": "string"}}, "required": ["p"]}, "<parameter=", ">\n", "\n</parameter>", "\n"
)


@pytest.fixture(scope="module")
def language(tiny_chat: Path, tmp_path_factory: pytest.TempPathFactory) -> Language:
    folder = speaking_harmony(tiny_chat, tmp_path_factory.mktemp("harmony"))
    return Language.load(folder, eos="<|return|>")


def tag(node: Node) -> Grammar:
    return Grammar("structural_tag", structural.write(node))


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (Grammar("regex", "[^x]*"), "So"),
        (Grammar("ebnf", "root ::= [^x]*"), "So"),
        (Grammar("json_object", ""), '{"a'),
        (Grammar("json_schema", '{"type":"string","minLength":3}'), '"a'),
        (tag(AnyText()), "So"),
        (tag(AnyText(("stop",))), "So"),
        (tag(Regex("[^x]*")), "So"),
        (tag(SOME), '{"a": "a'),
        (tag(Tag("<a>", AnyText(), "</a>")), "<a>So"),
        (tag(Tag("<a>", AnyText(), ("</a>", "</b>"))), "<a>So"),
        (tag(Tag("", XML, "")), "<parameter=p>\nSo"),
        (tag(TriggeredTags(("<a",), (Tag("<a>", AnyText(), "</a>"),))), "So"),
        (tag(TriggeredTags(("<a",), (Tag("<a>", AnyText(), "</a>"),))), "So <a>Well"),
    ],
)
def test_no_marker_is_text(language: Language, grammar: Grammar, said: str) -> None:
    matcher = language.matcher(grammar)
    assert language.follow(matcher, said) == said
    assert len(language.admitted(matcher)) > 50
    assert not set(language.admitted(matcher).tolist()) & set(language.vocabulary.added.values()) - {language.eos}


CALLED = TriggeredTags(
    ("<|call|>", "<b"), (Tag("<|call|>a ", NUMBER, "<|end|>"), Tag("<|call|>b ", NUMBER, "."), Tag("<b>", NUMBER, "<|end|>"))
)


@pytest.mark.parametrize(
    ("node", "text", "fits"),
    [
        (Text("a<|end|>b"), "a<|end|>b", True),
        (Text("a<|end|>b"), "ab", False),
        (Sequence((Token("<|end|>"), Text("b"))), "<|end|>b", True),
        (Tag("<|start|>", AnyText(), "\n<|end|>"), "<|start|>Hm <x>\n<|end|>", True),
        (Tag("<|start|>", AnyText(), "\n<|end|>"), "<|start|>Hm<|start|>\n<|end|>", False),
        (Star(Tag("<|start|>", AnyText(("x",)), ("<|end|>", "."))), "<|start|>a<|end|><|start|>b.<|start|>c<|end|>", True),
        (Star(Tag("<|start|>", AnyText(("x",)), ("<|end|>", "."))), "<|start|>ax<|end|>", False),
        (CALLED, "Well", True),
        (CALLED, "Well <|call|>a 1<|end|> and <|call|>b 2. and <b>3<|end|> so", True),
        (CALLED, '<|call|>a "x"<|end|>', False),
        (CALLED, "<|call|>c 1<|end|>", False),
        (CALLED, '<b>"x"<|end|> and <|call|>a 1<|end|>', False),
        (CALLED, "Well<|end|>", False),
        (replace(CALLED, at_least_one=True), "<|call|>a 1<|end|> so", True),
        (replace(CALLED, at_least_one=True), "so <|call|>a 1<|end|>", False),
        (replace(CALLED, stop_after_first=True), "so <|call|>a 1<|end|>", True),
        (replace(CALLED, stop_after_first=True), "so <|call|>a 1<|end|> so", False),
        (replace(CALLED, excludes=("never",)), "now <|call|>a 1<|end|> now", True),
        (replace(CALLED, excludes=("never",)), "never <|call|>a 1<|end|>", False),
    ],
)
def test_markers_are_the_tokens_they_name(language: Language, node: Node, text: str, fits: bool) -> None:
    assert language.takes(tag(node), text) == fits


CALL = '{"name": "f", "parameters": {"a": 1}}'


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        (CALL, True),
        (f"<|call|>{CALL}", True),
        (f"Sure.<|call|>{CALL}", True),
        (CALL.replace("1", '"x"'), False),
        (f"<|call|>{CALL}".replace("1", '"x"'), False),
        (f"Sure.<|call|>{CALL}".replace("1", '"x"'), False),
        ("Sure.<|call|>print(1)", False),
    ],
)
def test_calls_behind_a_marker_in_prose_obey(language: Language, text: str, fits: bool) -> None:
    assert LLAMA3.tag is not None
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
    tool = Tool.model_validate({"function": {"name": "f", "strict": True, "parameters": schema}})
    marked = dataclasses.replace(LLAMA3.tag, marker="<|call|>")  # one that this vocabulary has
    grammar = strict(marked, [tool], language.vocabulary.added, several=True)
    assert grammar is not None
    assert language.takes(grammar, text) == fits

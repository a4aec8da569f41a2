"""Grammars behind reasoning whose markers are no tokens: the whole output is the grammar's, and the parser reads it alike."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest

from banyan_runtime import wire
from banyan_runtime.config import ServerConfig
from banyan_runtime.front.chat.events import Content
from banyan_runtime.front.chat.reasoning import FORMATS, ReasoningParser, Start
from banyan_runtime.front.plan import ChatPlan
from banyan_runtime.front.prepare.constraints import Constraints
from banyan_runtime.front.prepare.output import behind_thoughts
from banyan_runtime.front.prepare.planner import Planner
from banyan_runtime.front.text.text import Text
from banyan_runtime.grammar.structural import read_structural
from banyan_runtime.wire import Grammar
from tests.unit.front.support import engine_info
from tests.unit.grammar.walks import Language

FORM = FORMATS["qwen3"]
CHOICE = Grammar("choice", json.dumps(["yes", "no", "<maybe>"]))
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
F: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": OBJECT}}


@pytest.fixture(scope="module")
def language(qwen25_tokenizer: Path) -> Language:
    """Its vocabulary spells the markers in several tokens, and in several ways."""
    return Language.load(qwen25_tokenizer, eos="<|im_end|>")


@pytest.fixture(scope="module")
def inviting(language: Language) -> set[int]:
    """Tokens with any of what the markers begin and end with."""
    return {token_id for token_id in range(language.vocabulary.tokens) if set(language.tokenizer.decode([token_id])) & set("<>/")}


@cache
def planner(folder: Path) -> Planner:
    config = ServerConfig(model_path=str(folder), reasoning_parser="qwen3", tool_call_parser="hermes")
    text = Text.load(config, folder)
    return Planner(config, text, engine_info(vocab_size=151_936), Constraints.load(folder, text.defaults.eos_ids))


def constraint(planner: Planner, **body: Any) -> wire.Constraint:
    made = planner.plan("chat", json.dumps({"messages": [{"role": "user", "content": "Hello"}], **body}).encode(), "request")
    assert isinstance(made, ChatPlan)
    found = made.requests[0].constraint
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("yes", True),
        ("<maybe>", True),  # which begins as the marker does
        ("<html>", False),
        ("<think>Hm.</think>no", True),
        ("<think>\nHm. 1 < 2, </ think>\n</think>\n\nno", True),
        ("<think>Hm </think>yes", True),  # " </" is one token, and "</" another
        ("<think></think><maybe>", True),
        ("<think>Hm.</think> maybe", False),
        ("<think>Hm.</think>\n\n\nno", False),
        ("<think>Hm.", False),
        ("think>Hm.</think>no", False),
    ],
)
def test_an_output_may_begin_with_thoughts_and_then_obeys(language: Language, text: str, fits: bool) -> None:
    assert language.takes(behind_thoughts(FORM, Start.OPTIONAL, CHOICE), text) == fits


def test_thoughts_that_the_prompt_has_begun_are_ended_first(language: Language) -> None:
    grammar = behind_thoughts(FORM, Start.REASONING, CHOICE)
    assert language.takes(grammar, "Hm.</think>no")
    assert language.takes(grammar, "</think>\n\nno")
    assert not language.takes(grammar, "no")


@pytest.mark.matrix(gate=2)
@pytest.mark.parametrize("start", [Start.OPTIONAL, Start.REASONING])
@pytest.mark.parametrize("seed", range(8))
def test_whatever_comes_the_parser_finds_an_answer_that_obeys(language: Language, inviting: set[int], start: Start, seed: int) -> None:
    """However the markers are spelled: tokens are drawn, and the markers begun where they may be."""
    dice, matcher = Random(seed), language.matcher(behind_thoughts(FORM, start, CHOICE))
    ids: list[int] = []
    ending = language.ids("</think>yes")
    while not matcher.is_terminated and not (ended := matcher.is_completed and dice.random() < 0.5):
        admitted = set(language.admitted(matcher).tolist())
        known = admitted & inviting if dice.random() < 0.5 else admitted
        token_id = dice.choice(sorted(known or admitted))
        if len(ids) > 30 and ending and (following := ending.pop(0)) in admitted:  # to an end
            token_id = following
        assert matcher.accept(token_id)
        ids.append(token_id)
        if len(ids) > 200:
            pytest.fail(language.text(ids))
    assert matcher.is_completed or ended
    parser = ReasoningParser(FORM, start, end_is_token=False)
    events = [*parser.feed(language.text(one for one in ids if one != language.eos), ids), *parser.finish()]
    content = "".join(event.text for event in events if isinstance(event, Content))
    assert content in json.loads(CHOICE.text), language.text(ids)


@pytest.mark.parametrize(
    ("body", "text", "fits"),
    [
        ({"regex": "yes|no"}, "<think>Hm</think>\nno", True),
        ({"regex": "yes|no"}, "<think>Hm</think>\nmaybe", False),
        ({"response_format": {"type": "json_object"}}, '<think>{"</think>{"b": 1}', True),
        ({"response_format": {"type": "json_object"}}, "<html>", False),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": OBJECT}}}, '<think>x</think>{"a": "x"}', False),
        ({"ebnf": 'root ::= "a" [0-9]'}, "<think>x</think>a1", True),
        ({"structural_tag": {"format": {"type": "const_string", "value": "x"}}}, "<think>y</think>x", True),
        ({"tools": [F], "tool_choice": "required"}, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', True),
        (
            {"tools": [F], "tool_choice": "required"},
            '<think>x</think><tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
            True,
        ),
        ({"tools": [F], "tool_choice": "required"}, "<think>x</think>Hi", False),
    ],
)
def test_every_constraint_of_a_chat_is_written_so(
    qwen25_tokenizer: Path, language: Language, body: dict[str, Any], text: str, fits: bool
) -> None:
    found = constraint(planner(qwen25_tokenizer), **body)
    assert found.after < 0
    assert (found.kind.startswith("json")) == ("response_format" in body)
    assert language.takes(found.grammar, text) == fits


@pytest.mark.parametrize("whitespace", ["bounded", "any", "none"])
def test_json_behind_thoughts_has_the_blanks_that_it_has_alone(language: Language, whitespace: Any) -> None:
    alone = Grammar("json_schema", json.dumps(OBJECT), whitespace)
    whole = behind_thoughts(FORM, Start.OPTIONAL, alone)
    for text in ('{"a": 1}', '{"a":1}', '{\n"a":  1}', '{"a":' + 40 * " " + "1}", '{"a":' + 600 * " " + "1}"):
        assert language.takes(whole, f"<think>Hm</think>{text}") == language.takes(whole, text) == language.takes(alone, text), text


def test_thousands_of_choices_may_be_behind_thoughts(language: Language) -> None:
    grammar = behind_thoughts(FORM, Start.OPTIONAL, Grammar("choice", json.dumps([f"number {count}." for count in range(2800)])))
    assert language.takes(grammar, "<think>Hm</think>number 2799.")
    assert language.takes(grammar, "number 77.")
    assert not language.takes(grammar, "number 77")


def test_many_choices_may_have_text_behind_them(language: Language) -> None:
    """Some begin with one another."""
    tag = {"type": "sequence", "elements": [{"type": "or", "elements": []}, {"type": "const_string", "value": " x"}]}
    tag["elements"][0]["elements"] = [{"type": "const_string", "value": f"n{count}"} for count in range(100)]  # type: ignore[index]
    grammar = Grammar("structural_tag", read_structural({"format": tag}))
    assert language.takes(grammar, "n10 x")
    assert language.takes(grammar, "n1 x")
    assert not language.takes(grammar, "n100 x")


def test_markers_that_are_tokens_need_no_grammar(qwen3_tokenizer: Path) -> None:
    found = constraint(planner(qwen3_tokenizer), regex="yes|no")
    assert found.grammar == Grammar("regex", "yes|no")
    assert min(found.after, found.opens) > 100_000

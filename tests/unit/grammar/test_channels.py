"""Grammars of gpt-oss: what stands in which channel. Read back by the parser that reads its outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from banyan_runtime import wire
from banyan_runtime.config import ServerConfig
from banyan_runtime.front.plan import ChatPlan
from banyan_runtime.front.prepare.constraints import Constraints
from banyan_runtime.front.prepare.planner import Planner
from banyan_runtime.front.text.text import Text
from tests.unit.front.support import engine_info
from tests.unit.grammar.harmony import speaking_harmony
from tests.unit.grammar.walks import Language

FINAL = "<|channel|>final<|message|>"
THOUGHT = '<|channel|>analysis<|message|>Hm. {"a": "x"}<|end|><|start|>assistant'
PREAMBLE = "<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
OWN: dict[str, Any] = {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}}
F: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
STRICT: dict[str, Any] = {"type": "function", "function": {**F["function"], "strict": True}}


@pytest.fixture(scope="module")
def folder(tiny_chat: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return speaking_harmony(tiny_chat, tmp_path_factory.mktemp("harmony"))


@pytest.fixture(scope="module")
def language(folder: Path) -> Language:
    return Language.load(folder, eos="<|return|>")


@pytest.fixture(scope="module")
def planner(folder: Path) -> Planner:
    config = ServerConfig(model_path=str(folder))
    text = Text.load(config, folder)
    return Planner(config, text, engine_info(vocab_size=832), Constraints.load(folder, text.defaults.eos_ids))


def constraint(planner: Planner, content: str = "", **body: Any) -> wire.Constraint:
    messages = [{"role": "user", "content": "Hello"}]
    if content:
        messages.append({"role": "assistant", "content": content})
        body["continue_final_message"] = True
    made = planner.plan("chat", json.dumps({"messages": messages, **body}).encode(), "request")
    assert isinstance(made, ChatPlan)
    found = made.requests[0].constraint
    assert found is not None
    assert found.after < 0
    return found


@pytest.mark.parametrize(
    ("body", "text", "fits"),
    [
        (OWN, f'{FINAL}{{"a": 1}}', True),
        (OWN, f'{THOUGHT}{FINAL}{{"a": 1}}', True),
        (OWN, f'{THOUGHT}{THOUGHT}{FINAL}{{"a": 1}}', True),
        (OWN, f'{THOUGHT}{FINAL}{{"a": "x"}}', False),
        (OWN, f'{THOUGHT}{{"a": 1}}', False),
        (OWN, f'{PREAMBLE}{FINAL}{{"a": 1}}', False),  # it would be content before the answer
        (OWN, '{"a": 1}', False),
        (OWN, f"<|channel|>analysis<|message|>Hm{FINAL}{{bad<|end|>", False),
        ({"response_format": {"type": "json_object"}}, f'{THOUGHT}{FINAL}{{"b": "x"}}', True),
        ({"regex": "[A-Z]{3}"}, f"{THOUGHT}{FINAL}ABC", True),
        ({"regex": "[A-Z]{3}"}, f"{THOUGHT}{FINAL}abc", False),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, f"{FINAL}no", True),
        ({"ebnf": 'root ::= "a" [0-9]'}, f"{THOUGHT}{FINAL}a1", True),
        ({"structural_tag": {"format": {"type": "const_string", "value": "x"}}}, f"{THOUGHT}{FINAL}x", True),
        ({"tools": [F], "tool_choice": "required"}, f"{THOUGHT}{CALL}", True),
        ({"tools": [F], "tool_choice": "required"}, CALL, True),
        ({"tools": [F], "tool_choice": "required"}, CALL.replace("1", '"x"'), False),
        ({"tools": [F], "tool_choice": "required"}, f"{THOUGHT}{FINAL}Hi", False),
        ({"tools": [F], "tool_choice": {"type": "function", "function": {"name": "f"}}}, f"{THOUGHT}{CALL}", True),
        ({"tools": [F], **OWN}, f"{THOUGHT}{CALL}", True),
        ({"tools": [F], **OWN}, f'{THOUGHT}{FINAL}{{"a": 1}}', True),
        ({"tools": [F], **OWN}, f"{THOUGHT}{FINAL}Hi", False),
        ({"tools": [STRICT]}, f"{THOUGHT}{PREAMBLE}{CALL}", True),
        ({"tools": [STRICT]}, f"{THOUGHT}{PREAMBLE}{CALL}".replace("1", '"x"'), False),
        ({"tools": [STRICT]}, f"{THOUGHT}{FINAL}Whatever {{ there is", True),
        ({"tools": [STRICT]}, f"{FINAL}Hi<|end|><|start|>assistant{CALL}".replace("1", '"x"'), False),
        ({"tools": [STRICT]}, f"<|channel|>analysis<|message|>Hm{CALL}".replace("1", '"x"'), False),
    ],
)
def test_a_grammar_begins_where_the_content_of_its_channel_does(
    language: Language, planner: Planner, body: dict[str, Any], text: str, fits: bool
) -> None:
    matcher = language.matcher(constraint(planner, **body).grammar)
    followed = language.follow(matcher, text)
    assert (followed == text and matcher.is_completed) == fits
    if fits:
        assert language.eos in language.admitted(matcher) or matcher.is_terminated


def test_a_thought_that_the_prompt_has_begun_is_ended_first(language: Language, folder: Path, planner: Planner) -> None:
    found = constraint(planner, "<|channel|>analysis<|message|>Hm", chat_template_kwargs={}, **OWN)
    assert language.takes(found.grammar, f'm.<|end|><|start|>assistant{FINAL}{{"a": 1}}')
    assert not language.takes(found.grammar, '{"a": 1}')


def test_an_answer_that_the_prompt_has_begun_goes_on(language: Language, planner: Planner) -> None:
    found = constraint(planner, f"{FINAL}So ", **OWN)
    assert language.takes(found.grammar, '{"a": 1}')

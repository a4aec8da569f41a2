"""Conversations as agents send them, under the chat templates of some eighty real families: every text reaches the model."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Final

import pytest

from banyan_runtime.front.chat.messages import ChatMessage
from banyan_runtime.front.chat.prompt import ChatOptions, render
from banyan_runtime.front.chat.template import ChatTemplate
from banyan_runtime.front.errors import ApiError
from banyan_runtime.front.text.text import template_of
from tests.conftest import collected_templates
from tests.unit.front import real

Turn = dict[str, Any]
ID: Final = "abcDEF123"
PARAMETERS: Final = {"type": "object", "properties": {"city": {"type": "string", "description": "Where."}}, "required": ["city"]}
TOOL: Final[Turn] = {"type": "function", "function": {"name": "look", "description": "The weather.", "parameters": PARAMETERS}}


def turns_of(shape: str, call_id: str = ID, arguments: str = '{"city": "Oslo"}') -> list[Turn]:
    """A turn for each letter, with a word of its own: system, developer, user, assistant, call, tool, or nothing said (e, n)."""
    roles = {"S": "system", "D": "developer", "U": "user", "A": "assistant", "C": "assistant", "T": "tool", "e": "user", "n": "assistant"}
    turns: list[Turn] = []
    for place, letter in enumerate(shape):
        turn: Turn = {"role": roles[letter], "content": None if letter == "C" else f"Word{place}x" if letter.isupper() else ""}
        if letter == "C":
            turn["tool_calls"] = [{"id": call_id, "type": "function", "function": {"name": "look", "arguments": arguments}}]
        if letter == "T":
            turn["tool_call_id"] = call_id
        turns.append(turn)
    return turns


CONVERSATIONS: Final[Mapping[str, list[Turn]]] = {
    **{shape: turns_of(shape) for shape in ("U", "SU", "SUAU", "SSU", "SDU", "DDU", "DU", "UD", "SUD", "SUASU", "SUSAU", "SUAUS")},
    **{shape: turns_of(shape) for shape in ("SUU", "UAAU", "Se", "UAe", "UnU", "eee")},
    **{shape: turns_of(shape) for shape in ("SUCT", "SUCTAU", "SUCTS", "SUCTSCT", "SUCTU", "SUCTUCT")},
    "calls at once": [
        *turns_of("U"),
        {"role": "assistant", "content": None, "tool_calls": [{**turns_of("C", f"abcDEF12{at}")[0]["tool_calls"][0]} for at in (1, 2)]},
        *({"role": "tool", "tool_call_id": f"abcDEF12{at}", "content": f"Result{at}x"} for at in (1, 2)),
    ],
    "ids of another server": turns_of("UCTU", "call_0123456789abcdef"),
    **{f"arguments {text!r}": turns_of("UCTU", arguments=text) for text in ("", " ", "null", "[1]", "7", '{"city": "Os')},
}
WITHOUT_TOOLS: Final = {
    "google-gemma-2-2b-it": "it knows no role tool",
    "gemma3": "it knows no role tool",
    "llama-cpp-rwkv-world": "it shows no results",
    "microsoft-Phi-3.5-mini-instruct": "it shows no results",
    "Kimi-K2-Instruct": "it changes a list, which no sandbox of Jinja's allows",
    "Kimi-K2-Thinking": "it changes a list, which no sandbox of Jinja's allows",
}
BROKEN: Final = {
    "fireworks-ai-llama-3-firefunction-v2": "it needs variables of its own",
    "llama-cpp-deepseek-r1": "it writes what a filter gives, and no list of it, as JSON",
}


@functools.cache
def templates() -> Mapping[str, ChatTemplate]:
    """Those of the collection and of the families at hand. Some of the collection are for requests with tools alone."""
    found = {name: template for name in real.TEMPLATES if (template := real.text(name).template) is not None}
    for file in sorted(collected_templates().glob("*.jinja")):
        source = file.read_text()
        made = template_of(None, source) if file.stem.endswith("tool_use") else source
        found[file.stem] = ChatTemplate(made or "", {"bos_token": "<s>", "eos_token": "</s>"})
    return found


@pytest.mark.long  # it fetches 80 MB
@pytest.mark.parametrize("tools", [[], [TOOL]], ids=["", "tools"])
@pytest.mark.parametrize("title", CONVERSATIONS)
def test_every_text_of_a_conversation_reaches_the_model(title: str, tools: list[Turn]) -> None:
    turns = CONVERSATIONS[title]
    called = any(turn["role"] == "tool" for turn in turns)
    missing: dict[str, object] = {}
    for name, template in templates().items():
        if name in BROKEN or (called and name in WITHOUT_TOOLS):
            continue
        try:
            text = render(template, [ChatMessage.model_validate(turn) for turn in turns], ChatOptions(tools=tools)).text
        except ApiError as error:
            missing[name] = error.message
            continue
        if lost := [turn["content"] for turn in turns if turn["content"] and turn["content"] not in text]:
            missing[name] = lost
    assert missing == {}

"""What a client has set to end the answer ends the answer: not the thoughts before it, however the tokens come."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from banyan_runtime import wire
from banyan_runtime.config import ServerConfig
from banyan_runtime.front.plan import GenerateRequest, ToolUse
from banyan_runtime.front.speech import Speech
from banyan_runtime.front.text.text import Text
from tests.unit.front.support import byte_level

MARKERS = ("<|endoftext|>", "<|im_end|>", "<|channel|>", "<|message|>", "<|start|>", "<|end|>")
THOUGHT = "Which language? One\n\nwith words."
Found = tuple[str, str, str | int | None]


def loaded(folder: Path, parser: str) -> Text:
    """Tokens are bytes, so markers of qwen3 are texts of many tokens, and those of gpt-oss are tokens."""
    byte_level(folder, added=MARKERS)
    return Text.load(ServerConfig(model_path=str(folder), reasoning_parser=parser, tool_call_parser="hermes"), folder)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return loaded(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return loaded(tmp_path_factory.mktemp("gpt-oss"), "gpt-oss")


def heard(
    text: Text, said: str | Sequence[int], reasoning: Any = "reasoning", *, least: int = 0, endpoint: str = "chat", **asked: Any
) -> Found:
    """The reasoning, the content and what ended it."""
    request = GenerateRequest(
        token_ids=wire.pack_ids([1]), sampling=wire.Sampling(10_000, least), reasoning=reasoning, logprobs=wire.LogprobRequest(0), **asked
    )
    speech = Speech(text, request, endpoint, "chatcmpl-1")
    ids = text.needed_tokenizer.encode(said, add_special_tokens=False) if isinstance(said, str) else said
    number = 0
    for number, token_id in enumerate(ids, 1):
        speech.feed(token_id, number)
        if speech.over:
            break
    speech.finish(number)
    content, thoughts, _, _ = speech.take()
    return thoughts, content, speech.matched


@pytest.mark.parametrize("reasoning", ["reasoning", "optional"])
@pytest.mark.parametrize(
    ("asked", "matched"),
    [
        ({"stops": ("language",)}, "language"),
        ({"stops": ("\n\n", "age.")}, "age."),
        ({"stops": ("\nWith",)}, None),
    ],
)  # fmt: skip
def test_thoughts_are_not_looked_through(qwen3: Text, reasoning: Any, asked: dict[str, Any], matched: str | None) -> None:
    opened = "" if reasoning == "reasoning" else "<think>\n"
    thoughts, content, found = heard(qwen3, f"{opened}{THOUGHT}\n</think>\n\nA language.", reasoning, **asked)
    assert (thoughts, found) == (THOUGHT, matched)
    whole = "A language."
    assert content == (whole if matched is None else whole[: whole.index(matched)])


def test_what_begins_without_a_thought_is_looked_through_from_its_first_character(qwen3: Text) -> None:
    assert heard(qwen3, "\nA language.", "optional", stops=("\nA",)) == ("", "", "\nA")
    assert heard(qwen3, "<b>", "optional", stops=("<",)) == ("", "", "<")
    assert heard(qwen3, "A language.", "content", stops=("lang",)) == ("", "A ", "lang")
    assert heard(qwen3, "A language.", None, endpoint="completions", stops=("lang",)) == ("", "A ", "lang")
    assert heard(qwen3, "<think>a language</think>", None, endpoint="completions", stops=("lang",)) == ("", "<think>a ", "lang")


def test_thoughts_without_an_end_are_not_cut(qwen3: Text) -> None:
    assert heard(qwen3, THOUGHT, stops=("language", "words.")) == (THOUGHT, "", None)
    assert heard(qwen3, "<thi", "optional", stops=("<th",)) == ("", "", "<th")


def test_the_end_of_the_reasoning_and_a_stop_string_may_be_one_piece_of_text(tiny_chat: Path) -> None:
    text = Text.load(ServerConfig(model_path=str(tiny_chat), reasoning_parser="qwen3"), tiny_chat)
    tokenizer = text.needed_tokenizer
    euro = [tokenizer.token_id(character) or 0 for character in "âĤ¬"]  # its last byte brings what the bytes before it held back
    ids = [*tokenizer.encode("A thought</think>", add_special_tokens=False), *euro[:2]]
    assert heard(text, [*ids, *tokenizer.encode("stop", add_special_tokens=False)], stops=("stop",))[1:] == ("\ufffd", "stop")


@pytest.mark.parametrize("separate", [False, True])
def test_reasoning_that_stays_in_the_content_is_not_looked_through_either(qwen3: Text, separate: bool) -> None:
    said = "Well.\n\nYes.</think>\n\nHere.\n\nThere."
    thoughts, content, matched = heard(qwen3, said, stops=("\n\n",), separate_reasoning=separate)
    assert matched == "\n\n"
    assert (thoughts, content) == (("Well.\n\nYes.", "Here.") if separate else ("", "Well.\n\nYes.</think>\n\nHere."))
    (line,) = qwen3.needed_tokenizer.encode("\n", add_special_tokens=False)
    thoughts, content, matched = heard(qwen3, said, stop_ids=(line,), separate_reasoning=separate)
    assert matched == line
    assert (thoughts, content) == (("Well.\n\nYes.", "Here.") if separate else ("", "Well.\n\nYes.</think>\n\nHere."))


def test_a_stop_token_counts_behind_the_reasoning_from_the_first_one_on(qwen3: Text) -> None:
    ends, a = qwen3.needed_tokenizer.encode("<|im_end|>a", add_special_tokens=False)
    assert heard(qwen3, "A banana<|im_end|></think>\n\nHola", stop_ids=(ends, a)) == ("A banana", "Hol", a)
    assert heard(qwen3, "Fix</think>\n\naaa", stop_ids=(a,)) == ("Fix", "", a)
    assert heard(qwen3, "Fix</think><|im_end|>", stop_ids=(ends,)) == ("Fix", "", ends)
    assert heard(qwen3, "Fix</think>Hola", stop_ids=(a,), include_stop=True) == ("Fix", "Hola", a)
    assert heard(qwen3, "aha", "optional", stop_ids=(a,)) == ("", "", a)
    assert heard(qwen3, "aha", "optional", stop_ids=(a,), least=1) == ("", "ah", a)
    assert heard(qwen3, "Fix</think>Hoola", stops=("oo",), stop_ids=(a,)) == ("Fix", "H", "oo")
    assert heard(qwen3, "Fix</think>Hola", stops=("olx",), stop_ids=(a,)) == ("Fix", "Hol", a)


def test_thoughts_count_as_tokens_that_must_come(qwen3: Text) -> None:
    for least, matched in ((0, "x"), (10, "x"), (12, None)):
        assert heard(qwen3, "ok</think>x", stops=("x",), least=least) == ("ok", "" if matched else "x", matched)


def test_calls_behind_the_reasoning_are_looked_through(qwen3: Text) -> None:
    tools = ToolUse(format="hermes", schemas=b'{"f":{"type":"object"}}')
    said = 'f {"a": 1}</think>\n\nI call.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert heard(qwen3, said, tools=tools, stops=('{"a"',)) == ('f {"a": 1}', "I call.", '{"a"')
    assert heard(qwen3, "f\n<tool_call>\n{}", tools=tools, stops=("_call",)) == ("f", "<tool", "_call")


CHANNELS = (
    "<|channel|>analysis<|message|>The assistant's final language.<|end|><|start|>assistant<|channel|>commentary<|message|>I look."
    "<|end|><|start|>assistant<|channel|>analysis<|message|>Done, language.<|end|><|start|>assistant<|channel|>final<|message|>A language."
)


@pytest.mark.parametrize("separate", [False, True])
def test_of_channels_those_are_looked_through_that_are_the_answer(gpt_oss: Text, separate: bool) -> None:
    stops = ("language", "assistant", "final")
    thoughts, content, matched = heard(gpt_oss, CHANNELS, "optional", separate_reasoning=separate, stops=stops)
    assert matched == "language"
    assert (content == "I look.\nA ") == separate
    assert content.endswith("\nA ")
    assert thoughts == ("The assistant's final language.\nDone, language." if separate else "")
    thoughts, content, matched = heard(gpt_oss, CHANNELS, "optional", stops=("look.\n", "look.A"))
    assert (content, matched) == ("I look.\nA language.", None)
    assert heard(gpt_oss, CHANNELS, "optional", stops=(".<",), separate_reasoning=separate)[2] is None
    end, look = gpt_oss.needed_tokenizer.encode("<|end|>l", add_special_tokens=False)
    assert heard(gpt_oss, CHANNELS, "optional", stop_ids=(end,)) == ("The assistant's final language.", "I look.", end)
    assert heard(gpt_oss, CHANNELS, "optional", stop_ids=(look,))[1:] == ("I ", look)

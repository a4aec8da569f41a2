"""Which tokens spell the content, behind stop strings and a parser of reasoning and calls, however the tokens come."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from banyan_runtime import wire
from banyan_runtime.config import ServerConfig
from banyan_runtime.front.plan import GenerateRequest, ToolUse
from banyan_runtime.front.speech import Speech
from banyan_runtime.front.text.text import Text

THINK, END = "<think>", "</think>"
PIECES = (
    "a",
    "aa",
    "b",
    "t",
    "h",
    " a",
    " the",
    "<",
    "</",
    "think",
    ">",
    "in",
    "k>",
    ".",
    "\n",
    "é",
    "€",
    "😀",
)  # so much looks like a marker


@pytest.fixture(scope="module")
def text(tiny_chat: Path) -> Text:
    return Text.load(ServerConfig(model_path=str(tiny_chat), reasoning_parser="qwen3", tool_call_parser="hermes"), tiny_chat)


def speech(text: Text, **options: Any) -> Speech:
    request = GenerateRequest(
        token_ids=wire.pack_ids([1]), sampling=wire.Sampling(1000), logprobs=wire.LogprobRequest(0), reasoning="optional", **options
    )
    return Speech(text, request, "responses", "resp_1")


def heard(speech: Speech, tokens: list[int], dice: random.Random) -> tuple[list[int], str]:
    """Say these tokens, looking now and then: the tokens that were told of, and the content."""
    told, content, unsaid = list[int](), "", 0
    assert speech.spelling is not None
    for number, token in enumerate(tokens, 1):
        speech.feed(token, number)
        if number == len(tokens):
            speech.finish(number)
        if number == len(tokens) or dice.random() < 0.5:
            content += speech.take()[0]
            spelled = speech.spelling.take()
            assert all(ordinal >= unsaid for ordinal in spelled.tokens)
            told += spelled.tokens
            unsaid = spelled.unsaid
    return told, content


@pytest.mark.parametrize("thoughts", ["", "\n", "\nWell, the a.\n", "\na\n"])
def test_the_tokens_of_the_content_are_told_once_and_no_others(text: Text, thoughts: str) -> None:
    tokenizer = text.needed_tokenizer
    of = {piece: list(tokenizer.encode(piece, add_special_tokens=False)) for piece in PIECES}
    (silent,) = tokenizer.encode("<|im_start|>", add_special_tokens=False)
    before = list(tokenizer.encode(f"{THINK}{thoughts}{END}\n\n" if thoughts else "", add_special_tokens=False))
    for case in range(400):
        dice = random.Random(case)
        chosen = [dice.choice(PIECES) for _ in range(dice.randint(1, 12))]
        while chosen[0].isspace() or chosen[0].startswith(" "):
            chosen[0] = dice.choice(PIECES)
        said = "".join(chosen)
        if THINK in said or END in said:
            continue
        tokens, expected = list(before), []
        for piece in chosen:
            if dice.random() < 0.1:
                tokens.append(silent)
            expected += range(len(tokens), len(tokens) + len(of[piece]))
            tokens += of[piece]
        whole = f"{THINK}{thoughts}{END}\n\n{said}" if thoughts else said
        at = dice.randrange(len(whole))
        stops = (whole[at : at + dice.randint(1, 9)] + "¤",) if dice.random() < 0.7 else ()
        told, content = heard(speech(text, stops=stops), tokens, dice)
        assert content == said, (case, stops)
        assert told == expected, (case, said, stops)


def test_a_call_is_not_told_of_and_what_is_said_before_it_is(text: Text) -> None:
    tokenizer = text.needed_tokenizer
    tools = ToolUse(format="hermes", schemas=b'{"f":{"type":"object","properties":{"a":{"type":"string"}}}}')
    said = tokenizer.encode("I ask f for a.", add_special_tokens=False)
    call = tokenizer.encode('\n<tool_call>\n{"name": "f", "arguments": {"a": "I ask"}}\n</tool_call>', add_special_tokens=False)
    for case in range(50):
        one = speech(text, tools=tools)
        told, content = heard(one, [*said, *call], random.Random(case))
        assert (content.strip(), one.calls) == ("I ask f for a.", True)
        assert told[: len(said)] == list(range(len(said)))
        assert len(told) <= len(said) + 1  # the line break


def test_bytes_that_make_no_character_are_told_with_their_replacement(text: Text) -> None:
    tokenizer = text.needed_tokenizer
    euro = list(tokenizer.encode("€", add_special_tokens=False))
    assert len(euro) > 1
    tokens = [*tokenizer.encode("a", add_special_tokens=False), *euro[:-1]]
    told, content = heard(speech(text), tokens, random.Random(0))
    assert (content, told) == ("a\ufffd", list(range(len(tokens))))


@pytest.mark.parametrize("held", ["Paris.\n</think>\n\nParis.¤", "is.\n</think>¤"])
def test_an_answer_that_repeats_a_thought_is_told_by_its_own_tokens(text: Text, held: str) -> None:
    """Though a stop string held both back until the end."""
    tokens, rest = (
        list(text.needed_tokenizer.encode(part, add_special_tokens=False)) for part in (f"{THINK}\nParis.\n{END}\n\n", "Paris.")
    )
    for case in range(10):
        told, content = heard(speech(text, stops=(held,)), [*tokens, *rest], random.Random(case))
        assert (content, told) == ("Paris.", list(range(len(tokens), len(tokens) + len(rest))))

"""Reasoning told from content, whatever way the text arrives."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from banyan_runtime.config import ServerConfig
from banyan_runtime.errors import ConfigError
from banyan_runtime.front.chat.events import Content, Event, Reasoning
from banyan_runtime.front.chat.reasoning import FORMATS, ReasoningFormat, ReasoningParser, Start
from banyan_runtime.front.text.text import Text
from tests.unit.front import support
from tests.unit.front.support import splits

QWEN = FORMATS["qwen3"]
KIMI = FORMATS["kimi"]


def parse(deltas: list[str], start: Start, form: ReasoningFormat = QWEN, *, end_is_token: bool = True, stream: bool = True) -> list[Event]:
    parser = ReasoningParser(form, start, end_is_token=end_is_token, stream=stream)
    return [event for delta in deltas for event in parser.feed(delta, (0,))] + parser.finish()


def joined(events: list[Event]) -> tuple[str, str]:
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    return reasoning, "".join(event.text for event in events if isinstance(event, Content))


CASES = [
    (Start.REASONING, QWEN, "a b</think>\n\nHi", "a b", "Hi"),
    (Start.REASONING, QWEN, "a</think>b", "a", "b"),
    (Start.REASONING, QWEN, "a </thing b", "a </thing b", ""),
    (Start.OPTIONAL, QWEN, "<think>\nx\n</think>\n\ny", "x", "y"),
    (Start.OPTIONAL, QWEN, "\n<think>x</think>y", "x", "y"),
    (Start.OPTIONAL, QWEN, "Hello <think>z", "", "Hello <think>z"),
    (Start.OPTIONAL, QWEN, "  <thin", "", "  <thin"),
    (Start.CONTENT, QWEN, "x</think>y", "", "x</think>y"),
    (Start.REASONING, QWEN, "<think>a</think>b", "a", "b"),
    (Start.REASONING, QWEN, "\n<think>\na", "a", ""),
    (Start.REASONING, QWEN, "<thin air</think>b", "<thin air", "b"),
    (Start.OPTIONAL, QWEN, "<think>\n\n</think>\n\nHi", "", "Hi"),
    (Start.OPTIONAL, KIMI, "◁think▷a◁/think▷b", "a", "b"),
    (Start.REASONING, QWEN, "a  \n b \n</think>c", "a  \n b", "c"),
    (Start.REASONING, QWEN, "never ends  \n", "never ends", ""),
    (Start.REASONING, QWEN, "a</think>\n</think>\n\nb</think>c", "a", "b</think>c"),
    (Start.REASONING, QWEN, "a</think>\n\n  indented", "a", "  indented"),
    (Start.REASONING, QWEN, "a</think>\n\n", "a", ""),
    (Start.REASONING, QWEN, "", "", ""),
]


@pytest.mark.parametrize(("start", "form", "text", "reasoning", "content"), CASES)
def test_every_way_of_cutting_gives_the_same_reasoning_and_content(
    start: Start, form: ReasoningFormat, text: str, reasoning: str, content: str
) -> None:
    for deltas in splits(text):
        assert joined(parse(deltas, start, form)) == (reasoning, content), deltas


def test_a_second_end_marker_made_of_plain_text_is_kept() -> None:
    for deltas in splits("a</think></think>b"):
        assert joined(parse(deltas, Start.REASONING, end_is_token=False)) == ("a", "</think>b")


def test_reasoning_that_is_not_streamed_comes_as_one_event_at_its_end() -> None:
    for deltas in splits("a b</think>c"):
        events = parse(deltas, Start.REASONING, stream=False)
        assert [event for event in events if isinstance(event, Reasoning)] == [Reasoning("a b")]
        assert joined(events) == ("a b", "c")
    assert parse(["a", "b"], Start.REASONING, stream=False) == [Reasoning("ab")]


def test_content_does_not_wait_for_anything() -> None:
    parser = ReasoningParser(QWEN, Start.CONTENT, end_is_token=True)
    assert parser.feed("a <", (0,)) == [Content("a <")]


@pytest.mark.parametrize(
    ("start", "tokens", "expected"),
    [
        (Start.OPTIONAL, ["<think>", "\n\n", "</think>", "\n\n", "Hi"], 1),
        (Start.REASONING, ["one", " two", "</think>", "Hi"], 2),
        (Start.REASONING, ["<think>", "one", "</think>", "Hi"], 1),
        (Start.REASONING, ["one", " two", " three"], 3),
        (Start.REASONING, ["one", "</", "think", ">", "Hi"], 1),
        (Start.REASONING, ["one", "</", "thing", ">", "</think>"], 4),
        (Start.CONTENT, ["one", "</think>"], 0),
        (Start.OPTIONAL, ["one", " two"], 0),
    ],
)
def test_reasoning_tokens_are_those_between_the_markers(start: Start, tokens: list[str], expected: int) -> None:
    parser = ReasoningParser(QWEN, start, end_is_token=True)
    for position, token in enumerate(tokens):
        parser.feed(token, (position,))
    parser.finish()
    assert parser.reasoning_tokens == expected


@pytest.mark.parametrize(
    ("name", "opening", "start"),
    [
        ("qwen3", "<|im_start|>assistant\n", Start.OPTIONAL),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", Start.CONTENT),
        ("qwen3", "<|im_start|>assistant\n<think>\n", Start.REASONING),
        ("qwen3", "<|im_start|>assistant\n<think>abc", Start.REASONING),
        ("qwen3-thinking", "<|im_start|>assistant\n", Start.REASONING),
        ("deepseek-r1", "<｜Assistant｜>", Start.REASONING),
        ("kimi", "assistant: ", Start.OPTIONAL),
    ],
)
def test_the_end_of_the_prompt_tells_where_the_output_begins(name: str, opening: str, start: Start) -> None:
    assert FORMATS[name].start_state(opening) is start


def test_a_server_knows_a_parser_by_any_of_its_names_and_keeps_its_markers(tmp_path: Path) -> None:
    support.byte_level(tmp_path, added=("<|im_end|>", "<think>", "</think>", "<|channel|>", "<|call|>"))
    (tmp_path / "config.json").write_text("{}")
    for name in ("qwen3", "deepseek_r1", "glm47", "mistral"):  # this tokenizer has no [THINK]
        text = Text.load(ServerConfig(model_path=str(tmp_path), reasoning_parser=name), tmp_path)
        assert text.reasoning is not None
        assert text.tokenizer is not None
        assert text.reasoning.form.start == "<think>"
        assert text.reasoning.marker_ids == {text.tokenizer.added[marker] for marker in ("<think>", "</think>")}
    text = Text.load(ServerConfig(model_path=str(tmp_path), reasoning_parser="gpt-oss"), tmp_path)
    assert text.reasoning is not None
    assert text.reasoning.marker_ids == {3, 4}  # those of all channels, not only of reasoning
    with pytest.raises(ConfigError, match=r"--reasoning-parser=qwen.*qwen3"):
        Text.load(ServerConfig(model_path=str(tmp_path), reasoning_parser="qwen"), tmp_path)


TOKENS = ["<think>", "</think>", "<thi", "nk>", "</", "think>", "a", " ", "\n"]


@given(st.lists(st.sampled_from(TOKENS), max_size=12), st.sampled_from(Start))
def test_no_text_is_lost_and_pieces_do_not_matter(tokens: list[str], start: Start) -> None:
    text = "".join(tokens)
    deltas, whole = parse(tokens, start), parse([text], start)
    assert joined(deltas) == joined(whole) == joined(parse(list(text), start))
    assert "".join(joined(whole)).count("a") == text.count("a")

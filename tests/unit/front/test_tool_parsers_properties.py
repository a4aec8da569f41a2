"""Whatever a model writes, cut in whatever way: nothing is lost, nothing depends on the cuts, and the work is linear."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from banyan_runtime.front.chat.events import Content, Event, Reasoning, ToolArgs, ToolEnd, ToolStart
from banyan_runtime.front.chat.output import ChoiceParser, make_parser
from banyan_runtime.front.chat.reader import Reader
from banyan_runtime.front.chat.reasoning import FORMATS as REASONING
from banyan_runtime.front.chat.reasoning import Start
from banyan_runtime.front.chat.tools.format import ToolFormat
from banyan_runtime.front.chat.tools.json_array import JSON_ARRAY
from banyan_runtime.front.chat.tools.registry import FORMATS
from tests.unit.front.parsing import TOOLS, joined

ALL = [*FORMATS, JSON_ARRAY]
COMMON = [
    *('{"name": "now"', ', "arguments": {', '"parameters":', '"name":"get_weather"', '{"city": "A"}', '"a":', "null", '"x\\"y"', "\\u00e9"),
    *("now", "get_weather", "function", "(", ")", "city=", "'a'", '"""', "=", ",", ";", ":", "[", "]", "{", "}", '"', "\\", "```json"),
    *("", " ", "\n", "\n\n", r"\n", "a", "Hi", "7", "<", ">", "<|", "</", "n" * 260, "functions.now:0", "to=functions.now", "analysis"),
]
OTHER = ["</parameter>", "<parameter=city>", "<parameter=days>", "<function=now>", "</function>", "<arg_key>city</arg_key>", "<arg_value>"]
THINK = ["<think>", "</think>", "<thi", "nk>"]
ADDED = frozenset({"<think>", "</think>", "<tool_call>", "[TOOL_CALLS]"})


OPENINGS: Final = {
    "hermes": '<tool_call>{"name":"now","arguments":',
    "llama3": '{"name":"now","parameters":',
    "pythonic": "[now(a=",
    "qwen3_coder": "<function=now><parameter=a>",
    "mistral": "[TOOL_CALLS]now[ARGS]",
    "deepseekv3": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n",
    "deepseekv31": "<｜tool▁call▁begin｜>now<｜tool▁sep｜>",
    "glm45": "<tool_call>now<arg_key>a</arg_key><arg_value>",
    "kimi_k2": "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>",
    "gpt_oss": "<|channel|>commentary to=functions.now<|message|>",
}


def fragments(form: ToolFormat) -> st.SearchStrategy[list[str]]:
    """Pieces of what the format writes, among them whole markers and halves of markers."""
    halves = [half for marker in form.markers for half in (marker[: len(marker) // 2], marker[len(marker) // 2 :])]
    opening = OPENINGS.get((*form.names, "array")[0], "[")
    own = [*form.markers, *form.markers, *halves, opening, opening, *(OTHER if "<tool_call>" in form.markers else ())]
    pieces = st.sampled_from(own) | st.sampled_from(COMMON)
    return st.lists(pieces, max_size=14)


def events_of(parser: ChoiceParser, deltas: list[str]) -> list[Event]:
    return [*(event for delta in deltas for event in parser.feed(delta, (0,))), *parser.finish()]


def cuts(pieces: list[str], at: list[int]) -> list[list[str]]:
    """The text as it came, whole, in characters, and cut at these places."""
    text = "".join(pieces)
    places = sorted({place % (len(text) + 1) for place in at})
    return [pieces, [text], list(text), [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]]


def check(make: Callable[[], ChoiceParser], pieces: list[str], at: list[int]) -> list[Event]:
    """The events, which are the same for each cut and in order."""
    whole, *others = [joined(events_of(make(), deltas)) for deltas in cuts(pieces, at)]
    for other in others:
        assert other == whole
    started, ended = -1, set[int]()
    for event in whole:
        match event:
            case ToolStart(index=index, name=name):
                assert index == started + 1
                assert name
                started = index
            case ToolArgs(index=index, fragment=fragment):
                assert index == started
                assert index not in ended
                assert fragment
            case ToolEnd(index=index):
                assert index == started
                assert index not in ended
                ended.add(index)
            case Content(text=text) | Reasoning(text=text):
                assert text
    return whole


PLACES = st.lists(st.integers(0, 10_000), max_size=5)


@pytest.mark.parametrize("form", ALL, ids=lambda form: (*form.names, "array")[0])
def test_calls_do_not_depend_on_the_cuts_and_text_without_calls_stays_as_it_is(form: ToolFormat) -> None:
    def make() -> ChoiceParser:
        parser = make_parser(None, Start.CONTENT, form, TOOLS)
        assert parser is not None
        return parser

    @given(fragments(form), PLACES)
    def run(pieces: list[str], at: list[int]) -> None:
        events = check(make, pieces, at)
        if not any(isinstance(event, ToolStart) for event in events) and not (form.names and "harmony" in form.names):
            assert "".join(event.text for event in events if isinstance(event, Content)) == "".join(pieces)

    run()


@pytest.mark.parametrize(
    "form", [form for form in FORMATS if form.names[0] in ("hermes", "qwen3_coder", "mistral")], ids=lambda form: form.names[0]
)
def test_reasoning_with_calls_behind_it_does_not_depend_on_the_cuts(form: ToolFormat) -> None:
    @given(
        st.lists(st.sampled_from([*THINK, *form.markers, *COMMON]), max_size=14),
        PLACES,
        st.sampled_from(Start),
        st.booleans(),
        st.booleans(),
    )
    def run(pieces: list[str], at: list[int], start: Start, separate: bool, parallel: bool) -> None:
        def make() -> ChoiceParser:
            parser = make_parser(REASONING["qwen3"], start, form, TOOLS, added=ADDED, separate=separate, parallel=parallel)
            assert parser is not None
            return parser

        events = check(make, pieces, at)
        if not separate and not any(isinstance(event, ToolStart) for event in events):
            assert "".join(event.text for event in events if isinstance(event, Content)) == "".join(pieces)

    run()


@given(fragments(FORMATS[-1]), PLACES, st.sampled_from(Start), st.booleans(), st.booleans())
def test_messages_of_gpt_oss_do_not_depend_on_the_cuts(pieces: list[str], at: list[int], start: Start, calls: bool, separate: bool) -> None:
    def make() -> ChoiceParser:
        parser = make_parser(REASONING["gpt-oss"], start, FORMATS[-1] if calls else None, TOOLS, separate=separate)
        assert parser is not None
        return parser

    check(make, pieces, at)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.names[0])
@pytest.mark.parametrize("opened", [False, True])
def test_no_more_than_a_marker_is_ever_looked_at_twice(form: ToolFormat, opened: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []
    push = Reader.push

    def noted(reader: Reader, text: str) -> None:
        kept.append(len(reader.unread))
        push(reader, text)

    monkeypatch.setattr(Reader, "push", noted)
    opening = OPENINGS[form.names[0]] if opened else ""
    for piece in "<", "{", "[", "\n", "\\", '"', "'", "a":
        for start in Start.REASONING, Start.OPTIONAL, Start.CONTENT:
            parser = make_parser(REASONING["qwen3"], start, form, TOOLS)
            assert parser is not None
            for delta in [opening, *(piece * 1000)]:
                parser.feed(delta, (0,))
            parser.finish()
    assert max(kept) < max(map(len, [*form.markers, "</think>"]))


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.names[0])
def test_a_long_piece_takes_no_more_time_than_many_short_ones(form: ToolFormat) -> None:
    for text in "<" * 200_000, OPENINGS[form.names[0]] + "{" * 200_000, OPENINGS[form.names[0]] * 2000:
        parser = make_parser(REASONING["qwen3"], Start.OPTIONAL, form, TOOLS)
        assert parser is not None
        began = time.perf_counter()
        parser.feed(text, (0,))
        parser.finish()
        assert time.perf_counter() - began < 5

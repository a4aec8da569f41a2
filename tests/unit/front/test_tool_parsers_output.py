"""The one parser of a choice: reasoning, then calls; and gpt-oss, where both are channels."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence

import pytest

from banyan_runtime.front.chat.events import Content, Event, Reasoning, ToolArgs, ToolEnd, ToolStart
from banyan_runtime.front.chat.output import ChoiceParser, make_parser
from banyan_runtime.front.chat.reasoning import FORMATS, Start
from banyan_runtime.front.chat.tools.format import ToolFormat
from banyan_runtime.front.chat.tools.json_array import JSON_ARRAY
from banyan_runtime.front.chat.tools.parser import GrammarParser
from banyan_runtime.front.chat.tools.registry import FORMATS as FORMATS_OF_CALLS
from banyan_runtime.front.chat.tools.registry import find
from banyan_runtime.front.chat.tools.tags import TextArguments, filled
from banyan_runtime.front.prepare.forced import ARRAY
from tests.unit.front.parsing import TOOLS, always, call, cut_call, joined, parsed
from tests.unit.front.support import splits

THINK = frozenset({"<think>", "</think>"})
QWEN = frozenset({*THINK, "<tool_call>", "</tool_call>"})
NOW = '<tool_call>{"name":"now","arguments":{}}</tool_call>'


def chat(
    reasoning: str | None,
    start: Start,
    tools: str | None = None,
    *,
    added: frozenset[str] = QWEN,
    separate: bool = True,
    stream: bool = True,
    parallel: bool = True,
    implicit_end: bool = True,
) -> ChoiceParser:
    parser = make_parser(
        None if reasoning is None else FORMATS[reasoning].fitting(added),
        start,
        None if tools is None else find(tools),
        TOOLS,
        added=added,
        separate=separate,
        stream_reasoning=stream,
        parallel=parallel,
        implicit_end=implicit_end,
    )
    assert parser is not None
    return parser


BOTH: list[tuple[str, Start, str, str, list[Event]]] = [
    ("qwen3", Start.REASONING, "hermes", f"let me\n{NOW}", [Reasoning("let me"), *call(0, "now")]),
    ("qwen3", Start.REASONING, "hermes", f"let me {NOW}", [Reasoning("let me"), *call(0, "now")]),
    ("qwen3", Start.REASONING, "hermes", f"x</think>\n\n{NOW}", [Reasoning("x"), *call(0, "now")]),
    ("qwen3", Start.REASONING, "hermes", f"x</think>\n\nHi\n{NOW}", [Reasoning("x"), Content("Hi"), *call(0, "now")]),
    ("qwen3", Start.OPTIONAL, "hermes", f"<think>\nx\n</think>\n\n{NOW}", [Reasoning("x"), *call(0, "now")]),
    ("qwen3", Start.OPTIONAL, "hermes", f"\n{NOW}", call(0, "now")),
    ("qwen3", Start.CONTENT, "hermes", NOW, call(0, "now")),
    ("qwen3", Start.CONTENT, "hermes", "x</think>y", [Content("x</think>y")]),
    ("qwen3", Start.REASONING, "llama3", '{"a": 1}</think>{"name": "now", "parameters": {}}', [Reasoning('{"a": 1}'), *call(0, "now")]),
    ("qwen3", Start.REASONING, "hermes", "I am <tool", [Reasoning("I am <tool")]),
    ("deepseek_r1", Start.REASONING, "qwen3_coder", "x\n<function=now></function>", [Reasoning("x"), *call(0, "now")]),
    (
        "deepseek_r1",
        Start.REASONING,
        "qwen3_coder",
        "say <function=now> in\n\n</think>ok",  # plain text and not at the start of a line
        [Reasoning("say <function=now> in"), Content("ok")],
    ),
    ("mistral", Start.OPTIONAL, "mistral", "[THINK]a[/THINK]b", [Content("[THINK]a[/THINK]b")]),
    ("mistral", Start.OPTIONAL, "mistral", "<think>a</think>[TOOL_CALLS]now[ARGS]{}", [Reasoning("a"), *call(0, "now")]),
]


@pytest.mark.parametrize(("reasoning", "start", "tools", "text", "events"), BOTH)
def test_calls_are_found_behind_the_reasoning(reasoning: str, start: Start, tools: str, text: str, events: list[Event]) -> None:
    always(lambda: chat(reasoning, start, tools), text, events)


def test_a_grammar_that_waits_for_the_end_of_reasoning_is_waited_for_here_too() -> None:
    always(
        lambda: chat("qwen3", Start.REASONING, "hermes", implicit_end=False), f"x\n{NOW}</think>y", [Reasoning(f"x\n{NOW}"), Content("y")]
    )


def test_without_tools_in_the_request_calls_are_text() -> None:
    text = 'Hi <tool_call>\n{"name": "now"}\n</tool_call>'
    assert make_parser(None, Start.CONTENT, None) is None
    always(lambda: chat("qwen3", Start.REASONING), f"x</think>{text}", [Reasoning("x"), Content(text)])


def test_reasoning_that_is_not_separated_stays_as_generated_and_calls_behind_it_are_found() -> None:
    assert make_parser(FORMATS["qwen3"], Start.REASONING, None, separate=False) is None
    for start, text in ((Start.REASONING, " a \n</think>\n\nb"), (Start.OPTIONAL, "<think>\na</think>b"), (Start.REASONING, "a\n")):
        always(functools.partial(chat, "qwen3", start, "hermes", separate=False), text, [Content(text)])
    always(
        lambda: chat("qwen3", Start.REASONING, "hermes", separate=False),
        f"a</think>\n{NOW}",
        [Content("a</think>"), *call(0, "now")],
    )


def test_unstreamed_reasoning_comes_before_the_call_that_ends_it() -> None:
    for deltas in splits(f"a b\n{NOW}"):
        parser = chat("qwen3", Start.REASONING, "hermes", stream=False)
        events = [*(event for delta in deltas for event in parser.feed(delta, (0,))), *parser.finish()]
        assert [event for event in events if isinstance(event, Reasoning)] == [Reasoning("a b")]
        assert joined(events) == [Reasoning("a b"), *call(0, "now")]


def test_one_call_is_enough_where_no_more_are_wanted() -> None:
    text = f"Hi {NOW}{NOW} and more"
    always(lambda: chat(None, Start.CONTENT, "hermes", parallel=False), text, [Content("Hi"), *call(0, "now")])
    parser = chat("qwen3", Start.CONTENT, "hermes", parallel=False)
    parser.feed("Hi", (0,))
    assert not parser.enough
    parser.feed(NOW, (0,))
    assert parser.enough
    broken = '<tool_call>{"name":"now","arguments":{"a":[}</tool_call>'
    always(lambda: chat(None, Start.CONTENT, "hermes", parallel=False), broken + NOW, cut_call(0, "now", '{"a":[}'))


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (["one", " two", "</think>", "<tool_call>", "x"], 2),
        (["one", "\n", "<tool_call>", '{"name":"now"}', "</tool_call>"], 2),
        (["one", " two"], 2),
    ],
)
def test_the_tokens_of_reasoning_are_counted_with_tools_too(tokens: Sequence[str], expected: int) -> None:
    for parallel in (True, False):
        parser = chat("qwen3", Start.REASONING, "hermes", parallel=parallel)
        for position, token in enumerate(tokens):
            parser.feed(token, (position,))
        parser.finish()
        assert parser.reasoning_tokens == expected


def test_a_failing_parser_gives_back_all_text_that_it_held(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("a bug")

    for fed, held in (
        (["a \n"], " \n<tool_call>{"),
        (["a <tool_"], " <tool_<tool_call>{"),
        (["a <tool_call>{"], " <tool_call>{<tool_call>{"),
    ):
        parser = chat(None, Start.CONTENT, "hermes")
        for delta in fed:
            assert parser.feed(delta, (0,)) == [Content("a")]
        with monkeypatch.context() as patch:
            patch.setattr("banyan_runtime.front.chat.reader.Reader.take", fail)
            patch.setattr("banyan_runtime.front.chat.reader.Reader.peek", fail)
            with pytest.raises(RuntimeError):
                parser.feed("<tool_call>{", (0,))
        assert joined(parser.rescue()) == [Content(held)]


def test_a_parser_that_fails_in_the_tools_keeps_the_reasoning_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(parser: GrammarParser, text: str) -> list[Event]:
        parser._reader.push(text)
        raise RuntimeError("a bug")

    parser = chat("qwen3", Start.REASONING, "hermes")
    with monkeypatch.context() as patch:
        patch.setattr(GrammarParser, "feed", fail)
        with pytest.raises(RuntimeError):
            parser.feed("a</think>b ", (0,))
    assert joined(parser.rescue()) == [Reasoning("a"), Content("b ")]


HEAD = "<|channel|>analysis<|message|>"
TO_WEATHER = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"

HARMONY: list[tuple[str, list[Event]]] = [
    (
        f'{HEAD}Need both.<|end|><|start|>assistant{TO_WEATHER}{{"city": "Paris", "days": 2}}<|call|>',
        [Reasoning("Need both."), *call(0, "get_weather", '{"city": "Paris", "days": 2}')],
    ),
    (
        "<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant<|channel|>final<|message|>Hi<|return|>",
        [Content("Let me look.\nHi")],
    ),
    (" to=functions.now<|channel|>commentary <|constrain|>json<|message|>{}<|call|>", call(0, "now")),
    (f'{TO_WEATHER}{{"city": "A"}}', call(0, "get_weather", '{"city": "A"}')),  # <|call|> ended the generation
    (f'{TO_WEATHER}{{"city": "A', cut_call(0, "get_weather", '{"city": "A')),
    (
        f"{TO_WEATHER}{{}}<|call|><|start|>assistant<|channel|>commentary to=functions.now<|message|><|call|>",
        [*call(0, "get_weather"), *call(1, "now")],
    ),
    (f"{HEAD}\na \n<|end|><|start|>assistant{HEAD}b<|end|>{FINAL}Hi ", [Reasoning("a\nb"), Content("Hi ")]),
    (f"{HEAD}a{FINAL}Hi<|end|>", [Reasoning("a"), Content("Hi")]),
    (f"{HEAD}a <|en", [Reasoning("a <|en")]),
    (f"{FINAL}a < b<|retur", [Content("a < b<|retur")]),
    ("plain <text|", [Content("plain <text|")]),
    ("to be <b>", [Content("to be <b>")]),
    ("<|channel|>final Hi<|end|>", [Content("<|channel|>final Hi")]),
    ("<|channel|>fin", [Content("<|channel|>fin")]),
    ("<|channel|>commentary to=browser.search<|message|>{}<|call|>" + FINAL + "Hi", [Content("Hi")]),
    (f"{TO_WEATHER}oops<|call|>{FINAL}Hi", [*cut_call(0, "get_weather", "oops"), Content("Hi")]),
]


def forced_texts() -> Iterator[tuple[ToolFormat, str]]:
    """Of each format two calls as a grammar forces them, in each of its spellings."""
    for form in (*FORMATS_OF_CALLS, JSON_ARRAY):
        for tag in (form.tag, form.plain_tag) if form.tag is not None else (ARRAY,):
            if tag is None:
                continue
            calls = []
            for number, (name, city) in enumerate((("get_weather", "Oslo"), ("now", ""))):
                if isinstance(tag.arguments, TextArguments):
                    written = filled(tag.arguments.begin, "city") + city + tag.arguments.end if city else ""
                else:
                    written = '{"city": "Oslo"}' if city else "{}"
                calls.append(tag.begin_of(name, number) + written + tag.end)
            yield (JSON_ARRAY if tag is ARRAY else form), tag.opening + tag.separator.join(calls) + tag.closing


@pytest.mark.matrix(gate=4)
@pytest.mark.parametrize("thought", ["", "So be it.</think>\n\n"])
@pytest.mark.parametrize(("form", "text"), list(forced_texts()))
def test_of_forced_calls_that_are_cut_off_nothing_becomes_content(form: ToolFormat, text: str, thought: str) -> None:
    harmony = form.names[:1] == ("gpt_oss",)
    if harmony and thought:
        text, thought = f"{HEAD}So be it.<|end|><|start|>assistant{text}", ""
    reasoning = FORMATS["gpt_oss"] if harmony else FORMATS["qwen3"].fitting(QWEN) if thought else None
    start = Start.REASONING if thought else Start.OPTIONAL if harmony else Start.CONTENT
    whole = thought + text
    for end in range(len(whole) + 1):
        for deltas in ([whole[:end]], list(whole[:end])):
            parser = make_parser(reasoning, start, form, TOOLS, added=QWEN, limited=True, required=True, implicit_end=False)
            assert parser is not None
            events = parsed(parser, deltas)
            assert not [event for event in events if isinstance(event, Content)], whole[:end]
    starts = [event.name for event in events if isinstance(event, ToolStart)]
    assert starts == ["get_weather", "now"], "the whole text was not two calls"


def test_a_call_that_a_model_may_leave_out_stays_text_where_it_is_cut_off() -> None:
    assert parsed(chat(None, Start.CONTENT, "hermes"), ["<tool_call>\n{"]) == [Content("<tool_call>\n{")]


@pytest.mark.parametrize(("text", "events"), HARMONY)
def test_messages_of_gpt_oss_go_where_their_channel_says(text: str, events: list[Event]) -> None:
    always(lambda: chat("gpt-oss", Start.OPTIONAL, "openai"), text, events)


def test_gpt_oss_goes_on_where_the_prompt_left_it() -> None:
    form = FORMATS["gpt_oss"]
    assert form.start_state("<|start|>assistant") is Start.OPTIONAL
    assert form.start_state(f"<|start|>assistant{HEAD}thinking") is Start.REASONING
    assert form.start_state(f"<|start|>assistant{HEAD}x<|end|>{FINAL}Hello") is Start.CONTENT
    assert form.start_state(f"<|start|>assistant{HEAD}x<|end|><|start|>assistant") is Start.OPTIONAL
    always(lambda: chat("gpt-oss", Start.REASONING), f"a<|end|>{FINAL}b", [Reasoning("a"), Content("b")])
    always(lambda: chat("gpt-oss", Start.CONTENT), "b<|return|>", [Content("b")])


def test_gpt_oss_without_tools_or_without_separation_keeps_messages_as_they_are() -> None:
    text = f"{TO_WEATHER}{{}}<|call|>"
    always(lambda: chat("gpt-oss", Start.OPTIONAL), text, [Content(text)])
    thought = f"{HEAD}a <|end|>"
    always(lambda: chat("gpt-oss", Start.OPTIONAL, separate=False), f"{thought}{FINAL}b", [Content(f"{thought}\nb")])
    always(lambda: chat(None, Start.CONTENT, "harmony"), f"{thought}<|start|>assistant{text}", [Content(thought), *call(0, "get_weather")])


def test_the_tokens_of_gpt_oss_reasoning_are_those_of_its_messages() -> None:
    tokens = ["<|channel|>", "analysis", "<|message|>", "one", " two", "<|end|>", "<|start|>", "assistant", "<|channel|>", "final"]
    parser = chat("gpt-oss", Start.OPTIONAL)
    for position, token in enumerate([*tokens, "<|message|>", "Hi", "<|return|>"]):
        parser.feed(token, (position,))
    parser.finish()
    assert parser.reasoning_tokens == 2
    parser = chat("gpt-oss", Start.OPTIONAL)
    assert parsed(parser, tokens[:5]) == [Reasoning("one two")]
    assert parser.reasoning_tokens == 2


def test_unstreamed_reasoning_of_gpt_oss_comes_at_the_end_of_its_message() -> None:
    parser = chat("gpt-oss", Start.OPTIONAL, stream=False)
    assert parser.feed(f"{HEAD}a ", (0,)) == []
    assert parser.feed("b<|end|>", (0,)) == [Reasoning("a b")]
    assert not any(isinstance(event, ToolStart) for event in parser.finish())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "glm45",
            "<tool_call>f<arg_key>a</arg_key><arg_value>x</arg_value> and also <arg_key>b</arg_key><arg_value>y</arg_value>\n</tool_call>",
        ),
        (
            "qwen3_coder",
            "<tool_call>\n<function=f>\n<parameter=a>x</parameter>\nand also\n<parameter=b>y</parameter>\n</function>\n</tool_call>",
        ),
    ],
)
def test_words_amid_a_call_come_behind_it(name: str, text: str) -> None:
    form = find(name)
    assert form is not None
    for pieces in ([text], list(text)):
        parser = form.parser({})
        events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
        kinds = [type(event) for event in events if not isinstance(event, ToolArgs)]
        assert kinds[:2] == [ToolStart, ToolEnd]
        assert set(kinds[2:]) == {Content}
        assert json.loads("".join(event.fragment for event in events if isinstance(event, ToolArgs))) == {"a": "x", "b": "y"}
        assert "".join(event.text for event in events if isinstance(event, Content)).strip() == "and also"

"""Chat prompts of real families' templates: the token ids that transformers makes, on every way to them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

import msgspec
import pytest

from banyan_runtime import wire
from banyan_runtime.front.chat.messages import ChatMessage
from banyan_runtime.front.chat.prompt import ChatOptions, render
from banyan_runtime.front.chat.reasoning import FORMATS, Start
from banyan_runtime.front.chat.template import ChatTemplate
from banyan_runtime.front.errors import ApiError
from banyan_runtime.front.plan import AnswerPlan, ChatPlan
from banyan_runtime.front.prepare.planner import Planner
from tests.unit.front import real

Turn = dict[str, Any]


def user(content: str) -> Turn:
    return {"role": "user", "content": content}


def assistant(content: str | None, **more: Any) -> Turn:
    return {"role": "assistant", "content": content, **more}


def calling(*calls: tuple[str, dict[str, Any]], content: str | None = None) -> Turn:
    listed = [
        {"id": f"call{index:05}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}}
        for index, (name, arguments) in enumerate(calls)
    ]
    return assistant(content, tool_calls=listed)


def result(content: str, index: int = 0) -> Turn:
    return {"role": "tool", "tool_call_id": f"call{index:05}", "content": content}


SYSTEM: Final[Turn] = {"role": "system", "content": 'You answer in <b>one</b> word & no more.\n"Quote\'s" too.'}
PLAIN: Final[dict[str, list[Turn]]] = {
    "one question": [user("Hello")],
    "system": [SYSTEM, user("Hauptstadt von Österreich?")],
    "several turns": [user("Hi"), assistant("Hello!"), user("And of 日本?"), assistant("東京 🗼"), user("👨‍👩‍👧‍👦 é नमस्ते")],
    "system and turns": [SYSTEM, user("Hi"), assistant("Hello!"), user("Bye")],
    "blanks": [user("  two before, a line after \n"), assistant(" \n answer\n\n"), user("\ttab")],
    "an answer last": [user("Hi"), assistant("Well")],
    "marks in the text": [user("<s> <bos> <|im_end|> <|eot_id|> </s> [INST] <｜User｜> <end_of_turn> <think>"), assistant("ok"), user("x")],
}
THOUGHTS: Final[dict[str, list[Turn]]] = {
    "reasoning": [user("Hi"), assistant("Wien", reasoning_content="Austria's capital."), user("Sure?")],
    "reasoning last": [user("Hi"), assistant("Wien", reasoning_content="Austria's capital.\n")],
    "reasoning in the text": [user("Hi"), assistant("<think>\nhm\n</think>\n\nWien"), user("Sure?")],
}
ZURICH: Final[dict[str, Any]] = {"city": 'Zürich "HB"', "days": 3, "exact": 1.0, "units": None, "list": [True, {"b": 1, "a": 2}]}
CALLS: Final[dict[str, list[Turn]]] = {
    "tools": [SYSTEM, user("Weather in Zürich?")],
    "tools without system": [user("Weather in Zürich?")],
    "a call": [
        SYSTEM,
        user("Weather?"),
        calling(("get_weather", ZURICH)),
        result('{"sky": "☀", "t": 21}'),
        assistant("Sunny."),
        user("Thanks"),
    ],
    "a result last": [user("Weather?"), calling(("get_weather", {})), result("rain")],
}
SEVERAL: Final[dict[str, list[Turn]]] = {
    "two calls": [
        user("Both?"),
        calling(("get_weather", ZURICH), ("now", {})),
        result("rain"),
        result("12:00", 1),
        assistant("Rain."),
        user("ok"),
    ],
    "words and a call": [user("Weather?"), calling(("now", {"zone": "Europe/Zurich"}), content="Let me look."), result("12:00")],
}
TOOLS: Final = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'The weather of a city, "today" & <soon>. Naïve.',
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Město"}, "days": {"type": "integer", "default": 1}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "The time", "parameters": {"type": "object", "properties": {}}}},
]
HISTORY: Final = {"qwen2.5": SEVERAL, "qwen3": SEVERAL, "llama3.2": {}, "mistral-nemo": {"two calls": SEVERAL["two calls"]}}
"""What of a history with calls a template can print; Llama's has one call a turn."""
TRIMMING: Final = frozenset({"llama3", "llama3.1", "llama3.2", "gemma3"})
"""Whose templates strip the blanks around a message."""
FIXED: Final = {"date_string": "26 Jul 2024"}  # a template of Llama's prints the day


@pytest.fixture(scope="module", params=real.families(real.TEMPLATES))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def planner(name: str) -> Planner:
    return real.planner(name)


@pytest.fixture(scope="module")
def reference(name: str) -> Any:
    """The same tokenizer as transformers loads it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(real.folder(name))


def as_documented(turns: Sequence[Turn]) -> list[Turn]:
    """The turns as transformers' templates want them: arguments are objects, and there is content."""
    made = []
    for turn in turns:
        if "tool_calls" in turn:
            calls = [
                {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
                for call in turn["tool_calls"]
            ]
            turn = {**turn, "content": turn["content"] or "", "tool_calls": calls}
        made.append(turn)
    return made


def expected(reference: Any, turns: Sequence[Turn], **options: Any) -> list[int] | None:
    """None: the template refuses these turns."""
    from jinja2 import TemplateError

    try:
        ids: list[int] = reference.apply_chat_template(as_documented(turns), tokenize=True, return_dict=False, **options)
    except TemplateError:
        return None
    return ids


def planned(planner: Planner, turns: Sequence[Turn], **options: Any) -> list[int] | None:
    """None: the request is refused because of the template."""
    try:
        plan = planner.plan("chat", json.dumps({"messages": turns, "max_tokens": 5, **options}).encode(), "r")
    except ApiError as error:
        if (error.status, error.param) == (400, "messages"):
            return None
        raise
    assert isinstance(plan, ChatPlan)
    return list(map(int, wire.unpack_ids(plan.requests[0].token_ids)))


def tokenized(planner: Planner, turns: Sequence[Turn], **options: Any) -> list[int]:
    plan = planner.plan("tokenize", json.dumps({"messages": turns, **options}).encode(), "r")
    assert isinstance(plan, AnswerPlan)
    ids: list[int] = msgspec.json.decode(plan.body)["tokens"]
    return ids


@pytest.mark.matrix(gate=2)
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}, {"enable_thinking": True, "unknown": [1, None]}], ids=str)
def test_a_prompt_has_the_ids_that_transformers_gives_it(name: str, planner: Planner, reference: Any, variables: dict[str, Any]) -> None:
    rendered = 0
    bos = reference.bos_token_id
    for title, turns in {**PLAIN, **THOUGHTS}.items():
        for prompted in (True, False):
            scope = {**FIXED, **variables}
            ids = expected(reference, turns, add_generation_prompt=prompted, **scope)
            found = planned(planner, turns, add_generation_prompt=prompted, chat_template_kwargs=scope)
            assert found == ids, title
            if ids is not None:
                rendered += 1
                assert tokenized(planner, turns, add_generation_prompt=prompted, chat_template_kwargs=scope) == ids, title
                assert ids[:2].count(bos) <= 1, "two BOS tokens"
    assert rendered >= 16


@pytest.mark.parametrize("name", real.families(HISTORY), indirect=True)
def test_tools_and_calls_of_the_history_have_the_ids_that_transformers_gives_them(name: str, planner: Planner, reference: Any) -> None:
    for title, turns in {**CALLS, **HISTORY[name]}.items():
        ids = expected(reference, turns, tools=TOOLS, add_generation_prompt=True, **FIXED)
        assert ids is not None, title
        assert planned(planner, turns, tools=TOOLS, chat_template_kwargs=FIXED) == ids, title
        assert tokenized(planner, turns, tools=TOOLS, chat_template_kwargs=FIXED) == ids, title
        assert planned(planner, turns, tools=TOOLS, tool_choice="none", chat_template_kwargs=FIXED) == expected(
            reference, turns, add_generation_prompt=True, **FIXED
        ), title


CONTINUED: Final = (
    "Sure, ", "i", "end", "<", "\n\n", "Wien", "1. a\n2. ", "  leading", "日本", "👨‍👩‍👧", "<think>Well, ",
    "<think>\nhm\n</think>\n\nyes", "Hi", "s", "user", "assistant", "|", "model\n",
)  # fmt: skip


@pytest.mark.parametrize("name", real.families(["deepseek-v3"]), indirect=True)
def test_calls_are_printed_by_a_template_that_joins_text_and_asks_for_null(reference: Any, planner: Planner, name: str) -> None:
    """transformers leaves out what is null, so DeepSeek's template is asked directly: for arguments that are text, and content null."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    template = _compile_jinja_template(reference.chat_template)
    for title, turns in {**CALLS, "two calls": SEVERAL["two calls"]}.items():
        text = template.render(messages=turns, add_generation_prompt=True, bos_token=reference.bos_token)
        assert text.count("get_weather\n```json\n{") == sum(len(turn.get("tool_calls", ())[:1]) for turn in turns), title
        ids = reference.encode(text, add_special_tokens=False)
        assert planned(planner, turns, tools=TOOLS) == ids, title
        without = [{**turn, "content": turn["content"] or ""} for turn in turns]  # as some clients write it
        assert planned(planner, without, tools=TOOLS) == tokenized(planner, without, tools=TOOLS) == ids, title


@pytest.mark.parametrize("last", CONTINUED)
def test_an_answer_is_continued_where_it_ends(name: str, planner: Planner, reference: Any, last: str) -> None:
    turns = [SYSTEM, user("Hi, assistant"), assistant(last)]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    ids = expected(reference, turns, **options, **FIXED)
    if not last.strip() and name in TRIMMING:  # transformers strips the opening of the turn, too
        ids = expected(reference, turns[:-1], add_generation_prompt=True, **FIXED)
    assert planned(planner, turns, **options, chat_template_kwargs=FIXED) == ids
    assert tokenized(planner, turns, **options, chat_template_kwargs=FIXED) == ids


FORMATS_SHOWN: Final = {
    "qwen2.5": "hermes",
    "qwen3": "hermes",
    "llama3.2": "llama3",
    "mistral-nemo": "mistral",
    "deepseek-v3": "deepseekv3",
}


def test_the_format_of_calls_and_the_end_of_a_turn_are_read_off_the_template(name: str) -> None:
    text = real.text(name)
    assert (text.tools.names[0] if text.tools else None) == FORMATS_SHOWN.get(name)
    ends = {text.needed_tokenizer.token_text(token_id) for token_id in text.turn_end_ids}
    assert ends <= {"<|im_end|>", "<|eot_id|>", "<end_of_turn>", "</s>", "<｜end▁of▁sentence｜>"}
    assert len(ends) == 1


CONTINUING: Final = {"add_generation_prompt": False, "continue_final_message": True}
ASKED: Final = [user("What does <think> mean, and </think>?")]


@pytest.mark.parametrize(
    ("turns", "options", "start"),
    [
        (ASKED, {}, "optional"),
        (ASKED, {"chat_template_kwargs": {"enable_thinking": True}}, "optional"),
        (ASKED, {"chat_template_kwargs": {"enable_thinking": False}}, "content"),
        (CALLS["a result last"], {"chat_template_kwargs": {"enable_thinking": True}}, "optional"),
        (CALLS["a result last"], {"chat_template_kwargs": {"enable_thinking": False}}, "content"),
        ([*ASKED, assistant("Well")], CONTINUING, "content"),
        ([*ASKED, assistant("<think>Well, ")], CONTINUING, "reasoning"),
    ],
)
@pytest.mark.parametrize("name", ["qwen3"], indirect=True)
def test_where_qwen3_begins_is_read_off_the_prompt(planner: Planner, turns: list[Turn], options: dict[str, Any], start: str) -> None:
    plan = planner.plan("chat", json.dumps({"messages": turns, **options}).encode(), "r")
    assert isinstance(plan, ChatPlan)
    assert plan.requests[0].reasoning == start


@pytest.mark.parametrize(("parser", "start"), [("deepseek-v3", Start.CONTENT), ("deepseek-r1", Start.REASONING), ("qwen3", Start.OPTIONAL)])
@pytest.mark.parametrize("turns", [ASKED, CALLS["a result last"]], ids=["question", "result"])
@pytest.mark.parametrize("name", real.families(["smollm2", "llama3.2", "deepseek-v3"]), indirect=True)
def test_a_prompt_that_shows_no_marker_leaves_it_to_the_parser(name: str, turns: list[Turn], parser: str, start: Start) -> None:
    prompt = render(real.text(name).template, [ChatMessage.model_validate(turn) for turn in turns], ChatOptions(variables=FIXED))
    assert FORMATS[parser].start_state(prompt.opening) is start


@pytest.mark.parametrize("name", real.families(["llama3.2"]), indirect=True)
def test_a_template_that_prints_the_day_prints_today(planner: Planner) -> None:
    before = datetime.now()
    ids = planned(planner, ASKED)
    assert ids is not None
    shown = real.text("llama3.2").needed_tokenizer.decode(ids, skip_special_tokens=False)
    assert any(f"Today Date: {day:%d %b %Y}\n" in shown for day in (before, datetime.now()))


def test_a_template_that_calls_reasoning_thinking_finds_it_except_where_it_refuses_it() -> None:
    refused = "{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('no') }}{% endif %}"
    source = "{% for m in messages %}[{{ m.thinking }}" + refused + "]{% endfor %}"
    thought = {"reasoning_content": "hm"}
    turns = [
        assistant("a", **thought),
        {**calling(("now", {})), **thought},
        {**calling(("now", {}), content="a"), **thought},
        assistant("a"),
    ]
    prompt = render(ChatTemplate(source, {}), [ChatMessage.model_validate(turn) for turn in turns], ChatOptions())
    assert prompt.text == "[hm][hm][][]"


def test_arguments_of_the_history_read_as_an_object_and_as_their_text() -> None:
    source = (
        "{% set a = messages[0].tool_calls[0].function.arguments %}{{ a is string }} {{ a is mapping }} {{ a.text }} {{ a | tojson }} "
        "{{ a }} {{ '<' + a + '>' }} {{ '<' ~ a ~ '>' }}"
    )
    arguments = '{"text":"é",  "n":1.0}'
    turn = assistant(None, tool_calls=[{"function": {"name": "now", "arguments": arguments}}])
    prompt = render(ChatTemplate(source, {}), [ChatMessage.model_validate(turn)], ChatOptions())
    assert prompt.text == f'False True é {{"text": "é", "n": 1.0}} {arguments} <{arguments}> <{arguments}>'

"""What formats say of themselves: names, ids, tags; and what text parameters are worth."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from banyan_runtime.front.chat.events import Content, ToolEnd
from banyan_runtime.front.chat.output import make_parser
from banyan_runtime.front.chat.reasoning import FORMATS as REASONING
from banyan_runtime.front.chat.reasoning import Start
from banyan_runtime.front.chat.tools.format import ToolFormat
from banyan_runtime.front.chat.tools.ids import RANDOM_BYTES
from banyan_runtime.front.chat.tools.registry import FORMATS, find
from banyan_runtime.front.chat.tools.tags import JsonArguments, TextArguments, filled
from banyan_runtime.front.chat.tools.typed import Parameters
from tests.unit.front.parsing import TOOLS, call, parsed

NAMES = [
    *("hermes", "qwen", "qwen25", "qwen3_json", "llama3", "llama3_json", "llama4_json", "pythonic", "llama4", "llama4_pythonic", "olmo3"),
    *("qwen3_coder", "qwen3_xml", "step3p5", "nanbeige", "mistral", "deepseekv3", "deepseek_v3", "deepseekv31", "deepseek_v31"),
    *("glm", "glm45", "glm47", "kimi_k2", "gpt-oss", "openai", "harmony"),
]
TAGGED = [
    pytest.param(form, added, id=f"{form.names[0]}-{len(added)}")
    for form in FORMATS
    for added in ((), ("[ARGS]",))
    if form.tag_for(added) is not None and (form.plain_tag is not None or not added)
]


def test_formats_are_found_by_the_names_of_both_servers() -> None:
    for name in NAMES:
        assert find(name) is find(name.replace("_", "-")) is find(name.replace("-", "_")) is not None
    assert find("deepseek") is None
    for name in ("deepseek-r1", "deepseek_r1", "deepseek-v3", "qwen3", "qwen3_thinking", "glm45", "kimi", "kimi-k2", "mistral"):
        assert REASONING[name] is REASONING[name.replace("_", "-")]
    assert REASONING["gpt-oss"] is REASONING["openai_gptoss"]


def test_deepseek_v3_reasons_only_where_the_prompt_says_so() -> None:
    form = REASONING["deepseek-v3"]
    assert form.start_state("<｜Assistant｜>") is form.start_state("<｜Assistant｜></think>") is Start.CONTENT
    assert form.start_state("<｜Assistant｜><think>") is Start.REASONING


def test_magistral_marks_reasoning_with_what_its_tokenizer_has() -> None:
    form = REASONING["mistral"]
    assert form.fitting({"[THINK]": 1}).start == "[THINK]"
    assert form.fitting({}).start == "<think>"


def test_ids_are_of_the_form_that_the_family_knows() -> None:
    random = bytes(range(RANDOM_BYTES))
    made = {name: form.make_id("now", 4, random) for name in ("hermes", "kimi_k2", "mistral") if (form := find(name)) is not None}
    assert re.fullmatch("call_[0-9a-f]{24}", made["hermes"])
    assert made["kimi_k2"] == "functions.now:4"
    assert re.fullmatch("[A-Za-z0-9]{9}", made["mistral"])
    for form in FORMATS:
        assert form.make_id("now", 0, random) == form.make_id("now", 0, random)


def written(form: ToolFormat, added: tuple[str, ...], calls: list[tuple[str, dict[str, Any]]]) -> str:
    """Calls as the format's tag says that they are written."""
    tag = form.tag_for(added)
    assert tag is not None
    texts = []
    for number, (name, arguments) in enumerate(calls):
        match tag.arguments:
            case JsonArguments():
                body = json.dumps(arguments)
            case TextArguments(begin, end, separator):
                values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
                body = separator.join(filled(begin, key) + value + end for key, value in values.items())
        texts.append(tag.begin_of(name, number) + body + tag.end)
    return tag.opening + tag.separator.join(texts) + tag.closing


@pytest.mark.parametrize(("form", "added"), TAGGED)
def test_the_parser_reads_what_the_tag_makes_a_model_write(form: ToolFormat, added: tuple[str, ...]) -> None:
    calls: list[tuple[str, dict[str, Any]]] = [("get_weather", {"city": 'A "b"', "days": 2}), ("now", {}), ("get_weather", {"city": "C"})]
    text = written(form, added, calls)
    tag = form.tag_for(added)
    assert tag is not None
    assert text.startswith(tag.trigger)
    for before in ("", "Well. ") if tag.trigger.startswith(form.openers or "-") else ("",):
        parser = make_parser(None, Start.CONTENT, form, TOOLS)
        assert parser is not None
        events = [event for event in parsed(parser, before + text) if not hasattr(event, "text")]
        ids = [getattr(event, "id", None) for event in events if hasattr(event, "name")]
        expected = [
            event for index, (name, arguments) in enumerate(calls) for event in call(index, name, json.dumps(arguments), ids[index])
        ]
        assert events == expected
        assert isinstance(events[-1], ToolEnd)


@pytest.mark.parametrize(("form", "added"), TAGGED)
def test_a_call_of_a_tool_that_may_not_be_called_is_text(form: ToolFormat, added: tuple[str, ...]) -> None:
    only = {"get_weather": TOOLS["get_weather"]}
    for reasoning in (REASONING["gpt-oss"], None) if form is find("gpt-oss") else (None,):
        for name, allowed in (("now", False), ("get_weather", True)):
            text = written(form, added, [(name, {})])
            for pieces in ([text], list(text)):
                parser = make_parser(reasoning, Start.OPTIONAL, form, only, limited=True)
                assert parser is not None
                events = parsed(parser, pieces)
                assert any(isinstance(event, ToolEnd) for event in events) == allowed
                assert (name in "".join(event.text for event in events if isinstance(event, Content))) != allowed


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.names[0])
def test_openers_are_markers(form: ToolFormat) -> None:
    assert set(form.openers) <= set(form.markers)


SCHEMA: dict[str, Any] = {
    "$defs": {"Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "integer"}]}, "City": {"type": "string"}},
    "properties": {
        "s": {"type": "string"},
        "e": {"enum": ["a", "1"]},
        "i": {"type": "integer"},
        "n": {"type": "number"},
        "b": {"type": "boolean"},
        "o": {"type": "object", "properties": {"i": {"type": "integer"}, "s": {"type": "string"}}},
        "a": {"type": "array", "items": {"type": "integer"}},
        "sn": {"type": ["string", "null"]},
        "is": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "i_null": {"type": "integer", "nullable": True},
        "ref": {"$ref": "#/$defs/City"},
        "loop": {"$ref": "#/$defs/Loop"},
        "free": {},
        "odd": {"type": "any"},
        "varchar": {"type": "VARCHAR"},
        "int32": {"type": "int32"},
    },
}


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("s", "123", '"123"'),
        ("s", "null", '"null"'),
        ("s", "{}", '"{}"'),
        ("e", "1", '"1"'),
        ("i", " 42 ", "42"),
        ("i", "-7", "-7"),
        ("i", "123456789012345678901234567890", "123456789012345678901234567890"),
        ("i", "x", '"x"'),
        ("i", "1.5", '"1.5"'),
        ("i", "9" * 5000, '"' + "9" * 5000 + '"'),
        ("n", "1", "1"),
        ("n", "1.5", "1.5"),
        ("n", "1e999", '"1e999"'),
        ("n", "NaN", '"NaN"'),
        ("b", "True", "true"),
        ("b", "0", "false"),
        ("b", "bad", '"bad"'),
        ("o", '{"i": "3", "s": "3", "x": "3"}', '{"i": 3, "s": "3", "x": "3"}'),
        ("o", "[1]", '"[1]"'),
        ("o", "{oops", '"{oops"'),
        ("a", '[1, "2", "x"]', '[1, 2, "x"]'),
        ("sn", "null", "null"),
        ("sn", "x", '"x"'),
        ("is", "5", "5"),
        ("is", "five", '"five"'),
        ("i_null", "null", "null"),
        ("ref", "5", '"5"'),
        ("loop", "5", "5"),
        ("free", "[1, {}]", "[1, {}]"),
        ("free", "1e999", '"1e999"'),
        ("free", "words", '"words"'),
        ("free", '"é\\ud800"', '"\\u00e9\\ud800"'),
        ("free", "[" * 100_000, '"' + "[" * 100_000 + '"'),
        ("odd", "5", "5"),
        ("varchar", "5", '"5"'),
        ("int32", "5", "5"),
        ("unknown", "5", "5"),
        ("unknown", "five", '"five"'),
    ],
)
def test_text_becomes_what_the_schema_says(key: str, text: str, expected: str) -> None:
    assert Parameters(SCHEMA).json(key, text) == expected


def test_properties_of_alternatives_count_and_broken_schemas_do_no_harm() -> None:
    assert Parameters({"oneOf": [{"properties": {"a": {"type": "string"}}}]}).json("a", "5") == '"5"'
    assert Parameters({"oneOf": [{"properties": {"a": {"type": "string"}}}]}).is_text("a")
    broken: list[Any] = [
        None,
        {},
        {"properties": []},
        {"properties": {"a": True}},
        {"$ref": 5},
        {"$ref": "#/x/y"},
        {"properties": {"a": {"type": {}}}},
    ]
    for schema in broken:
        assert Parameters(schema).json("a", "5") == "5"
        assert not Parameters(schema).is_text("a")

"""Parameters that are written as text: whatever the grammar of a forced call admits is read back as that call, and fits the schema."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from banyan_runtime.front.chat.events import Content, ToolArgs, ToolEnd, ToolStart
from banyan_runtime.front.chat.tools.format import ToolFormat
from banyan_runtime.front.chat.tools.registry import FORMATS
from banyan_runtime.front.chat.tools.tags import TextArguments, filled
from banyan_runtime.front.openai.tools import Tool
from banyan_runtime.front.prepare.forced import Leniency, forced
from banyan_runtime.grammar.errors import GrammarError
from banyan_runtime.grammar.matcher import Matcher
from banyan_runtime.wire import Grammar
from tests.unit.grammar.walks import Language

TEXT_FORMATS = [form for form in FORMATS if form.tag is not None and isinstance(form.tag.arguments, TextArguments)]
by_form = pytest.mark.parametrize("form", TEXT_FORMATS, ids=lambda form: form.names[0])
TEXT: dict[str, Any] = {"type": "string"}


def parameters(value: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"v": value}, "required": ["v"], **more}


def grammar_of(form: ToolFormat, schema: dict[str, Any]) -> Grammar:
    assert form.tag is not None
    tool = Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}})
    return forced(form.tag, [tool], several=True, leniency=Leniency(lambda grammar: True)).forced()


def call(form: ToolFormat, text: str, name: str = "v") -> str:
    assert form.tag is not None
    assert isinstance(form.tag.arguments, TextArguments)
    return form.tag.begin_of("f") + filled(form.tag.arguments.begin, name) + text + form.tag.arguments.end + form.tag.end


def read(form: ToolFormat, schema: dict[str, Any], output: str) -> Any:
    """The arguments of the one call that it is, in whatever pieces it comes."""
    found = []
    for pieces in ([output], list(output)):
        parser = form.parser({"f": schema})
        events = [*(event for piece in pieces for event in parser.feed(piece)), *parser.finish()]
        assert [type(event) for event in events if not isinstance(event, ToolArgs)] == [ToolStart, ToolEnd], output
        assert not [event for event in events if isinstance(event, Content)]
        found.append(json.loads("".join(event.fragment for event in events if isinstance(event, ToolArgs))))
    assert found[0] == found[1]
    return found[0]


def takes(tiny: Language, form: ToolFormat, value: dict[str, Any], text: str, **more: Any) -> bool:
    return tiny.takes(grammar_of(form, parameters(value, **more)), call(form, text))


def admitted(tiny: Language, matcher: Matcher, output: str) -> bool:
    """Whether a model could write it. Where all that follows is certain, masks have only the tokens that it would write."""
    for token_id in tiny.ids(output):
        if token_id not in tiny.admitted(matcher):
            return False
        assert matcher.accept(token_id)
    return matcher.is_completed


SCHEMAS: dict[str, dict[str, Any]] = {
    "text": TEXT,
    "of a length": {"type": "string", "minLength": 2, "maxLength": 9},
    "or nothing": {"anyOf": [{"type": "string", "maxLength": 5}, {"type": "null"}]},
    "or nothing, free": {"type": ["string", "null"]},
    "whole pattern": {"type": "string", "pattern": "^[a-z]+$"},
    "anywhere": {"type": "string", "pattern": "a"},
    "at its beginning": {"type": "string", "pattern": "^a"},
    "at its end": {"type": "string", "pattern": "b$"},
    "at either": {"type": "string", "pattern": "^a|b$"},
    "all of it": {"type": "string", "pattern": "a", "minLength": 3, "maxLength": 30},
    "either": {"anyOf": [{"type": "string", "pattern": "^a"}, {"type": "string", "maxLength": 2}]},
    "of a list": {"enum": ["a", "ab", 7, None]},
    "an object": {"type": "object", "properties": {"a": TEXT}, "required": ["a"]},
    "a list": {"type": "array", "items": TEXT},
    "anything": {},
}


def drawn(form: ToolFormat) -> st.SearchStrategy[str]:
    """Texts, among them markers and what nearly is one, bare and in JSON."""
    pieces = [*form.markers, *(marker[:-1] for marker in form.markers), *(marker[1:] for marker in form.markers)]
    pieces += ["a", "b", "ab", "7", "é", "🚀", " ", "\n", "<", ">", "</", "<b>", '"', "\\", "{", "}", "[", "]", ",", ":", "null", "true"]
    bare = st.lists(st.sampled_from(pieces), max_size=5).map("".join)
    objects = bare.map(lambda text: json.dumps({"a": text}, ensure_ascii=False))
    return bare | objects | bare.map(lambda text: json.dumps([text], ensure_ascii=False))


@pytest.mark.matrix(gate=4)
@by_form
@pytest.mark.parametrize("name", SCHEMAS)
def test_what_is_forced_is_read_back_and_fits_the_schema(tiny: Language, form: ToolFormat, name: str) -> None:
    value = SCHEMAS[name]
    schema = parameters(value)
    compiled = tiny.backend.compile(grammar_of(form, schema))

    @given(drawn(form))
    @settings(suppress_health_check=list(HealthCheck))
    def run(text: str) -> None:
        output = call(form, text)
        if not admitted(tiny, compiled.matcher((tiny.eos,)), output):
            return
        found = read(form, schema, output)
        assert list(found) == ["v"]
        jsonschema.validate(found, schema)
        if value == TEXT or "pattern" in value or value.keys() == {"type", "minLength", "maxLength"}:
            assert found == {"v": text}

    run()


@by_form
@pytest.mark.parametrize(
    "text", ["", "a", "\n", "a\n\nb\n", "a < b > c", '{"', "</b>", "<parameter", "</arg_valu", "<<<", "é🚀", "x" * 500]
)
def test_a_text_may_be_all_else(tiny: Language, form: ToolFormat, text: str) -> None:
    schema = parameters(TEXT)
    assert tiny.takes(grammar_of(form, schema), call(form, text))
    assert read(form, schema, call(form, text)) == {"v": text}


@by_form
def test_no_text_holds_what_is_read_as_the_next_part(tiny: Language, form: ToolFormat) -> None:
    assert form.tag is not None
    assert isinstance(form.tag.arguments, TextArguments)
    assert form.tag.arguments.excludes
    for marker in form.tag.arguments.excludes:
        for schema in (parameters(TEXT), parameters({"type": "string", "maxLength": 50}), {"type": "object"}):
            grammar = grammar_of(form, schema)
            assert tiny.takes(grammar, call(form, "ab")), schema
            for text in (marker, f"a{marker}b", f"<{marker}", f"a\n{marker}\n"):
                assert not tiny.takes(grammar, call(form, text)), text


@by_form
def test_markers_in_strings_of_json_are_text(tiny: Language, form: ToolFormat) -> None:
    assert form.tag is not None
    assert isinstance(form.tag.arguments, TextArguments)
    schema = parameters({"type": "array", "items": {"type": "object"}})
    for marker in form.markers:
        value = [{marker: f'a"{marker}\\{marker}'}, {"b": 1}]
        output = call(form, json.dumps(value))
        assert read(form, schema, output) == {"v": value}
        if marker not in tiny.vocabulary.added:
            assert tiny.takes(grammar_of(form, schema), output)


@by_form
def test_what_only_looks_like_json_ends_at_a_marker_all_the_same(form: ToolFormat) -> None:
    schema = parameters({"type": "array", "items": TEXT})
    for text in ('["a]', "['it\"s']", '["a\n b', '{"a', '["\\'):
        assert read(form, schema, call(form, text)) == {"v": text}


@pytest.mark.parametrize(
    ("value", "good", "bad"),
    [
        ({"minLength": 2}, ["ab", "a\nb", "é🚀", "x" * 200], ["", "a", "🚀"]),
        ({"maxLength": 3}, ["", "abc", "\n\n\n", "🚀🚀🚀"], ["abcd", "\nabc"]),
        pytest.param({"minLength": 2, "maxLength": 2000}, ["ab", "a b\n" * 500], ["a", "a b\n" * 500 + "c"], marks=pytest.mark.long),
        ({"pattern": "^[a-z]+$"}, ["ab"], ["a1", "ab\n", ""]),
        ({"pattern": r"^\d+\.$|^x$"}, ["12.", "x"], ["12", "xx", "12.x"]),
        ({"format": "int32"}, ["whatever"], []),
        ({"$ref": "#/$defs/Code"}, ["ab"], ["a", "abc"]),
        ({"allOf": [{"$ref": "#/$defs/Code"}], "description": "d"}, ["ab"], ["a", "abc"]),
    ],
)  # fmt: skip
@by_form
def test_texts_are_held_to_lengths_and_patterns(
    tiny: Language, form: ToolFormat, value: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    more = {"$defs": {"Code": {"type": "string", "minLength": 2, "maxLength": 2}}}
    typed = value if "$ref" in value or "allOf" in value else {"type": "string", **value}
    takes_it = functools.partial(takes, tiny, form, typed, **more)
    assert [text for text in good if not takes_it(text)] == []
    assert [text for text in bad if takes_it(text)] == []


@pytest.mark.parametrize(
    ("value", "good", "bad"),
    [
        ({"pattern": "b+"}, ["b", "abc", "a\nb\nc", "<b>"], ["", "ac"]),
        ({"pattern": "^b"}, ["b", "b\nc"], ["ab", ""]),
        ({"pattern": "b$"}, ["b", "a\nb"], ["ba", "b\n"]),
        ({"pattern": "^b|c$"}, ["b", "bx", "xc"], ["xb", "cx"]),
        ({"pattern": r"b\$"}, ["b$", "ab$c"], ["b"]),
        ({"pattern": "[|^$]"}, ["a|", "^b", "$"], ["ab"]),
        ({"pattern": "^"}, ["", "ab"], []),
        ({"pattern": "^[^x]+$"}, ["ab", "<b>", "\n"], ["x", ""]),
        ({"pattern": "b", "minLength": 2, "maxLength": 3}, ["ab", "abc"], ["b", "abcd", "acc"]),
    ],
)  # fmt: skip
@by_form
def test_texts_are_held_to_several_rules_and_to_patterns_anywhere(
    tiny: Language, form: ToolFormat, value: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    takes_it = functools.partial(takes, tiny, form, {"type": "string", **value})
    assert [text for text in good if not takes_it(text)] == []
    assert [text for text in bad if takes_it(text)] == []


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"type": "string", "format": "regex"}, "'format' (\"regex\") at #/properties/v"),
    ({"type": "string", "format": "date"}, "'format' (\"date\") at #/properties/v"),
    ({"type": "string", "enum": [1]}, "the schema at #/properties/v"),
    ({"enum": ["a", "bb"], "minLength": 2}, '\'enum\' (["a","bb"]) at #/properties/v'),
    ({"type": "string", "anyOf": [{"minLength": 2}]}, "'anyOf' ([{\"minLength\":2}]) at #/properties/v"),
    ({"anyOf": [{"type": "string", "maxLength": 9}, {"type": "integer"}]}, "the schema at #/properties/v"),
    ({"type": "string", "minLength": -1}, "'minLength' (-1) at #/properties/v"),
    ({"type": "string", "maxLength": "9"}, "'maxLength' (\"9\") at #/properties/v"),
    ({"minLength": 2}, "the schema at #/properties/v"),
    ({"$ref": "#/$defs/nobody"}, "'$ref' (\"#/$defs/nobody\") at #/properties/v"),
    (
        {"oneOf": [{"type": "string", "maxLength": 2}, {"type": "string", "pattern": "^a"}]},
        "at #/properties/v",
    ),
]


def refusal(make: Callable[[], object]) -> str:
    with pytest.raises(GrammarError) as caught:
        make()
    return str(caught.value)


@by_form
def test_what_no_text_could_be_held_to_is_refused_with_its_place(tiny: Language, form: ToolFormat) -> None:
    for value, reason in REFUSED:
        assert reason in refusal(lambda: tiny.backend.compile(grammar_of(form, parameters(value))))  # noqa: B023
    inner = "(^a|b)$"
    assert inner in refusal(lambda: tiny.backend.compile(grammar_of(form, parameters({"type": "string", "pattern": inner}))))


@by_form
def test_a_listed_text_that_would_not_be_read_is_refused(tiny: Language, form: ToolFormat) -> None:
    assert form.tag is not None
    assert isinstance(form.tag.arguments, TextArguments)
    marker = form.tag.arguments.excludes[0]
    schema = parameters({"enum": ["a", f"b{marker}"]})
    reason = refusal(lambda: tiny.backend.compile(grammar_of(form, schema)))
    assert reason.startswith(f"'b{marker}' at #/properties/v ")


@by_form
@pytest.mark.parametrize("name", ["", " a", "a ", "a>b", "a<b", "a\nb", "a" * 257])
def test_a_name_that_cannot_stand_in_a_tag_is_refused(form: ToolFormat, name: str) -> None:
    schema = {"type": "object", "properties": {name: TEXT}}
    assert refusal(lambda: grammar_of(form, schema))


@by_form
def test_parameters_come_in_the_order_of_the_schema_those_that_must(tiny: Language, form: ToolFormat) -> None:
    assert form.tag is not None
    assert isinstance(form.tag.arguments, TextArguments)
    schema = {"type": "object", "properties": dict.fromkeys("abc", TEXT), "required": ["b"]}
    grammar, begin, arguments = grammar_of(form, schema), form.tag.begin_of("f"), form.tag.arguments
    for names, fits in (("b", True), ("ab", True), ("bc", True), ("abc", True), ("", False), ("ac", False), ("ba", False), ("bd", False)):
        body = "".join(filled(arguments.begin, name) + name + arguments.end for name in names)
        assert tiny.takes(grammar, begin + body + form.tag.end) == fits, names


B, C = ({"properties": {name: {"type": "integer"}}, "required": [name]} for name in "bc")


@by_form
@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"properties": {"a": {"type": "integer"}}, "oneOf": [B, C]}, ("b", "1"), None),
        ({"$ref": "#/$defs/one", "$defs": {"one": {"properties": {"a": {"type": "integer"}}, "allOf": [B]}}}, ("b", "1"), None),
        ({"properties": {"a": {"type": "integer"}}, "anyOf": [{"required": ["a"]}, {"minProperties": 1}]}, ("a", "1"), None),
        ({"properties": {"a": {"type": "integer", "not": {}}}, "$defs": []}, ("a", "1"), ("a", "x")),
    ],
)
def test_what_may_name_parameters_and_cannot_be_enforced_leaves_none_out(
    tiny: Language, form: ToolFormat, schema: dict[str, Any], good: tuple[str, str], bad: tuple[str, str] | None
) -> None:
    """As text there are none but those that are named."""

    def usable(grammar: Grammar) -> bool:
        try:
            tiny.backend.compile(grammar)
        except GrammarError:
            return False
        return True

    assert form.tag is not None
    tool = Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": {"type": "object", **schema}}})
    leniency = Leniency(usable)
    grammar = forced(form.tag, [tool], several=True, leniency=leniency).forced()
    assert [*leniency.loosened] == ["f"]
    assert tiny.takes(grammar, call(form, good[1], good[0]))
    assert bad is None or not tiny.takes(grammar, call(form, bad[1], bad[0]))

"""Every notation of a grammar, what it admits, and how it is refused."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from banyan_runtime.grammar import schema
from banyan_runtime.grammar.errors import GrammarError
from banyan_runtime.grammar.structural import read_structural
from banyan_runtime.grammar.trial import Trial
from banyan_runtime.wire import Grammar
from tests.unit.grammar.walks import Language

CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("regex", r"[a-z]+/\d", "ab/1", "ab/x"),
        ("regex", "^(yes|no)$", "yes", "maybe"),
        ("regex", r"\d{3}", "123", "１２３"),
        ("regex", r'"\w+"', '"é"', '"-"'),
        ("choice", '["yes","no","é🚀\\n"]', "é🚀\n", "y"),
        ("choice", '["a","ab"]', "ab", "b"),
        ("ebnf", 'root ::= "a" [0-9]+', "a12", "a"),
        ("ebnf", 'root ::= x ("," x)*\nx ::= "1" | "2"', "1,2,1", "1,"),
        ("ebnf", 'start: "a" /[0-9]+/', "a12", "a"),
        ("ebnf", r'root ::= "caf\u00e9" [\u0400-\u04ff]+', "caféда", "cafée"),
        ("ebnf", r'root ::= "\u0041\U0001F600\ud83d\ude00\u0022\x41\\u0041" [^\u005b\u005D]', 'A😀😀"A\\u0041x', 'A😀😀"A\\u0041]'),
        ("ebnf", 'root ::= "\x7f" [\x7f]', "\x7f\x7f", "x"),
        ("choice", '["a\x7f"]', "a\x7f", "a"),
        ("json_object", "", '{"a": [1, 2.5, "é", null, true]}', "[1]"),
    ],
)
def test_a_notation_admits_what_it_says(tiny: Language, kind: str, text: str, good: str, bad: str) -> None:
    assert tiny.takes(Grammar(kind, text), good)
    assert not tiny.takes(Grammar(kind, text), bad)


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("regex", "(a", "unclosed group"),
        ("regex", "(?=a)", "look-ahead"),
        ("regex", r"(a)\1", "backreferences"),
        ("regex", r"\bx", "not supported"),
        ("regex", "a{3,2}", "invalid repetition"),
        ("ebnf", "root ::= (", "Expected"),
        ("ebnf", 'root ::= "\\', "out of range"),
        ("ebnf", "root ::= " + "(" * 5000, "nested too deeply"),
        ("ebnf", "root ::= a\na ::= b\nb ::= a", "admits no output"),
        ("ebnf", "start: foo", "unknown name"),
        ("ebnf", '%llguidance {"no_forcing": false}\nstart: "a"', "leave it out"),
        ("ebnf", "start: <[9999999]>", "out of range|too large"),
        ("nonsense", "", "nonsense"),
    ],
)
def test_a_wrong_grammar_is_refused_with_a_reason(tiny: Language, kind: str, text: str, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason):
        Trial(tiny.backend, tiny.vocabulary.size).check(Grammar(kind, text))


@pytest.mark.parametrize(
    ("whitespace", "text", "fits"),
    [
        ("bounded", '{"a":1,"b":[1,2]}', True),
        ("bounded", '{"a": 1, "b": [1, 2]}', True),
        ("bounded", '{\n  "a": 1,\n  "b": [\n    1\n  ]\n}', True),
        ("bounded", '{"a":  1}', False),
        ("bounded", '{\n\n"a": 1}', False),
        ("bounded", "{" + "\n" + " " * 40 + '"a": 1}', False),
        ("bounded", ' {"a": 1}', False),
        ("none", '{"a": 1, "b": [1, 2]}', True),
        ("none", '{"a":1}', False),
        ("any", '{\n\n\n"a"  :1}', True),
    ],
)
def test_blanks_between_the_parts_of_json_are_bounded(tiny: Language, whitespace: str, text: str, fits: bool) -> None:
    assert tiny.takes(Grammar("json_object", "", whitespace), text) == fits


def test_blanks_are_bounded_however_long_a_model_wants_them(tiny: Language) -> None:
    """A model that wants nothing but blanks gets one run of them."""
    matcher = tiny.matcher(Grammar("json_object", ""))
    assert matcher.accept(tiny.ids("{")[0])
    blanks = 0
    while any(found := [one for one in tiny.admitted(matcher) if tiny.text([one]).isspace()]):
        text = max(found, key=lambda one: len(tiny.text([one])))
        assert matcher.accept(int(text))
        blanks += len(tiny.text([text]))
        assert blanks <= 33


@pytest.mark.parametrize(
    ("value", "start"),
    [
        ({"type": "array", "uniqueItems": True}, "'uniqueItems' (true) at #"),
        ({"properties": {"a": {"items": {"not": {}}}}}, "'not' ({}) at #/properties/a/items"),
        (
            {"propertyNames": {"type": "string", "minLength": 2}},
            '\'propertyNames\' ({"type":"string","minLength":2}) at #',
        ),
        ({"$defs": {"x": {"if": {}}}}, "'if' ({}) at #/$defs/x"),
        ({"$ref": "http://x/y"}, "'$ref' (\"http://x/y\") at #"),
        ([], ""),
        ({"pattern": "a" * 3000}, "'pattern' at #"),
        ({"const": "a\0"}, "the schema has a NUL"),
        (
            {"multipleOf": 999983},
            "'multipleOf' (999983) at #",
        ),
        (
            {"properties": {str(i): {"multipleOf": 19_990} for i in range(6)}},
            "it has 119940 ",
        ),
        ({"properties": {str(i): {} for i in range(1001)}}, "it has 1001 properties"),
    ],
)
def test_what_a_schema_cannot_have_is_named_with_its_place(value: Any, start: str) -> None:
    with pytest.raises(GrammarError) as caught:
        schema.prepare(value)
    assert str(caught.value).startswith(start)


@pytest.mark.parametrize("keyword", ["anyOf", "oneOf"])
@pytest.mark.parametrize(
    "nothing",
    [
        False, {"not": {}}, {"not": True}, {"not": {"title": "none"}, "type": "string"},
        {"anyOf": [False, {"not": {}}]}, {"allOf": [{"type": "string"}, False]},
    ],
    ids=str,
)  # fmt: skip
def test_a_branch_that_admits_nothing_is_none(tiny: Language, keyword: str, nothing: Any) -> None:
    given = {keyword: [nothing, {"type": "integer"}]}
    for value, good, bad in ((given, "3", '"3"'), ({"type": "array", "items": given}, "[3]", '["3"]')):
        grammar = Grammar("json_schema", schema.prepare(value))
        assert tiny.takes(grammar, good)
        assert not tiny.takes(grammar, bad)
    with pytest.raises(GrammarError, match="'uniqueItems'.* at #/" + keyword + "/1"):  # as the client counts them
        schema.prepare({keyword: [nothing, {"uniqueItems": True}]})
    with pytest.raises(GrammarError, match=f"'{keyword}'.* at #/items"):
        schema.prepare({"type": "array", "items": {keyword: [nothing, nothing]}})


@pytest.mark.parametrize("names", [True, {}, {"type": "string"}, {"type": "string", "title": "Name"}])
def test_names_that_may_be_any_text_are_no_constraint(tiny: Language, names: Any) -> None:
    text = schema.prepare({"type": "object", "propertyNames": names, "additionalProperties": {"type": "integer"}})
    assert tiny.takes(Grammar("json_schema", text), '{"any name": 1, "é": 2}')


def test_a_property_may_be_called_like_a_keyword() -> None:
    value = {"type": "object", "properties": {"not": {"type": "string"}, "if": {"enum": [{"not": 1}]}}, "additionalProperties": False}
    assert json.loads(schema.prepare(value)) == value


@pytest.mark.parametrize(
    ("value", "closed"),
    [
        ({"properties": {"a": {}}}, True),
        ({"properties": {"a": {}}, "additionalProperties": True}, False),
        ({"type": "object"}, False),
        ({"properties": {"a": {}}, "patternProperties": {"^b": {}}}, False),
        ({"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}}]}, False),
        ({"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}, False),
    ],
)
def test_objects_that_name_their_properties_have_no_others(value: dict[str, Any], closed: bool) -> None:
    assert (json.loads(schema.prepare(value)).get("additionalProperties", True) is False) == closed


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("date", "2024-02-29", "2024-02-30"), ("time", "23:59:59Z", "24:00:00Z"),
        ("date-time", "2000-02-29T00:00:00.5+01:00", "2000-02-29"),
        ("uuid", "123e4567-e89b-12d3-a456-426614174000", "123e4567"), ("email", "a@b.org", "a"), ("path", "/tmp", None),
    ],
)  # fmt: skip
def test_formats_are_held_as_far_as_they_are_known(tiny: Language, name: str, good: str, bad: str | None) -> None:
    grammar = Grammar("json_schema", schema.prepare({"type": ["string", "null"], "format": name}))
    assert [tiny.takes(grammar, json.dumps(value)) for value in (good, None, 5)] == [True, True, False]
    assert bad is None or not tiny.takes(grammar, json.dumps(bad))


def test_what_is_required_counts_as_a_property() -> None:
    with pytest.raises(GrammarError, match="it has 1201 properties"):
        schema.prepare({"type": "object", "properties": {"a": {}}, "required": [f"b{number}" for number in range(1200)]})


def test_what_is_required_without_being_named_is_a_property_too(tiny: Language) -> None:
    value = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["zz", "a"]}
    grammar = Grammar("json_schema", schema.prepare({"type": "object", "properties": {"v": value}, "required": ["v"]}))
    assert tiny.takes(grammar, '{"v": {"a": 1, "zz": [0, {"b": null}]}}')
    assert not tiny.takes(grammar, '{"v": {"a": 1}}')
    assert not tiny.takes(grammar, '{"v": {"a": 1, "zz": 0, "more": 1}}')


LEGACY = {"structures": [{"begin": "<function=f>", "schema": CITY, "end": "</function>"}], "triggers": ["<function="]}
ANY = {"type": "any_text"}


def tag(begin: str, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def sequence(*elements: Any) -> dict[str, Any]:
    return {"format": {"type": "sequence", "elements": elements}}


def one_of(*elements: Any) -> dict[str, Any]:
    return {"format": {"type": "or", "elements": elements}}


LETTER = {"begin": "<", "content": {"type": "regex", "pattern": "[a-z]"}, "end": ">"}  # a tag's type may be left out


@pytest.mark.parametrize(
    ("value", "good", "bad"),
    [
        (LEGACY, 'so <function=f>{"city": "Rome"}</function> it is', 'so <function=f>{"days": 1}</function>'),
        (LEGACY, "nothing <b>", "so <function=g>"),
        ({"format": tag("<a>", ANY, "</a>")}, "<a>b </c</a>", "<a>b</a>c"),
        ({"format": tag("<a>", ANY, ["</a>", "!"])}, "<a>b!", "<a>b"),
        (sequence({"type": "const_string", "value": "A"}, {"type": "regex", "pattern": "[0-9]/"}), "A1/", "A/"),
        (one_of({"type": "grammar", "grammar": 'root ::= "x"'}, {"type": "json_schema", "json_schema": CITY}), '{"city": "a"}', "y"),
        ({"format": {"type": "plus", "content": {"type": "const_string", "value": "ab"}}}, "abab", "aba"),
        ({"format": {"type": "optional", "content": {"type": "const_string", "value": "ab"}}}, "", "b"),
        ({"format": {"type": "tags_with_separator", "tags": [LETTER], "separator": ","}}, "<a>,<b>", "<a><b>"),
        (
            {"format": {"type": "qwen_xml_parameter", "json_schema": CITY}},
            "<parameter=city>\nNew <York\n</parameter>\n<parameter=days>\n2\n</parameter>",
            "<parameter=days>\n2\n</parameter>",
        ),
        (
            {"format": {"type": "json_schema", "json_schema": CITY, "style": "glm_xml"}},
            "<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>",
            "<arg_key>town</arg_key>",
        ),
    ],
)
def test_structural_tags_admit_what_they_say(tiny: Language, value: Any, good: str, bad: str) -> None:
    grammar = Grammar("structural_tag", read_structural(value))
    assert tiny.takes(grammar, good)
    assert not tiny.takes(grammar, bad)
    assert read_structural({"format": json.loads(grammar.text)}) == grammar.text


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("{", "not JSON"),
        ([], "JSON object"),
        ({}, "'format', .*'structures' .*'triggers'"),
        ({"format": {"type": "foo"}}, "Invalid value 'foo'"),
        ({"format": {"type": "tag", "begin": "a", "content": ANY}}, "missing required field `end`"),
        ({"format": tag("a", {"type": "any_text", "zz": 1}, "b")}, "unknown field `zz`"),
        ({"structures": [{"begin": "<f>", "end": ""}], "triggers": []}, "'triggers'"),
        ({"structures": [{"begin": "<f>", "end": ""}], "triggers": ["<g"]}, "trigger.*'<f>'"),
        ({"structures": [{"begin": "<f>", "schema": {"not": {}}, "end": ""}], "triggers": ["<f"]}, "'not'"),
        ({"structures": [{"begin": "<f\0>", "end": ""}], "triggers": ["<f"]}, "NUL"),
        ({"format": {"type": "const_string", "value": "\ud83d"}}, "surrogate"),
        ({"format": {"type": "token", "token": 10**5000}}, "4300 digits"),
        ({"format": json.loads('{"type":"star","content":' * 100 + "1" + "}" * 100)}, "nested more than 64"),
    ],
)
def test_a_wrong_structural_tag_is_refused_with_a_reason(value: Any, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason):
        read_structural(value)


@pytest.mark.long  # bounds a thread's CPU time by 0.05 s, which a busy machine stretches
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "[xy](a{1000}){1000}"),
        ("json_schema", '{"type":"string","pattern":"^[xy](a{1000}){1000}$"}'),
        ("json_schema", json.dumps({"enum": ["x" + "a" * 60_000, "y"]})),
        ("choice", json.dumps(["x" + "a" * 60_000, "y"])),
        ("ebnf", 'root ::= [xy] a2\na2 ::= a1{1000}\na1 ::= "a"{1000}'),
        ("structural_tag", '{"type":"regex","pattern":"[xy](a{1000}){1000}"}'),
        ("structural_tag", '{"type":"grammar","grammar":"root ::= [xy] a2\\na2 ::= a1{1000}\\na1 ::= \\"a\\"{1000}"}'),
    ],
)
def test_long_texts_without_a_choice_hold_nobody_up(smol: Language, kind: str, text: str) -> None:
    """They took 90 to 1,700 ms of the engine's time, and take 1."""
    matcher = smol.matcher(Grammar(kind, text))
    begun = time.thread_time()
    for character in '"xaaa' if kind == "json_schema" else "xaaa":
        smol.admitted(matcher)
        assert matcher.accept(smol.ids(character)[0])
    assert time.thread_time() - begun < 0.05


def test_verdicts_are_kept(tiny: Language) -> None:
    class Counting:
        compiled = 0

        def compile(self, grammar: Grammar) -> Any:
            self.compiled += 1
            return tiny.backend.compile(grammar)

    backend = Counting()
    trial = Trial(backend, tiny.vocabulary.size)
    for _ in range(3):
        trial.check(Grammar("regex", "a"))
        with pytest.raises(GrammarError, match="unclosed group"):
            trial.check(Grammar("regex", "("))
    assert backend.compiled == 2
    assert trial.knows(Grammar("regex", "("))

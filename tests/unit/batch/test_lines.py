"""Cutting and checking input lines, on any bytes."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from banyan_runtime import nesting
from banyan_runtime.batch.duplicates import IdCensus
from banyan_runtime.batch.lines import Invalid, LineParser, LineSplitter, RawLine, Request, same_endpoint
from banyan_runtime.json_text import uncut
from tests.support.server.scripted import line

PARSER = LineParser("/v1/chat/completions")

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
envelopes = st.dictionaries(st.sampled_from(["custom_id", "method", "url", "body", "else"]), json_values).map(json.dumps)
good_lines = st.text(min_size=1, max_size=6).map(lambda name: line(name, "hello"))
file_lines = st.one_of(
    good_lines.map(str.encode), envelopes.map(str.encode), st.binary(max_size=40), st.sampled_from([b"", b" ", b"\r", b"\xff"])
)


def split(data: bytes, sizes: list[int], max_line_bytes: int = 1 << 20) -> list[RawLine]:
    splitter = LineSplitter(max_line_bytes=max_line_bytes)
    found = []
    for size in sizes:
        found += splitter.feed(data[:size])
        data = data[size:]
    return [*found, *splitter.feed(data), *splitter.finish()]


@given(st.lists(file_lines, max_size=12), st.lists(st.integers(0, 30), max_size=20), st.booleans(), st.booleans())
def test_every_line_is_a_request_or_invalid_exactly_once(lines: list[bytes], cuts: list[int], bom: bool, newline: bool) -> None:
    """However the file is cut into blocks, the lines that are not blank come out once each, in order, none raising."""
    data = b"\n".join(lines) + (b"\n" if newline else b"")
    assume(not data.startswith(b"\xef\xbb\xbf"))
    expected = [number for number, text in enumerate(data.split(b"\n"), start=1) if text.strip(b" \t\r\n")]
    found = split((b"\xef\xbb\xbf" if bom else b"") + data, cuts)
    assert [raw.number for raw in found] == expected
    whole = (b"\xef\xbb\xbf" if bom else b"") + data
    assert all(raw.data is not None and raw.data in whole[raw.start :].split(b"\n")[0] for raw in found), "a line is where it is said to be"
    for raw in found:
        outcome = PARSER.parse(raw)
        assert isinstance(outcome, Request | Invalid)
        assert outcome.number == raw.number
        if isinstance(outcome, Request):
            assert isinstance(json.loads(outcome.body), dict)
        else:
            msgspec.json.encode(outcome.custom_id)  # what was read of it can be written


@given(st.lists(good_lines, min_size=1, max_size=20))
def test_of_equal_custom_ids_the_first_alone_is_sent(lines: list[str]) -> None:
    ids = [json.loads(text)["custom_id"] for text in lines]
    census = IdCensus()
    for custom_id in ids:
        census.add(custom_id)
    suspects = census.suspects()
    sent = [custom_id for custom_id in ids if not suspects.seen_before(custom_id)]
    assert sent == list(dict.fromkeys(ids))


def test_duplicates_are_counted_in_eight_bytes_a_line() -> None:
    census = IdCensus(max_lines=50_000)
    for i in range(50_000):
        census.add(f"request-{i}")
    assert census.complete
    census.add("one more")
    assert not census.complete
    assert len(census.suspects()) == 0


def test_a_line_longer_than_the_limit_is_counted_but_not_kept() -> None:
    splitter = LineSplitter(max_line_bytes=100)
    found = list(splitter.feed(b"short\n"))
    for _ in range(1000):
        found += splitter.feed(b"x" * 100)
        assert len(splitter._rest) <= 100
    found += [*splitter.feed(b"\nlast"), *splitter.finish()]
    assert found == [RawLine(1, b"short", 0), RawLine(2, None, 6), RawLine(3, b"last", 100_007)]
    too_long = PARSER.parse(found[1])
    assert isinstance(too_long, Invalid)
    assert too_long.code == "invalid_json_line"


def test_a_body_is_sent_byte_for_byte() -> None:
    body = '{"messages" : [ ],"temperature":1.50, "seed":12345678901234567890,"emoji":"\\ud83d\\ude00"}'
    text = f'{{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":{body}}}'
    request = PARSER.parse(RawLine(1, text.encode()))
    assert isinstance(request, Request)
    assert (request.number, request.custom_id, request.body) == (1, "a", body.encode())


@pytest.mark.parametrize("text", ['{"custom_id":"\\ud800"', "[" * 100_000, '{"a":' * 50_000, '{"custom_id":1e999}', "\x00", "nul"])
def test_hostile_json_is_only_invalid(text: str) -> None:
    assert isinstance(PARSER.parse(RawLine(1, text.encode())), Invalid)


@pytest.mark.parametrize(("custom_id", "known"), [("a", "a"), ("", ""), ("a\\udc00", None)])
def test_half_a_character_is_named_with_the_request_that_has_it(custom_id: str, known: str | None) -> None:
    text = line("REQUEST", "hello").replace("hello", "cut in two: \\ud83d").replace("REQUEST", custom_id)
    outcome = PARSER.parse(RawLine(7, text.encode()))
    assert isinstance(outcome, Invalid)
    assert (outcome.number, outcome.custom_id, outcome.code) == (7, known, "invalid_json_line")
    broken = PARSER.parse(RawLine(7, text.encode()[:-1]))
    assert isinstance(broken, Invalid)
    assert (broken.custom_id, broken.code) == (None, "invalid_json_line")


def test_invalid_utf8_is_not_json() -> None:
    outcome = PARSER.parse(RawLine(1, line("a", "hello").encode().replace(b"hello", b"\xff\xfe")))
    assert isinstance(outcome, Invalid)
    assert outcome.code == "invalid_json_line"


@pytest.mark.parametrize("url", ["/v1/chat/completions", "/chat/completions", "https://host/v1/chat/completions", "/chat/completions/"])
def test_these_urls_mean_chat_completions(url: str) -> None:
    assert same_endpoint(url, "/v1/chat/completions")


@pytest.mark.parametrize("url", ["/v1/completions", "/completions", "/v2/chat/completions", "", "http://[", "chat/completions"])
def test_these_urls_do_not(url: str) -> None:
    assert not same_endpoint(url, "/v1/chat/completions")


def _depth(value: object) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, dict | list) + max(map(_depth, inner), default=0)


@given(json_values, st.integers(1, 6))
def test_depth_is_counted_in_brackets_outside_of_strings(value: object, most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nesting, "MOST", most)
        assert nesting.too_deep(json.dumps([value, '[[[[[[[[{{{{ \\" ]}']).encode()) == (_depth([value]) > most)


def test_a_line_that_is_nested_very_deeply_is_invalid_wherever_it_is_read() -> None:
    def parsed(depth: int, frames: int) -> Request | Invalid:
        if frames:
            return parsed(depth, frames - 1)
        inner = "[" * (depth - 2) + "]" * (depth - 2)
        text = line("a", "hello").replace('"body": {', f'"body": {{"x": {inner}, ')
        return PARSER.parse(RawLine(1, text.encode()))

    for frames in (0, 200):
        assert isinstance(parsed(nesting.MOST, frames), Request)
        deep = parsed(nesting.MOST + 1, frames)
        assert isinstance(deep, Invalid)
        assert deep.code == "invalid_json_line"
        assert str(nesting.MOST) in deep.message


@pytest.mark.parametrize(("background", "refused"), [("true", True), ("1", True), ('"no"', True), ("false", False), ("null", False)])
def test_a_response_in_the_background_is_refused_since_its_answer_would_be_none(background: str, refused: bool) -> None:
    text = line("a", "hello", url="/v1/responses").replace('"body": {', f'"body": {{"background": {background}, ')
    outcome = LineParser("/v1/responses").parse(RawLine(1, text.encode()))
    if refused:
        assert isinstance(outcome, Invalid)
        assert (outcome.code, outcome.param) == ("background_not_supported", "body.background")
    else:
        assert isinstance(outcome, Request)
    elsewhere = PARSER.parse(RawLine(1, text.replace("/v1/responses", "/v1/chat/completions").encode()))
    assert isinstance(elsewhere, Request), "chat completions know no such field"


@pytest.mark.parametrize(
    ("text", "code", "param", "found"),
    [
        ("[1]", "invalid_json_line", None, "array"),
        ("null", "invalid_json_line", None, "null"),
        (' "x"', "invalid_json_line", None, "string"),
        ("-1", "invalid_json_line", None, "number"),
        ("[1", "invalid_json_line", None, ""),
        ("NaN", "invalid_json_line", None, "NaN"),
        ('{"body":{"seed":-Infinity}}', "invalid_json_line", None, "-Infinity"),
        (line("a", "x", method="GET"), "invalid_method", "method", '"GET"'),
        (line("a", "x", method="é" * 100), "invalid_method", "method", json.dumps("é" * 100)[:60] + "…"),
        (line("a", "x", url="/v1/x"), "url_mismatch", "url", '"/v1/x"'),
        (line("a", "x").replace('"a"', "5"), "invalid_custom_id", "custom_id", "5"),
        (line("a", "x", body=[1]), "invalid_body", "body", "[1]"),
    ],
)
def test_what_is_wrong_with_a_line_is_told_with_what_was_found(text: str, code: str, param: str | None, found: str) -> None:
    outcome = PARSER.parse(RawLine(1, text.strip().encode()))
    assert isinstance(outcome, Invalid)
    assert (outcome.code, outcome.param) == (code, param)
    assert found in outcome.message


@given(st.text(st.sampled_from('ab\\"\u2028\u2029\u0085\u2027\u202a\u0084é한\U0001f600\n')))
def test_no_reader_of_lines_cuts_what_was_written_uncut(text: str) -> None:
    written = uncut(msgspec.json.encode({text: [text]}))
    assert len(written.decode().splitlines()) == 1
    assert json.loads(written) == {text: [text]}

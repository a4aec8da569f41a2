"""Stop regexes: found wherever the text is cut, held back as briefly as can be, refused where they would hold up others."""

from __future__ import annotations

import random
import re

import pytest

from banyan_runtime.front.text.stop_regex import BadRegex, RegexMatcher, Stops, TooSlow, check


def cut(patterns: list[str], pieces: list[str], *, include: bool = False) -> tuple[str, str | None]:
    matcher = RegexMatcher(patterns, include=include)
    text = "".join(matcher.feed(piece) for piece in pieces)
    return (text if matcher.matched is not None else text + matcher.finish()), matcher.matched


@pytest.mark.parametrize(
    ("patterns", "text", "before", "matched"),
    [
        ([r"\d{3}"], "ab12 345 6", "ab12 ", "345"),
        ([r"END[!?]"], "abcEND. END!xyz", "abcEND. ", "END!"),
        (["bc", "abcd"], "abcd", "a", "bc"),
        (["[.]\\s"], "one.two. three", "one.two", ". "),
        (["never"], "nev", "nev", None),
        (["ü+x"], "aüüxb", "a", "üüx"),
        (["^foo"], "barfoo", "barfoo", None),
        (["^bar"], "barfoo", "", "bar"),
        ([r"\bfoo\s"], "xfoo foo baz", "xfoo ", "foo "),
        (["(?<=a)b"], "xb ab", "xb a", "b"),
        ([r"\bend\b"], "ending, the end. More", "ending, the ", "end"),
        ([r"the end\b"], "the ending", "the ending", None),
        (["(?m)^END$"], "ENDING\nEND OF\nEND\nmore", "ENDING\nEND OF\n", "END"),
        (["abc$"], "abc abc\nabc", "abc abc\n", "abc"),
        (["abc$"], "abc abc\nabcd", "abc abc\nabcd", None),
        (["abc$", "bcd"], "abcd", "a", "bcd"),
        ([r"stop(?!ped|s)"], "stopped stops stop it", "stopped stops ", "stop"),
        ([r"a+(?=b)"], "aa aab", "aa ", "aa"),
        ([r"\$\d"], "a $b $1", "a $b ", "$1"),
    ],
)
def test_a_match_is_found_however_the_text_comes(patterns: list[str], text: str, before: str, matched: str | None) -> None:
    chance = random.Random(1)
    splits = [[text], list(text)]
    splits += [[text[:at], text[at:]] for at in range(len(text))]
    splits += [re.findall(r".{1,3}", text, re.DOTALL) if chance.random() < 0.5 else list(text) for _ in range(5)]
    for pieces in splits:
        assert cut(patterns, pieces) == (before, matched)


def test_the_match_stays_where_it_is_wanted() -> None:
    assert cut([r"\d"], ["ab1c"], include=True) == ("ab1", "1")


@pytest.mark.parametrize("pattern", ["end$", r"\bend\b", r"end\Z", "end(?!s)", "(?m)^the end$"])
def test_the_end_of_what_has_come_so_far_decides_nothing(pattern: str) -> None:
    check(pattern)
    matcher = RegexMatcher([pattern], include=False)
    assert matcher.feed("the end") in ("the ", "")
    assert matcher.matched is None
    assert matcher.feed("s meet").endswith("ends meet")


@pytest.mark.long  # unstable: bounded by processor time, which a busy machine stretches
def test_patterns_that_look_ahead_are_not_given_up() -> None:
    matcher = RegexMatcher([rf"(?m)^(answer|result) {number}$(?!\n#)" for number in range(32)], include=False)
    for _ in range(50):
        matcher.feed("answer 42\nresult 7 is")
    assert matcher.matched is None


@pytest.mark.parametrize("pattern", ["foo", r"foo\b", "foo(?! bar b)", r"(?m)foo\b"])
def test_a_match_that_ends_too_early_stays_none(pattern: str) -> None:
    for pieces in ([" bar baz"], list(" bar baz"), []):
        matcher = RegexMatcher([pattern], include=False)
        said = [matcher.feed("foo", allowed=False), *(matcher.feed(piece) for piece in pieces), matcher.finish()]
        assert ("".join(said), matcher.matched) == ("foo" + "".join(pieces), None)
    later = RegexMatcher([pattern], include=False)
    assert later.feed("foo f", allowed=False) + later.feed("oo then some more text") == "foo "
    assert later.matched == "foo"


def test_only_what_may_become_a_match_is_held_back() -> None:
    matcher = RegexMatcher([r"ab\d\dz"], include=False)
    assert matcher.feed("xxab1") == "xx"
    assert matcher.feed("q") == "ab1q"
    endless = RegexMatcher([r"<.*>"], include=False)
    assert len(endless.feed("<" + "x" * 5000)) > 3900


def test_what_comes_before_the_least_number_of_tokens_is_no_match() -> None:
    matcher = RegexMatcher([r"\d"], include=False)
    assert matcher.feed("a1", allowed=False) == "a1"
    assert matcher.feed("b2") == "b"
    assert matcher.matched == "2"


def test_strings_and_regexes_are_looked_for_together() -> None:
    stops = Stops(["STOP"], [r"\d"], include=False)
    assert stops.feed("ab ST") + stops.feed("OP 1") == "ab "
    assert stops.matched == "STOP"
    stops = Stops(["STOP"], [r"\d"], include=False)
    assert stops.feed("ab 1 STOP") == "ab "
    assert stops.matched == "1"
    stops = Stops(["STOP"], ["12 X"], include=False)
    assert stops.feed("foo 12 STOP") == "foo 12 "
    stops = Stops(["STOP"], ["xy"], include=False)
    assert stops.feed("ab STx") + stops.finish() == "ab STx"


@pytest.mark.parametrize(("end", "text", "matched"), [("ity of cats", "a city of ", "c"), ("ity", "a city", None), ("", "a c", None)])
def test_what_a_string_holds_back_is_as_early_for_a_regex_as_it_came(end: str, text: str, matched: str | None) -> None:
    stops = Stops(["cityZZZ"], ["c"], include=False)
    said = stops.feed("a c", allowed=False) + stops.feed(end)
    assert (said if stops.matched else said + stops.finish(), stops.matched) == (text, matched)


@pytest.mark.parametrize("pattern", ["(", "a*", "(a{1000}){1000}", "[z-a]", ""])
def test_a_pattern_that_cannot_be_looked_for_is_refused(pattern: str) -> None:
    with pytest.raises(BadRegex):
        check(pattern)


def test_searches_that_are_slow_at_every_character_are_given_up() -> None:
    matcher = RegexMatcher(["(?:hello world foo bar baz){e<=8}"], include=False)  # milliseconds each, more and more
    with pytest.raises(TooSlow):
        matcher.feed("some text " * 500)


@pytest.mark.long  # unstable: bounded by processor time, which a busy machine stretches
def test_many_usual_patterns_are_not_given_up() -> None:
    matcher = RegexMatcher([rf"(?i)[^\n]*answer {number}:.*\n\n" for number in range(32)], include=False)
    for _ in range(50):
        matcher.feed("the answer is 42. ")
    assert matcher.matched is None

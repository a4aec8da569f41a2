"""Stop strings across any border of tokens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from banyan_runtime.front.text.stops import StopMatcher
from tests.front.support import splits


def run(stops: list[str], deltas: list[str], *, include: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include=include)
    out = ""
    for delta in deltas:
        out += matcher.feed(delta)
        if matcher.matched is not None:
            return out, matcher.matched
    return out + matcher.finish(), None


@pytest.mark.parametrize(
    ("stops", "text", "include", "expected", "matched"),
    [
        (["END"], "abcENDxyz", False, "abc", "END"),
        (["END"], "abcENDxyz", True, "abcEND", "END"),
        (["END"], "abcEN", False, "abcEN", None),
        (["END"], "EEENEND", False, "EEEN", "END"),
        (["\n\n"], "a\nb", False, "a\nb", None),
        (["\n\n", "THE END"], "once\n\nupon", False, "once", "\n\n"),
        (["bc", "abcd"], "abcd", False, "a", "bc"),
        (["abab"], "aababab", False, "a", "abab"),
        (["é"], "caf\u00e9!", False, "caf", "é"),
    ],
)
def test_the_text_is_cut_at_the_stop_however_it_arrives(
    stops: list[str], text: str, include: bool, expected: str, matched: str | None
) -> None:
    for deltas in splits(text):
        assert run(stops, deltas, include=include) == (expected, matched), deltas


def test_of_stops_that_end_together_the_first_listed_is_named() -> None:
    assert run(["bc", "abc"], ["abc"]) == ("a", "bc")
    assert run(["abc", "bc"], ["abc"]) == ("", "abc")


def test_only_what_may_become_a_stop_is_held_back() -> None:
    matcher = StopMatcher(["\n\n"], include=False)
    assert [matcher.feed("a\n"), matcher.feed("b"), matcher.feed("cd")] == ["a", "\nb", "cd"]


def test_a_match_that_ends_before_min_tokens_is_text() -> None:
    matcher = StopMatcher(["aa"], include=False)
    assert matcher.feed("aa", allowed=False) + matcher.feed("b") + matcher.finish() == "aab"
    matcher = StopMatcher(["aa"], include=False)
    assert (matcher.feed("a", allowed=False) + matcher.feed("a"), matcher.matched) == ("", "aa")


@given(st.text("ab\n", max_size=24), st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3), st.data())
@settings(max_examples=300, deadline=None)
def test_pieces_give_what_single_characters_give(text: str, stops: list[str], data: st.DataObject) -> None:
    deltas, rest = [], text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        deltas.append(rest[:size])
        rest = rest[size:]
    assert run(stops, deltas) == run(stops, list(text))

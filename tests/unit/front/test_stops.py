"""Stop strings across any border of tokens."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from banyan_runtime.front.text.stops import StopMatcher
from tests.unit.front.support import splits

Piece = tuple[str, bool]
"""The text of a token, and whether a stop may end in it."""


def run(stops: list[str], deltas: list[str], *, include: bool = False) -> tuple[str, str | None]:
    return run_pieces(stops, [(delta, True) for delta in deltas], include=include)


def run_pieces(stops: list[str], pieces: list[Piece], *, include: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include=include)
    out = ""
    for text, allowed in pieces:
        out += matcher.feed(text, allowed=allowed)
        if matcher.matched is not None:
            return out, matcher.matched
    return out + matcher.finish(), None


def expected(stops: list[str], pieces: list[Piece]) -> tuple[str, str | None]:
    """The stop that ends first of those that end where it is allowed."""
    text = "".join(piece for piece, _ in pieces)
    allowed = [may for piece, may in pieces for _ in piece]
    ends = [(end, stop) for end in range(1, len(text) + 1) if allowed[end - 1] for stop in stops if text[:end].endswith(stop)]
    return (text[: ends[0][0] - len(ends[0][1])], ends[0][1]) if ends else (text, None)


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


@pytest.mark.parametrize("stops", [["c"], ["c", "cityZZZ"], ["cityZZZ", "c"]])
def test_what_is_held_back_for_one_stop_is_no_match_of_another(stops: list[str]) -> None:
    pieces = [("a c", False), ("ity", False), (" of cheese", True)]
    assert run_pieces(stops, pieces) == ("a city of ", "c")
    assert run_pieces(stops, [*pieces[:2], (" of", True)]) == ("a city of", None)


PIECES = st.lists(st.tuples(st.text("ab", max_size=4), st.booleans()), max_size=10)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


@given(PIECES, STOPS, st.lists(st.text("ab", max_size=6), max_size=3), st.randoms())
def test_stops_that_never_occur_change_nothing(pieces: list[Piece], stops: list[str], others: list[str], dice: random.Random) -> None:
    never = [other + "Z" for other in others]
    assert run_pieces(stops, pieces) == expected(stops, pieces)
    longer = list(stops)
    for stop in never:
        longer.insert(dice.randint(0, len(longer)), stop)
    assert run_pieces(longer, pieces) == expected(stops, pieces)


@given(PIECES, STOPS)
def test_how_the_text_of_a_token_is_cut_does_not_matter(pieces: list[Piece], stops: list[str]) -> None:
    assert run_pieces(stops, [(character, allowed) for text, allowed in pieces for character in text]) == run_pieces(stops, pieces)


@given(st.text("ab\n", max_size=24), st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3), st.data())
def test_pieces_give_what_single_characters_give(text: str, stops: list[str], data: st.DataObject) -> None:
    deltas, rest = [], text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        deltas.append(rest[:size])
        rest = rest[size:]
    assert run(stops, deltas) == run(stops, list(text))

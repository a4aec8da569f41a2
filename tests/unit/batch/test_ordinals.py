"""Sets of ordinals as text: short, exact, and refused where they were not written by us."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from banyan_runtime.batch import ordinals


@given(st.sets(st.integers(0, 10_000)))
def test_what_is_written_is_read_again(ones: set[int]) -> None:
    assert list(ordinals.read(ordinals.written(sorted(ones)))) == sorted(ones)


@pytest.mark.parametrize(
    ("ones", "text"),
    [([], ""), ([0], "0"), ([0, 1], "0-1"), ([7], "7"), ([0, 2, 3, 4, 9], "0,2-4,9"), (range(200), "0-199")],
)
def test_neighbours_are_one_run(ones: list[int], text: str) -> None:
    assert ordinals.written(ones) == text


@given(st.integers(1, 1000), st.sets(st.integers(0, 999), max_size=20))
def test_the_text_grows_with_the_gaps_and_not_with_the_lines(count: int, gaps: set[int]) -> None:
    text = ordinals.written(one for one in range(count) if one not in gaps)
    assert len(text.split(",")) <= len(gaps) + 1


@pytest.mark.parametrize("text", ["2-1", "3,3", "3,2", "0-4,4", "5,0-1", "a", "1-", "-1", "1,,2", "0-1-2"])
def test_what_was_not_written_by_us_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        list(ordinals.read(text))


@pytest.mark.parametrize("ones", [[1, 1], [2, 1], [0, 5, 4]])
def test_ordinals_that_do_not_ascend_are_a_defect(ones: list[int]) -> None:
    with pytest.raises(AssertionError):
        ordinals.written(ones)

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from banyan_runtime.engine.memory.pages import PagePool


@given(st.integers(1, 40), st.sampled_from([1, 16, 32, 64]), st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=60))
def test_a_page_is_free_or_taken_and_never_both(capacity: int, page_size: int, actions: list[tuple[bool, int]]) -> None:
    pool = PagePool(capacity * page_size, page_size)
    taken: list[int] = []
    for take, count in actions:
        if take and count * page_size <= pool.free_tokens:
            taken += pool.take(count).tolist()
        elif not take:
            given_back, taken = taken[:count], taken[count:]
            pool.give(np.array(given_back, dtype=np.int32))
        assert sorted(taken + pool.free_pages().tolist()) == list(range(1, capacity + 1))
        assert pool.free_tokens == (capacity - len(taken)) * page_size


def test_the_padding_page_is_never_given_out() -> None:
    assert 0 not in PagePool(64, 16).take(4).tolist()


def test_pages_are_given_out_again_after_all_that_were_free_longer() -> None:
    pool = PagePool(4, 1)
    first = pool.take(2)
    pool.give(first)
    assert pool.take(4).tolist() == [3, 4, 1, 2]


def test_giving_a_free_page_and_taking_too_many_are_caught() -> None:
    pool = PagePool(4, 1)
    with pytest.raises(AssertionError, match="double free"):
        pool.give(np.array([1], dtype=np.int32))
    with pytest.raises(AssertionError, match="5 pages asked, 4 free"):
        pool.take(5)

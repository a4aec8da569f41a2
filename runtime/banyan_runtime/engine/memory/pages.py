"""The allocator of KV pages. A page is `page_size` consecutive slots; slot = page * page_size + offset.

The free list lives on the host as one numpy ring: taking and giving n pages is two slice copies, whatever the pool's size.
Page 0 is never given out, because slot 0 (step.PADDING_SLOT) is where padded rows write.
"""

from __future__ import annotations

import numpy as np

from banyan_runtime.step import I32


class PagePool:
    """Which pages are free. Taking what is not there, or giving what is free already, is a bug and asserts."""

    def __init__(self, pool_tokens: int, page_size: int) -> None:
        assert pool_tokens > 0 == pool_tokens % page_size, f"a pool of {pool_tokens} tokens in pages of {page_size}"
        self.page_size = page_size
        self.capacity = pool_tokens // page_size
        self._ring: I32 = np.arange(1, self.capacity + 1, dtype=np.int32)
        self._head = 0
        self._count = self.capacity
        self._is_free = np.ones(self.capacity + 1, dtype=np.bool_)
        self._is_free[0] = False

    @property
    def free_tokens(self) -> int:
        return self._count * self.page_size

    def take(self, count: int) -> I32:
        """`count` free pages, int32[count]. The caller has made sure that there are as many."""
        assert 0 <= count <= self._count, f"{count} pages asked, {self._count} free"
        pages = self._span(self._head, count)
        self._head = (self._head + count) % self.capacity
        self._count -= count
        self._is_free[pages] = False
        return pages

    def give(self, pages: I32) -> None:
        """Take pages back, int32[n]; they are given out again after all that were free before them."""
        count = len(pages)
        if not count:
            return
        assert not self._is_free[pages].any(), f"double free of a page in {pages}"
        self._is_free[pages] = True
        tail = (self._head + self._count) % self.capacity
        first = min(count, self.capacity - tail)
        self._ring[tail : tail + first] = pages[:first]
        self._ring[: count - first] = pages[first:]
        self._count += count
        assert self._count <= self.capacity

    def free_pages(self) -> I32:
        """A copy of the free list in the order of giving out; for checks, since it costs O(pool)."""
        return self._span(self._head, self._count)

    def _span(self, start: int, count: int) -> I32:
        end = start + count
        if end <= self.capacity:
            return self._ring[start:end].copy()
        return np.concatenate((self._ring[start:], self._ring[: end - self.capacity]))

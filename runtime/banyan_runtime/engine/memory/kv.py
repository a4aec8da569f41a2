"""The KV memory as the scheduler sees it: slots of admitted requests, moved between pool, rows and prefix tree.

Every slot is in exactly one of three places: free in the pool, cached in the tree (locked or evictable), or private to one
request (positions shared[row] ... allocated[row] - 1 of its row, in whole pages). Each method moves slots between them and
leaves the sum whole; `imbalance` recomputes it from four independent counts.
"""

from __future__ import annotations

import numpy as np

from banyan_runtime.engine.memory.pages import PagePool
from banyan_runtime.engine.memory.prefixes import Node, NoPrefixes, PrefixTree
from banyan_runtime.engine.memory.tables import Tables
from banyan_runtime.engine.request import Request
from banyan_runtime.step import I32


class KvMemory:
    """Pool, tree and rows together. Sizes are in tokens."""

    def __init__(self, *, pool_tokens: int, page_size: int, rows: int, context_len: int, radix: bool) -> None:
        self.total = pool_tokens
        self.page_size = page_size
        self.tables = Tables(rows, context_len)
        self.evicted_tokens = 0
        self._radix = radix
        self._offsets: I32 = np.arange(page_size, dtype=np.int32)
        self.pages, self.prefixes = self._empty()

    def reset(self) -> None:
        """Forget every slot and row. Only while there is no request."""
        self.tables.reset()
        self.pages, self.prefixes = self._empty()

    def _empty(self) -> tuple[PagePool, PrefixTree]:
        tree = PrefixTree if self._radix else NoPrefixes
        return PagePool(self.total, self.page_size), tree(self.page_size)

    @property
    def available(self) -> int:
        """What can be had: free, or cached and not locked."""
        return self.pages.free_tokens + self.prefixes.evictable

    @property
    def used(self) -> int:
        """What running requests hold, locked prefixes included."""
        return self.total - self.available

    @property
    def private(self) -> int:
        held = self.tables.allocated
        if self.page_size > 1:
            held = -(-held // self.page_size) * self.page_size
        return int(np.add.reduce(held, dtype=np.int64)) - int(np.add.reduce(self.tables.shared, dtype=np.int64))

    def private_of(self, row: int) -> int:
        """Tokens that come free when this row is released, beside those it shares with the tree."""
        return self.whole_pages(int(self.tables.allocated[row])) - int(self.tables.shared[row])

    def imbalance(self) -> int:
        """Tokens that are missing from, or counted twice in, free + evictable + protected + private. 0 unless there is a
        bug."""
        return self.total - (self.pages.free_tokens + self.prefixes.evictable + self.prefixes.protected + self.private)

    def whole_pages(self, tokens: int) -> int:
        """`tokens` rounded up to pages."""
        return -(-tokens // self.page_size) * self.page_size

    def admit(self, request: Request, node: Node, matched: int) -> None:
        """Give `request` a row that starts with the `matched` cached tokens on the path to `node`, which the caller has
        locked for it."""
        tables = self.tables
        row = tables.take()
        ids = request.token_ids
        tables.tokens[row, : len(ids)] = ids
        if matched:
            self.prefixes.gather(node, tables.slots[row])
            tables.changed(row, 0, matched)
        tables.length[row] = len(ids)
        tables.prompt[row] = request.prompt_len
        tables.max_new[row] = request.max_new
        tables.allocated[row] = tables.shared[row] = matched
        tables.ids[row] = request.id
        request.row = row
        request.node = node

    def extend(self, request: Request, upto: int) -> I32:
        """Slots for the positions from allocated to `upto` - 1; returns them, int32[n]. The scheduler has budgeted them."""
        tables, page, row = self.tables, self.page_size, request.row
        start = int(tables.allocated[row])
        count = -(-upto // page) - -(-start // page)
        self.make_room(count * page)
        pages = self.pages.take(count)
        inside = start % page
        if inside:
            # the page that is partly filled belongs to this request alone, for the tree only takes whole ones
            pages = np.concatenate((tables.slots[row, start - 1 : start] // page, pages))
        slots: I32 = np.add.outer(pages * page, self._offsets).ravel()[inside : inside + upto - start]
        tables.slots[row, start:upto] = slots
        tables.allocated[row] = upto
        return slots

    def decode_need(self, rows: I32) -> int:
        """Tokens of the new pages that one more position for each of `rows` takes."""
        if self.page_size == 1:
            return len(rows)
        return int(np.count_nonzero(self.tables.allocated[rows] % self.page_size == 0)) * self.page_size

    def extend_each(self, rows: I32) -> tuple[I32, I32]:
        """One more position for each of `rows`; returns positions and slots, int32[n] each. There is room for them."""
        tables, page = self.tables, self.page_size
        positions = tables.allocated[rows]
        if page == 1:
            slots = self.pages.take(len(rows))
        else:
            opens = positions % page == 0
            slots = tables.slots[rows, positions - 1] + 1
            slots[opens] = self.pages.take(int(np.count_nonzero(opens))) * page
        tables.slots[rows, positions] = slots
        tables.allocated[rows] = positions + 1
        return positions, slots

    def fitting(self, rows: I32, counts: list[int]) -> list[int]:
        """How many positions behind the next one each of `rows` can have, at most `counts`; what the rows need for one each is free."""
        left = self.available - self.decode_need(rows)
        fits = []
        for allocated, count in zip(self.tables.allocated[rows].tolist(), counts, strict=True):
            need = self.whole_pages(allocated + 1 + count) - self.whole_pages(allocated + 1)
            if need > left:
                need, count = 0, self.whole_pages(allocated + 1) - allocated - 1  # what is left of its page
            left -= need
            fits.append(count)
        return fits

    def trim(self, rows: I32) -> None:
        """Take back what `rows` have beyond the tokens that are computed, all known ones but the last: drafts that were wrong."""
        tables = self.tables
        for row, keep, end in zip(rows.tolist(), (tables.length[rows] - 1).tolist(), tables.allocated[rows].tolist(), strict=True):
            if end > keep:
                self._give(tables.slots[row, self.whole_pages(keep) : end])
                tables.allocated[row] = keep

    def make_room(self, tokens: int) -> None:
        """Evict until `tokens` are free, as far as possible."""
        missing = tokens - self.pages.free_tokens
        if missing > 0:
            self.evict(missing)

    def evict(self, tokens: int) -> None:
        for slots in self.prefixes.evict(tokens):
            self.evicted_tokens += len(slots)
            self._give(slots)

    def store(self, request: Request, upto: int) -> None:
        """Hand the first `upto` computed tokens to the tree (whole pages), so that others find them; the request goes on
        with the tree's slots, under a lock."""
        start, end = self._share(request, upto)
        if end > start:
            self.tables.changed(request.row, start, end)

    def _share(self, request: Request, upto: int) -> tuple[int, int]:
        """Do what `store` says; returns the range of positions whose slots were replaced by the tree's own."""
        tables, row = self.tables, request.row
        keep = self.prefixes.accepts(upto)
        shared = int(tables.shared[row])
        if keep <= shared:
            return 0, 0
        slots = tables.slots[row]
        node, present = self.prefixes.insert(request.key_of(tables.tokens[row, :keep]), slots[:keep], request.salt)
        self.prefixes.lock(node)
        if present > shared:
            own = slots[shared:present].copy()
            self.prefixes.gather(node, slots)
            self._give(own)
        assert request.node is not None
        self.prefixes.unlock(request.node)
        request.node = node
        tables.shared[row] = keep
        return shared, present

    def release(self, request: Request, keep: int) -> None:
        """Take everything back: the first `keep` tokens stay in the tree for others, the rest is free."""
        tables, row = self.tables, request.row
        if keep:
            self._share(request, keep)
        start, end = int(tables.shared[row]), int(tables.allocated[row])
        self._give(tables.slots[row, start:end])
        assert request.node is not None
        self.prefixes.unlock(request.node)
        request.node = None
        request.row = -1
        tables.release(row)

    def _give(self, slots: I32) -> None:
        """Free whole pages by their slots; the last page may be named by its first slots only."""
        self.pages.give(slots[:: self.page_size] // self.page_size if self.page_size > 1 else slots)

from __future__ import annotations

from itertools import count

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from banyan_runtime.engine.in_batch_prefix import InBatchPrefixes
from banyan_runtime.engine.memory.prefixes import ID_BYTES, Node, NoPrefixes, PrefixTree, common_tokens
from banyan_runtime.wire import pack_ids
from tests.unit.engine.cost import lines_run

TEXT = st.lists(st.integers(0, 2), max_size=12)


def shared(left: list[int], right: list[int]) -> int:
    return next((index for index, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


@given(TEXT, TEXT)
def test_common_tokens_counts_the_tokens_that_two_texts_begin_with(left: list[int], right: list[int]) -> None:
    for start in range(len(left) + 1):
        assert common_tokens(pack_ids(left), start * ID_BYTES, pack_ids(right)) == shared(left[start:], right)


@given(st.lists(TEXT, max_size=12), TEXT)
def test_in_batch_prefixes_find_the_longest_common_prefix_with_any_text(texts: list[list[int]], text: list[int]) -> None:
    prefixes = InBatchPrefixes()
    for other in texts:
        prefixes.add(pack_ids(other), "")
    assert prefixes.longest(pack_ids(text), "") == max((shared(other, text) for other in texts), default=0)
    assert prefixes.longest(pack_ids(text), "another tenant") == 0


class TreeMachine(RuleBasedStateMachine):
    """The tree against a plain dictionary from cached texts (whole pages) to the first slot of their last page."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[tuple[str, tuple[int, ...]], int] = {}  # by salt and text
        self.locked: list[tuple[Node, str, list[int]]] = []
        self.pages = count(1)

    @initialize(page=st.sampled_from([1, 2]))
    def start(self, page: int) -> None:
        self.page = page
        self.tree = PrefixTree(page)

    def expected(self, text: list[int], salt: str) -> int:
        longest = 0
        while longest + self.page <= len(text) and (salt, tuple(text[: longest + self.page])) in self.known:
            longest += self.page
        return longest

    @rule(text=TEXT, salt=st.sampled_from(["", "a"]))
    def insert(self, text: list[int], salt: str) -> None:
        text = text[: self.tree.accepts(len(text))]
        present = self.expected(text, salt)
        pages = [next(self.pages) for _ in range(len(text) // self.page)]
        slots = np.array([page * self.page + offset for page in pages for offset in range(self.page)], dtype=np.int32)
        assert self.tree.insert(pack_ids(text), slots, salt)[1] == present
        for start in range(present, len(text), self.page):
            self.known[salt, tuple(text[: start + self.page])] = int(slots[start])

    @rule(text=TEXT, salt=st.sampled_from(["", "a"]), lock=st.booleans())
    def match(self, text: list[int], salt: str, lock: bool) -> None:
        expected = self.expected(text, salt)
        assert self.tree.longest(pack_ids(text), salt) == expected
        node, length = self.tree.match(pack_ids(text), salt)
        assert length == expected
        out = np.zeros(length, dtype=np.int32)
        self.tree.gather(node, out)
        starts = [self.known[salt, tuple(text[: start + self.page])] for start in range(0, length, self.page)]
        assert out.tolist() == [start + offset for start in starts for offset in range(self.page)]
        if lock:
            self.tree.lock(node)
            self.locked.append((node, salt, text[:length]))

    @precondition(lambda self: self.locked)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        node, _, _ = self.locked.pop(data.draw(st.integers(0, len(self.locked) - 1)))
        self.tree.unlock(node)

    @rule(tokens=st.integers(1, 8))
    def evict(self, tokens: int) -> None:
        room = self.tree.evictable
        gone = {int(slot) for slots in self.tree.evict(tokens) for slot in slots}
        assert len(gone) >= min(tokens, room)
        self.known = {key: slot for key, slot in self.known.items() if slot not in gone}
        for _, salt, text in self.locked:
            assert self.expected(text, salt) == len(text), "what is locked stays"

    @invariant()
    def counts_are_those_of_the_nodes(self) -> None:
        if not hasattr(self, "tree"):
            return
        nodes = list(self.tree.nodes())
        total = sum(len(node.slots) for node in nodes)
        assert total == len(self.known) * self.page == self.tree.evictable + self.tree.protected
        locked = {(salt, tuple(text[:end])) for _, salt, text in self.locked for end in range(self.page, len(text) + 1, self.page)}
        assert self.tree.protected == len(locked) * self.page
        assert set(self.tree.evictable_leaves()) == {node for node in nodes if not node.locks and not node.children}
        assert all((node.parent is not None and node.used <= node.parent.used) or node.parent.parent is None for node in nodes)


TestTree = TreeMachine.TestCase
TestTree.settings = settings(stateful_step_count=40, deadline=None)


def insert(tree: PrefixTree, text: list[int], salt: str = "") -> None:
    tree.insert(pack_ids(text), np.arange(1, len(text) + 1, dtype=np.int32), salt)


def cached(tree: PrefixTree, text: list[int], salt: str = "") -> int:
    return tree.longest(pack_ids(text), salt)


def test_the_least_recently_used_text_goes_first() -> None:
    tree = PrefixTree(1)
    for first in (1, 2, 3):
        insert(tree, [first, 0, 0])
    tree.match(pack_ids([1, 0, 0]), "")
    tree.evict(3)
    assert [cached(tree, [first, 0, 0]) for first in (1, 2, 3)] == [3, 0, 3]


def test_a_conversation_that_went_cold_goes_as_a_whole_before_a_warm_one_is_touched() -> None:
    tree = PrefixTree(1)
    insert(tree, [1, 1])
    insert(tree, [1, 1, 2, 2])
    insert(tree, [9, 9])
    insert(tree, [9, 9, 8, 8])
    tree.evict(4)
    assert cached(tree, [1, 1, 2, 2]) == 0
    assert cached(tree, [9, 9, 8, 8]) == 4


def test_a_prefix_that_another_branch_still_uses_outlives_the_branch_that_went() -> None:
    tree = PrefixTree(1)
    insert(tree, [1, 1, 2, 2])
    insert(tree, [9, 9])
    tree.match(pack_ids([1, 1, 3]), "")
    tree.evict(2)
    tree.evict(1)
    assert cached(tree, [1, 1]) == 2
    assert cached(tree, [9, 9]) == 0


def test_other_salts_see_nothing_and_a_salt_goes_with_its_last_text() -> None:
    tree = PrefixTree(1)
    insert(tree, [1, 2, 3], "tenant")
    assert cached(tree, [1, 2, 3]) == 0
    assert tree.match(pack_ids([1, 2, 3]), "other")[1] == 0
    assert tree.salts == 1
    tree.evict(3)
    assert tree.salts == 0


def test_without_a_radix_cache_nothing_is_found_and_nothing_accepted() -> None:
    tree = NoPrefixes(1)
    node, length = tree.match(pack_ids([1, 2, 3]), "")
    tree.lock(node)
    assert (length, tree.accepts(100), tree.longest(pack_ids([1]), "")) == (0, 0, 0)
    assert tree.evict(5) == []


def test_evicting_costs_the_same_however_many_leaves_there_are() -> None:
    costs = []
    for leaves in (100, 10_000):
        tree = PrefixTree(1)
        for leaf in range(leaves):
            insert(tree, [*range(10), 1000 + leaf, *range(29)])
        freed: list[object] = []
        costs.append(lines_run(lambda tree=tree, freed=freed: freed.extend(tree.evict(160))))  # type: ignore[misc]
        assert len(freed) == 6
    assert costs[0] == costs[1] < 6 * 20


def test_looking_up_costs_the_depth_of_the_path_not_the_size_of_the_tree() -> None:
    costs = []
    for leaves in (100, 10_000):
        tree = PrefixTree(1)
        for leaf in range(leaves):
            insert(tree, [*range(500), 1000 + leaf, *range(30)])
        key = pack_ids([*range(500), 1050, *range(30)])
        costs.append(lines_run(lambda tree=tree, key=key: tree.match(key, "")))  # type: ignore[misc]
    assert costs[0] == costs[1]

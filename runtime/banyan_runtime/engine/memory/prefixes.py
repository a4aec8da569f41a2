"""The prefix cache: a radix tree from token ids to KV slots, one root per salt.

Keys are the bytes of int32 token ids, because comparing bytes is the fastest of all the forms measured (a full hit on 2,512
tokens takes 3 µs). Nodes that a running request reads are locked, with all their ancestors; unlocked leaves stand in one
OrderedDict, least recently used first, so that evicting costs O(1) a leaf whatever the tree's size. Everything is in whole
pages; the rest of a sequence stays with its request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np

from banyan_runtime.step import I32

ID_BYTES: Final = 4  # a token id is an int32


class Node:
    """An edge of the tree: `key` are its token ids, `slots` where their keys and values lie. The root's key is empty."""

    __slots__ = ("children", "key", "locks", "parent", "salt", "slots", "used")

    def __init__(self, key: bytes, slots: I32, parent: Node | None, salt: str) -> None:
        self.key = key
        self.slots = slots
        self.parent = parent
        self.salt = salt
        self.children: dict[bytes, Node] = {}  # by the first page of the child's key
        self.locks = 0  # requests whose last node is this one or below it
        self.used = 0  # tick of the last touch; an ancestor's is never older than its descendant's

    def path(self) -> Iterator[Node]:
        """This node and its ancestors, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


def common_tokens(key: bytes, start: int, other: bytes) -> int:
    """How many leading tokens `other` shares with `key[start:]` (`start` in bytes)."""
    length = min(len(key) - start, len(other))
    head = other if length == len(other) else other[:length]
    if key.startswith(head, start):
        return length // ID_BYTES
    count = length // ID_BYTES
    differ = np.frombuffer(key, np.int32, count, start) != np.frombuffer(other, np.int32, count)
    return int(differ.argmax())


class PrefixTree:
    """Finished pages by their content. `evictable` and `protected` count cached tokens without and with a lock."""

    def __init__(self, page_size: int) -> None:
        self._page = page_size
        self._stride = page_size * ID_BYTES
        self._empty: I32 = np.empty(0, dtype=np.int32)
        self._roots: dict[str, Node] = {}
        self._nowhere = Node(b"", self._empty, None, "")  # the end of every match with a salt that has no root
        self._leaves: OrderedDict[Node, None] = OrderedDict()  # unlocked leaves, least recently used first
        self._tick = 0
        self.evictable = 0
        self.protected = 0

    def accepts(self, tokens: int) -> int:
        """How many of the first `tokens` tokens of a sequence the cache would hold: whole pages."""
        return tokens - tokens % self._page

    def longest(self, key: bytes, salt: str) -> int:
        """Tokens of `key` that are cached; looks without touching."""
        _, position, _, part = self._walk(self._roots.get(salt, self._nowhere), key)
        return position // ID_BYTES + part

    def match(self, key: bytes, salt: str) -> tuple[Node, int]:
        """The node that ends the longest cached prefix of `key`, and its length in tokens.

        Splits a node that matches in part, so that exactly the prefix can be locked.
        """
        node, position, partial, part = self._walk(self._roots.get(salt, self._nowhere), key)
        if partial is not None:
            node = self._split(partial, part)
        self._touch(node)
        return node, position // ID_BYTES + part

    def insert(self, key: bytes, slots: I32, salt: str) -> tuple[Node, int]:
        """Cache `key` (whole pages) whose tokens lie in `slots`, int32[tokens].

        Returns the node that ends it, and how many of its tokens were there already: for these the tree keeps its own
        slots, and the caller's are duplicates that the caller must free. The rest now belongs to the tree.
        """
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = Node(b"", self._empty, None, salt)
        node, position, partial, part = self._walk(root, key)
        if partial is not None:
            node = self._split(partial, part)
            position += part * ID_BYTES
        present = position // ID_BYTES
        if position < len(key):
            leaf = Node(key[position:], slots[present:].copy(), node, salt)
            node.children[leaf.key[: self._stride]] = leaf
            self._leaves.pop(node, None)
            self._leaves[leaf] = None
            self.evictable += len(leaf.slots)
            node = leaf
        self._touch(node)
        return node, present

    def gather(self, node: Node, out: I32) -> None:
        """Write the slots of the whole path to `node` into the head of `out`."""
        path = list(node.path())
        end = sum(len(part.slots) for part in path)
        for part in path:
            start = end - len(part.slots)
            out[start:end] = part.slots
            end = start

    def lock(self, node: Node) -> None:
        """Keep the path to `node` from being evicted until `unlock`."""
        for part in node.path():
            if part.locks == 0:
                self.evictable -= len(part.slots)
                self.protected += len(part.slots)
                self._leaves.pop(part, None)
            part.locks += 1

    def unlock(self, node: Node) -> None:
        self._tick += 1
        for part in node.path():
            part.used = self._tick
            part.locks -= 1
            assert part.locks >= 0
            if part.locks == 0:
                self.evictable += len(part.slots)
                self.protected -= len(part.slots)
                if not part.children:
                    self._leaves[part] = None

    def freed_by(self, nodes: Iterable[Node | None]) -> Iterator[int]:
        """How many tokens would become evictable with each of these locks, if they went one after another; changes nothing."""
        gone: dict[Node, int] = {}
        for node in nodes:
            freed = 0
            for part in node.path() if node is not None else ():
                gone[part] = gone.get(part, 0) + 1
                freed += len(part.slots) if gone[part] == part.locks else 0
            yield freed

    def evict(self, tokens: int) -> list[I32]:
        """Drop least recently used leaves until at least `tokens` tokens are out or no unlocked one is left.

        Returns the slots that are free now, an array a leaf. Whole leaves go, so it may be more than asked.
        """
        freed: list[I32] = []
        while tokens > 0 and self._leaves:
            leaf, _ = self._leaves.popitem(last=False)
            freed.append(leaf.slots)
            tokens -= len(leaf.slots)
            self.evictable -= len(leaf.slots)
            self._drop(leaf)
        return freed

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents before children; for checks."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(node.children.values())

    def evictable_leaves(self) -> list[Node]:
        """The unlocked leaves in the order in which they would go; for checks."""
        return list(self._leaves)

    @property
    def salts(self) -> int:
        """How many roots there are; a root goes with its last node."""
        return len(self._roots)

    def _walk(self, root: Node, key: bytes) -> tuple[Node, int, Node | None, int]:
        """The deepest node that matches whole, the bytes matched so far, and the child that matches only in part with how
        many tokens of it do (whole pages)."""
        stride = self._stride
        end = len(key) - len(key) % stride
        node, position = root, 0
        while position < end:
            child = node.children.get(key[position : position + stride])
            if child is None:
                break
            shared = common_tokens(key, position, child.key)
            if shared * ID_BYTES < len(child.key):
                return node, position, child, shared - shared % self._page
            node = child
            position += len(child.key)
        return node, position, None, 0

    def _split(self, node: Node, tokens: int) -> Node:
        """Cut `node` after `tokens` tokens and return the new upper part. The lower part keeps its identity, because locks
        and the LRU order refer to it."""
        cut = tokens * ID_BYTES
        parent = node.parent
        assert parent is not None
        assert 0 < tokens < len(node.slots)
        upper = Node(node.key[:cut], node.slots[:tokens], parent, node.salt)
        upper.locks = node.locks
        upper.used = node.used
        parent.children[upper.key[: self._stride]] = upper
        node.key = node.key[cut:]
        node.slots = node.slots[tokens:]
        node.parent = upper
        upper.children[node.key[: self._stride]] = node
        return upper

    def _touch(self, node: Node) -> None:
        self._tick += 1
        if node in self._leaves:
            self._leaves.move_to_end(node)
        for part in node.path():
            part.used = self._tick

    def _drop(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        assert leaf.locks == 0 == len(leaf.children)
        del parent.children[leaf.key[: self._stride]]
        if parent.children:
            return
        if parent.parent is None:
            del self._roots[parent.salt]
        elif parent.locks == 0:
            # An ancestor that was last used together with the evicted leaf is as old as it and goes next; one that was
            # used since, by way of another branch, is younger than the leaves that waited before it.
            self._leaves[parent] = None
            if parent.used == leaf.used:
                self._leaves.move_to_end(parent, last=False)


class NoPrefixes(PrefixTree):
    """What stands in for the tree under --disable-radix-cache: it holds nothing, so every slot stays with its request."""

    def accepts(self, tokens: int) -> int:
        return 0

    def longest(self, key: bytes, salt: str) -> int:
        return 0

    def match(self, key: bytes, salt: str) -> tuple[Node, int]:
        return super().match(b"", salt)

    def insert(self, key: bytes, slots: I32, salt: str) -> tuple[Node, int]:
        assert not key, "nothing was accepted"
        return super().match(b"", salt)

"""What must hold of the engine's memory after every action (reference engine.md 5.2)."""

from __future__ import annotations

from collections import Counter

import numpy as np

from banyan_runtime.engine.loop import Engine
from banyan_runtime.engine.memory.prefixes import ID_BYTES, Node


def check(engine: Engine) -> None:
    """I1 to I6 in full; costs O(pool)."""
    memory, tables = engine.memory, engine.memory.tables
    page = memory.page_size
    holders = [request for request in engine.requests.values() if request.row >= 0]

    assert memory.imbalance() == 0, "I1: free + evictable + protected + private = total"
    assert sorted(request.row for request in holders) == np.flatnonzero(tables.live).tolist()
    if not engine.requests:
        assert memory.prefixes.protected == 0 == memory.private, "I2: nothing is held at idle"
        assert not engine.scheduler.chunked
    if not engine.has_work:
        assert tables.free_rows == len(tables.live), "I2: every row is free at idle"

    places = [memory.pages.free_pages()]
    nodes = list(memory.prefixes.nodes())
    places += [node.slots[::page] // page for node in nodes]
    for request in holders:
        start, end = int(tables.shared[request.row]), int(tables.allocated[request.row])
        places.append(tables.slots[request.row, start:end:page] // page)
    everything = np.sort(np.concatenate(places))
    assert np.array_equal(everything, np.arange(1, memory.pages.capacity + 1)), "I3: each page in exactly one place"

    locks = Counter[int]()
    for request in holders:
        assert request.node is not None
        for node in request.node.path():
            locks[id(node)] += 1
    for node in nodes:
        _check_node(node, locks[id(node)], page)
    assert memory.prefixes.evictable == sum(len(node.slots) for node in nodes if not node.locks), "I5"
    assert memory.prefixes.protected == sum(len(node.slots) for node in nodes if node.locks), "I5"
    leaves = {id(node) for node in nodes if not node.locks and not node.children}
    assert leaves == {id(node) for node in memory.prefixes.evictable_leaves()}, "I5: the LRU order holds the unlocked leaves"

    for request in holders:
        assert request.node is not None
        shared = int(tables.shared[request.row])
        path = np.zeros(sum(len(node.slots) for node in request.node.path()), dtype=np.int32)
        memory.prefixes.gather(request.node, path)
        assert np.array_equal(tables.slots[request.row, :shared], path), "I6: the row starts with the slots of its path"
        keys = b"".join(node.key for node in reversed(list(request.node.path())))
        assert keys == tables.tokens[request.row, :shared].tobytes(), "I6: and the path spells the row's text"


def _check_node(node: Node, locks: int, page: int) -> None:
    assert node.locks == locks, "I4: a node has a lock for each request below it"
    assert len(node.key) == ID_BYTES * len(node.slots) > 0
    assert len(node.slots) % page == 0, "I5: whole pages"
    starts = node.slots[::page]
    assert np.array_equal(node.slots, (starts[:, None] + np.arange(page)).ravel()), "slots of a page are consecutive"
    assert not (starts % page).any()
    assert node.parent is not None
    assert node.parent.children[node.key[: page * ID_BYTES]] is node, "I5: child keys"
    assert node.used <= node.parent.used or node.parent.parent is None, "an ancestor is never older"

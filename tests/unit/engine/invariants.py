"""What must hold of the engine after every action.

| balance | free + evictable + protected + private = all slots |
| idle | with nobody there nothing is protected or private, and every row is free |
| places | each page is in exactly one place: the free list, a node of the tree, a row |
| locks | a node has a lock for each request that runs below it |
| sums | evictable and protected, the child keys and the LRU order are those that the tree's nodes give |
| paths | a row starts with the slots of its path in the tree, and the path spells the row's tokens |
| mirror | what the steps told of the slot table is the slot table |
| owned | a step shares no memory with what the engine edits |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import numpy as np

from banyan_runtime.engine.loop import Engine
from banyan_runtime.engine.memory.prefixes import ID_BYTES, Node
from banyan_runtime.step import Step
from tests.unit.engine.fake import FakeRunner


def check(engine: Engine) -> None:
    """All but the mirror, in full; costs O(pool)."""
    memory, tables = engine.memory, engine.memory.tables
    page = memory.page_size
    holders = [request for request in engine.requests.values() if request.row >= 0]

    assert memory.imbalance() == 0, "balance"
    assert sorted(request.row for request in holders) == np.flatnonzero(tables.live).tolist()
    if not engine.requests:
        assert memory.prefixes.protected == 0 == memory.private, "idle: nothing is held"
        assert not engine.scheduler.prefill.chunked
    if not engine.has_work:
        assert tables.free_rows == len(tables.live), "idle: every row is free"

    places = [memory.pages.free_pages()]
    nodes = list(memory.prefixes.nodes())
    places += [node.slots[::page] // page for node in nodes]
    for request in holders:
        start, end = int(tables.shared[request.row]), int(tables.allocated[request.row])
        places.append(tables.slots[request.row, start:end:page] // page)
    everything = np.sort(np.concatenate(places))
    assert np.array_equal(everything, np.arange(1, memory.pages.capacity + 1)), "places"

    locks = Counter[int]()
    for request in holders:
        assert request.node is not None
        for node in request.node.path():
            locks[id(node)] += 1
    for node in nodes:
        _check_node(node, locks[id(node)], page)
    assert memory.prefixes.evictable == sum(len(node.slots) for node in nodes if not node.locks), "sums: evictable"
    assert memory.prefixes.protected == sum(len(node.slots) for node in nodes if node.locks), "sums: protected"
    leaves = {id(node) for node in nodes if not node.locks and not node.children}
    assert leaves == {id(node) for node in memory.prefixes.evictable_leaves()}, "sums: the LRU order holds the unlocked leaves"

    for request in holders:
        assert request.node is not None
        shared = int(tables.shared[request.row])
        path = np.zeros(sum(len(node.slots) for node in request.node.path()), dtype=np.int32)
        memory.prefixes.gather(request.node, path)
        assert np.array_equal(tables.slots[request.row, :shared], path), "paths: the row starts with the slots of its path"
        keys = b"".join(node.key for node in reversed(list(request.node.path())))
        prompt, length = int(tables.prompt[request.row]), int(tables.length[request.row])
        compared = request.prefix_ids or tables.tokens[request.row, :prompt].tobytes()
        compared += tables.tokens[request.row, prompt:length].tobytes()
        assert compared.startswith(keys), "paths: and the path spells what the prefix cache compares"


def check_mirror(engine: Engine, runner: FakeRunner) -> None:
    """To be called with a launch: whatever changed later is for the next step to tell."""
    tables = engine.memory.tables
    rows = np.flatnonzero(tables.live)
    if not len(rows):
        return
    allocated = tables.allocated[rows]
    width = int(allocated.max())
    counts = np.arange(width) < allocated[:, None]
    wrong = (tables.slots[rows, :width] != runner.launched.table[rows, :width]) & counts
    assert not wrong.any(), f"mirror: row {rows[int(wrong.any(axis=1).argmax())]} is not what the steps told of it"


def check_owned(engine: Engine, step: Step) -> None:
    live = [array for array in vars(engine.memory.tables).values() if isinstance(array, np.ndarray)]
    live.append(engine.memory.pages._ring)
    for array in _arrays(step):
        assert not any(np.may_share_memory(array, other) for other in live), "owned"


def _arrays(part: object) -> Iterator[np.ndarray]:
    """All arrays of a step and of its columns."""
    if isinstance(part, np.ndarray):
        yield part
    elif is_dataclass(part):
        for field in fields(part):
            yield from _arrays(getattr(part, field.name))


def _check_node(node: Node, locks: int, page: int) -> None:
    assert node.locks == locks, "locks"
    assert len(node.key) == ID_BYTES * len(node.slots) > 0
    assert len(node.slots) % page == 0, "sums: whole pages"
    starts = node.slots[::page]
    assert np.array_equal(node.slots, (starts[:, None] + np.arange(page)).ravel()), "slots of a page are consecutive"
    assert not (starts % page).any()
    assert node.parent is not None
    assert node.parent.children[node.key[: page * ID_BYTES]] is node, "sums: child keys"
    assert node.used <= node.parent.used or node.parent.parent is None, "an ancestor is never older"

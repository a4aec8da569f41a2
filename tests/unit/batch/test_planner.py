"""How an input is cut."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from banyan_runtime.batch import planner
from banyan_runtime.batch.lines import LineParser
from banyan_runtime.batch.planner import Cut, scan
from banyan_runtime.batch.source import Source
from banyan_runtime.storage.local import LocalStore
from banyan_runtime.storage.open import Location
from tests.support.server.scripted import line


def test_more_objects_than_there_may_be_shards_are_a_shard_each_and_empty_ones_none(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path_factory.mktemp("input"))
    for i in range(6):
        store.put(f"{i}.jsonl", f"{line(f'{i}-a', 'hello')}\n{line(f'{i}-b', 'hello')}\n".encode() if i != 3 else b"\n")
    monkeypatch.setattr(planner, "MAX_SHARDS", 3)
    found = scan(Source.find(Location(store, "")), LineParser("/v1/chat/completions", None, None), Cut(lines=1))
    assert [(shard.object, shard.lines) for shard in found.shards] == [(i, 2) for i in (0, 1, 2, 4, 5)]


def test_lines_that_cannot_be_read_any_more_have_their_numbers_unless_blank_ones_stand_between(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    texts = [line(f"id-{i}", "hello") for i in range(8)]
    texts[6:6] = [""]  # behind the sixth
    store.put("a.jsonl", "\n".join(texts).encode() + b"\n\n\n")
    store.put("b.jsonl", ("\n" + line("b", "hello")).encode())
    store.put("c.jsonl.gz", gzip.compress(f"{line('c', 'hello')}\n{line('d', 'hello')}\n".encode()))
    found = scan(Source.find(Location(store, "")), LineParser("/v1/chat/completions", None, None), Cut(lines=3))
    numbers = [[shard.number_of(ordinal) for ordinal in range(shard.lines)] for shard in found.shards]
    assert numbers == [[1, 2, 3], [4, 5, 6], [8, 9], [None], [1, 2]]

"""How an input is cut."""

from __future__ import annotations

import pytest

from banyan_runtime.batch import planner
from banyan_runtime.batch.lines import LineParser
from banyan_runtime.batch.planner import Cut, scan
from banyan_runtime.batch.source import Source
from banyan_runtime.storage.local import LocalStore
from banyan_runtime.storage.open import Location
from tests.batch.conftest import line


def test_more_objects_than_there_may_be_shards_are_a_shard_each_and_empty_ones_none(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path_factory.mktemp("input"))
    for i in range(6):
        store.put(f"{i}.jsonl", f"{line(f'{i}-a', 'hello')}\n{line(f'{i}-b', 'hello')}\n".encode() if i != 3 else b"\n")
    monkeypatch.setattr(planner, "MAX_SHARDS", 3)
    found = scan(Source.find(Location(store, "")), LineParser("/v1/chat/completions", None, None), Cut(lines=1))
    assert [(shard.object, shard.lines) for shard in found.shards] == [(i, 2) for i in (0, 1, 2, 4, 5)]

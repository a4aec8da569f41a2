"""Finished lines, read back from their parts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from banyan_runtime.batch import entries, ordinals
from banyan_runtime.batch.documents import Part
from banyan_runtime.batch.records import Record
from banyan_runtime.storage.local import LocalStore


class _Counting(LocalStore):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads: list[int] = []

    def get(self, key: str, *, start: int = 0, end: int | None = None, if_match: str | None = None) -> bytes:
        data = super().get(key, start=start, end=end, if_match=if_match)
        self.reads.append(len(data))
        return data


@pytest.mark.parametrize("ordered", [True, False])
def test_many_parts_share_the_memory_of_a_merge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ordered: bool) -> None:
    store, parts, lines = _Counting(tmp_path), 8, 40

    def located() -> Iterator[tuple[str, Part]]:
        for part in range(parts):
            mine = range(part, parts * lines, parts)
            written = mine if ordered else reversed(mine)
            data = b"".join(entries.encode(i, Record("output", b'{"x":"' + b"y" * 10_000 + b'"}\n')) for i in written)
            store.put(str(part), data)
            yield str(part), Part(str(part), len(data), ordinals.written(mine), lines, ordered=ordered)

    monkeypatch.setattr(entries, "MERGE_BYTES", 1 << 20)
    assert [entry.ordinal for entry in entries.entries(store, located())] == list(range(parts * lines))
    assert max(store.reads) == (1 << 20) // parts

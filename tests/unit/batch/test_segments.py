"""Lines on their way, in scratch space."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from banyan_runtime.batch import segments as module
from banyan_runtime.batch.documents import Shard
from banyan_runtime.batch.lines import LineParser, RawLine
from banyan_runtime.batch.segments import segments
from banyan_runtime.storage.store import Full, Unreachable
from tests.support.server.scripted import line


def _lines(count: int, size: int) -> Iterator[RawLine]:
    return (RawLine(i + 1, line(str(i), "x" * size).encode()) for i in range(count))


@pytest.mark.parametrize(("count", "size"), [(40, 50_000), (2, 1000)])  # the disk says so when it is written to; or when that is flushed
def test_a_full_scratch_disk_is_named_with_what_helps(monkeypatch: pytest.MonkeyPatch, count: int, size: int) -> None:
    def full(*_: object, **__: object) -> IO[Any]:
        return open("/dev/full", "w+b")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    monkeypatch.setattr(module, "IN_MEMORY_BYTES", 100)
    monkeypatch.setenv("TMPDIR", "/the/scratch")
    steps = segments(
        Shard(0, 0, 0, 1, 0, count, count), _lines(count, size), LineParser("/v1/chat/completions", None, None), lambda _: False
    )
    with pytest.raises(Full, match=r"^/the/scratch.*TMPDIR"):
        next(steps)


def test_a_machine_without_scratch_space_is_told_apart_from_a_bug(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "absent")])
    monkeypatch.setattr(module, "IN_MEMORY_BYTES", 100)
    steps = segments(Shard(0, 0, 0, 1, 0, 1, 1), _lines(1, 1000), LineParser("/v1/chat/completions", None, None), lambda _: False)
    with pytest.raises(Unreachable, match="TMPDIR"):
        next(steps)

"""Journals whose writes fail: nothing that somebody may have counted is cut off, and nothing lies there twice."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from banyan_runtime.batch import entries
from banyan_runtime.batch.documents import Part
from banyan_runtime.batch.recorder import Finished, Journal
from banyan_runtime.batch.records import answered
from banyan_runtime.storage.local import LocalStore
from banyan_runtime.storage.open import Location
from banyan_runtime.storage.patience import Patience
from banyan_runtime.storage.store import StoreError, Unreachable

KEY = "parts/journal.records"


def lines(first: int, count: int) -> list[Finished]:
    return [(at, answered(f"r{at}", f"id-{at}", 200, "q", b'{"n":%d}' % at, None)) for at in range(first, first + count)]


def ordinals_of(store: LocalStore, part: Part) -> list[int]:
    return [entry.ordinal for entry in entries.entries(store, [(KEY, part)])]


class Fails:
    """In the place of a call: it does its work, or half of it, and fails, `times` times."""

    def __init__(self, call: Callable[..., Any], code: int, times: int) -> None:
        self._call, self._code, self.times = call, code, times

    def __call__(self, file: int, *arguments: Any) -> Any:
        if not self.times:
            return self._call(file, *arguments)
        self.times -= 1
        if arguments:
            data, at = arguments
            self._call(file, data[: len(data) // 2], at)
        raise OSError(self._code, os.strerror(self._code))


class Vanishing(LocalStore):
    """Its folder is seen to be gone when a call has done its work."""

    times = 0

    @contextlib.contextmanager
    def errors(self, key: str) -> Iterator[None]:
        with super().errors(key):
            yield
        if self.times:
            self.times -= 1
            raise Unreachable(self.uri(key), "gone", reason="gone")


@pytest.mark.parametrize("fault", ["pwrite", "fdatasync", "fsync", "gone behind it"])
@pytest.mark.parametrize("times", [1, 3])
def test_an_append_that_is_tried_again_leaves_each_line_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, times: int
) -> None:
    store = Vanishing(tmp_path)
    journal = Journal(Location(store, ""), Part(KEY), Patience(30))
    if fault != "fsync":  # of the folder, when the file is opened
        journal.record(lines(0, 5), "")
    failing = Fails(getattr(os, fault), errno.ENOSPC if fault == "pwrite" else errno.EIO, times) if hasattr(os, fault) else store
    if isinstance(failing, Fails):
        monkeypatch.setattr(os, fault, failing)
    else:
        store.times = times
    if fault == "fsync":
        journal.record(lines(0, 5), "")
    journal.record(lines(5, 7), "")
    assert not failing.times, "it has failed"
    journal.record(lines(12, 2), "")
    part = journal.close()
    assert part is not None
    assert ordinals_of(store, part) == list(range(14))
    assert entries.measure(store, KEY, Part(KEY)) == part


def test_what_another_has_counted_is_never_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    journal = Journal(Location(store, ""), Part(KEY), Patience(0.1))
    journal.record(lines(0, 5), "")
    counted = list[Part]()

    def sync(file: int) -> None:
        counted.append(entries.measure(store, KEY, Part(KEY)))  # by who takes the shard over just now
        raise OSError(errno.EIO, "io")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", sync)
        with pytest.raises(StoreError):
            journal.record(lines(5, 5), "")
    assert counted[-1].completed == 10
    own = journal.close()
    assert own is not None
    assert own.completed == 5, "they are not durable"
    assert ordinals_of(store, counted[-1]) == list(range(10))
    journal.record(lines(10, 5), "")
    assert ordinals_of(store, counted[-1]) == list(range(10))
    own = journal.close()
    assert own is not None
    assert ordinals_of(store, own) == list(range(15)), "what could not be recorded comes with what follows"

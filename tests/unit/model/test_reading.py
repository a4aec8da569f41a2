"""Bytes of files → tensors: in pieces, by several readers, of any type."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from banyan_runtime.errors import ModelError
from banyan_runtime.model import reading
from banyan_runtime.model.reading import Span, Wanted

SHAPES = [(300, 7), (1,), (5, 64), (0, 8), (129,)]


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PIECE", 512)


def stored(file: Path, kind: torch.dtype, target: torch.dtype) -> tuple[list[torch.Tensor], list[Wanted]]:
    """Random tensors in a file, behind some bytes; and targets for them, which lie in rows of others."""
    generator = torch.Generator().manual_seed(3)
    values = [torch.randn(shape, generator=generator).to(kind) for shape in SHAPES]
    begin, wanted, content = 13, [], b"x" * 13
    for index, value in enumerate(values):
        whole = torch.full((value.shape[0] + 2, *value.shape[1:]), 9.0, dtype=target)
        wanted.append(Wanted(str(index), Span(file, begin, kind), whole[1:-1]))
        content += value.view(torch.uint8).numpy().tobytes() if value.numel() else b""
        begin = len(content)
    file.write_bytes(content)
    return values, wanted


@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_every_tensor_arrives_whole_in_its_own_type(tmp_path: Path, kind: torch.dtype, target: torch.dtype) -> None:
    first, others = stored(tmp_path / "a", kind, target), stored(tmp_path / "b", kind, target)
    told: list[str] = []
    threads = threading.active_count()
    reading.read(first[1] + others[1], lambda wanted: told.append(f"{wanted.span.file.name}{wanted.name}"))
    assert sorted(told) == [f"{file}{index}" for file in "ab" for index in range(len(SHAPES))]
    for values, wanted in (first, others):
        for value, each in zip(values, wanted, strict=True):
            assert torch.equal(each.target, value.to(target))
            whole = each.target._base
            assert whole is not None
            assert (whole[[0, -1]] == 9).all()
    assert threading.active_count() == threads


def test_nothing_wanted_is_nothing_read() -> None:
    reading.read([], lambda wanted: pytest.fail("nothing was read"))


def test_a_file_that_has_become_shorter_is_named(tmp_path: Path) -> None:
    _, wanted = stored(tmp_path / "a", torch.float32, torch.float32)
    os.truncate(tmp_path / "a", 4000)
    with pytest.raises(ModelError, match=f"{tmp_path}/a: "):
        reading.read(wanted, lambda wanted: None)
    (tmp_path / "a").unlink()
    with pytest.raises(ModelError, match=rf"{tmp_path}/a: .*No such file"):
        reading.read(wanted, lambda wanted: None)


def test_what_a_disk_cannot_read_is_named_and_leaves_no_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, wanted = stored(tmp_path / "a", torch.float32, torch.bfloat16)
    preadv, calls, files = os.preadv, [0], len(list(Path("/proc/self/fd").iterdir()))

    def broken(file: int, buffers: list[memoryview], offset: int) -> int:
        calls[0] += 1
        if calls[0] == 9:
            raise OSError(5, "Input/output error")
        return preadv(file, [buffers[0][:100]], offset)  # a disk may give less than it was asked for

    monkeypatch.setattr(os, "preadv", broken)
    threads = threading.active_count()
    with pytest.raises(ModelError, match=r"a: .*Input/output error"):
        reading.read(wanted, lambda wanted: None)
    assert (threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))) == (threads, files)
    calls[0] = 10
    reading.read(wanted, lambda wanted: None)


def test_an_error_of_who_is_told_ends_the_readers(tmp_path: Path) -> None:
    _, wanted = stored(tmp_path / "a", torch.float32, torch.float32)
    threads = threading.active_count()

    def refuse(wanted: Wanted) -> None:
        raise RuntimeError(wanted.name)

    with pytest.raises(RuntimeError):
        reading.read(wanted, refuse)
    assert threading.active_count() == threads


def test_an_error_behind_the_last_piece_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU tells of what went wrong when all that it was given is done."""
    _, wanted = stored(tmp_path / "a", torch.float32, torch.float32)

    def broken(reader: object) -> None:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(reading._Reader, "finish", broken)
    with pytest.raises(RuntimeError, match="CUDA error"):
        reading.read(wanted, lambda wanted: None)

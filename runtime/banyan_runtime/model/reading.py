"""Bytes of files → tensors, where they belong, several pieces at once: a single reader leaves a disk, or the link to a GPU, idle most of
the time.

What is of the target's type goes from the file into host memory as it is. All else goes by way of a buffer: another type, and what belongs
on a GPU, which takes it over from pinned memory while the next piece is read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Final

import torch
from torch import Tensor

from banyan_runtime.errors import ModelError

READERS: Final = 8
PIECE: Final = 8 << 20  # bytes: long enough that a disk does not seek, short enough that all readers end together


@dataclass(frozen=True, slots=True)
class Span:
    """The bytes of a tensor."""

    file: Path
    offset: int
    kind: torch.dtype  # in the file, little-endian


@dataclass(frozen=True, slots=True)
class Wanted:
    name: str
    span: Span
    target: Tensor  # contiguous, of any type, on any device


@dataclass(frozen=True, slots=True)
class _Piece:
    index: int  # of what is wanted
    offset: int  # in the file
    kind: torch.dtype
    target: Tensor  # flat


def read(wanted: Sequence[Wanted], done: Callable[[Wanted], None]) -> None:
    """Fill the targets. `done` is told of each, in the caller's thread. Raises ModelError."""
    pieces = list(_pieces(wanted))
    left = [0] * len(wanted)
    for piece in pieces:
        left[piece.index] += 1
    with ExitStack() as opened:
        files: dict[Path, int] = {}
        for file in dict.fromkeys(each.span.file for each in wanted):
            try:
                files[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise ModelError(f"{file}: cannot be read ({error.strerror}); fetch it again") from error
            opened.callback(os.close, files[file])
        todo, told = iter(pieces), SimpleQueue[int | None]()
        stop, errors = Event(), list[BaseException]()

        def work() -> None:
            try:
                reader = _Reader()
                while not stop.is_set() and (piece := next(todo, None)) is not None:  # one at a time: Python's lock is held
                    file = wanted[piece.index].span.file
                    reader.take(file, files[file], piece)
                    told.put(piece.index)
                reader.finish()
            except BaseException as error:  # the caller raises it
                errors.append(error)
                told.put(None)

        readers = [Thread(target=work, name=f"weights-{number}", daemon=True) for number in range(min(READERS, len(pieces)))]
        for reader in readers:
            reader.start()
        try:
            for _ in pieces:
                if (found := told.get()) is None:
                    break
                left[found] -= 1
                if not left[found]:
                    done(wanted[found])
        finally:
            stop.set()
            for reader in readers:
                reader.join()
        if errors:
            raise errors[0]


def _pieces(wanted: Sequence[Wanted]) -> Iterator[_Piece]:
    for index, each in enumerate(wanted):
        size, step = each.span.kind.itemsize, PIECE // each.span.kind.itemsize
        for number, part in enumerate(torch.split(each.target.view(-1), step)):
            yield _Piece(index, each.span.offset + number * step * size, each.span.kind, part)


class _Reader:
    """One thread's buffers."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._next = 0
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._free: list[torch.cuda.Event | None] = [None, None]  # when the GPU has taken over what a buffer holds

    @torch.inference_mode()
    def take(self, path: Path, file: int, piece: _Piece) -> None:
        target = piece.target
        if target.device.type == "cpu" and target.dtype == piece.kind:
            _fill(path, file, piece.offset, target)
            return
        on_gpu = target.device.type == "cuda"
        if not self._buffers:
            self._buffers = [torch.empty(PIECE, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2 if on_gpu else 1)]
        self._next = (self._next + 1) % len(self._buffers)
        if (taken := self._free[self._next]) is not None:
            taken.synchronize()
        held = self._buffers[self._next][: len(target) * piece.kind.itemsize].view(piece.kind)
        _fill(path, file, piece.offset, held)
        if not on_gpu:
            target.copy_(held)
            return
        if target.device not in self._streams:
            self._streams[target.device] = torch.cuda.Stream(target.device)  # type: ignore[no-untyped-call]
        stream = self._streams[target.device]
        with torch.cuda.stream(stream):
            target.copy_(held, non_blocking=True)
        self._free[self._next] = stream.record_event()

    def finish(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()


def _fill(path: Path, file: int, offset: int, held: Tensor) -> None:
    """Read as many bytes as a flat tensor in host memory has."""
    memory = memoryview(held.view(torch.uint8).numpy().data)
    begin = 0
    while begin < len(memory):
        try:
            count = os.preadv(file, [memory[begin:]], offset + begin)
        except OSError as error:
            raise ModelError(f"{path}: cannot be read ({error.strerror}); fetch it again") from error
        if not count:  # the file has changed since its header was read
            raise ModelError(f"{path}: is truncated; fetch it again")
        begin += count

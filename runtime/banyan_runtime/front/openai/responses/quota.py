"""How many bytes of responses a storage may hold, and which of them go: decided without I/O and clock."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Final

BLOCK_BYTES: Final = 4096  # which a file takes at least on common disks: a million small ones have their room, too
KEPT_PART: Final = 0.9  # of the bytes, when some had to go: not each response that comes makes all be looked at
LOOKS: Final = 8  # at all that is there, while so much is written once: of what other servers write beside us nothing else tells


@dataclass(frozen=True, slots=True)
class Stored:
    """A response in the storage."""

    id: str
    key: str
    made: int  # Unix seconds
    size: int

    @property
    def taken(self) -> int:
        return taken(self.size)


class Quota:
    """`most`: bytes that responses may take; None: any number. Nothing may be written before all that is there was looked at once."""

    def __init__(self, most: int | None) -> None:
        self.most = most
        self._room = 0  # that may be written before the next look
        self._given = 0  # since the start
        self.settled = 0  # of it, what is written, or was not taken

    def take(self, size: int) -> bool:
        """Whether so many bytes may be written now; they count from then on. `settle` says when the write has ended."""
        if self.most is not None:
            if taken(size) > self._room:
                return False
            self._room -= taken(size)
        self._given += taken(size)
        return True

    def settle(self, size: int) -> None:
        """A write has ended, in whatever way."""
        self.settled += taken(size)
        assert self.settled <= self._given

    @property
    def on_the_way(self) -> int:
        """Bytes that were given and may not be there yet."""
        return self._given - self.settled

    def fits(self, size: int) -> bool:
        """Whether so many bytes ever find room."""
        return self.most is None or taken(size) <= self.most

    def leaving(
        self, stored: Iterable[Stored], oldest: float, live: Container[str], size: int, on_the_way: int = 0, lacking: int = 0
    ) -> Leaving:
        """What goes so that `size` bytes find room beside those that were `on_the_way` when `stored` was asked for, if they ever can: what
        was made before `oldest`, then the oldest of the others, but none that runs here (`live`), which is about to be written again.
        `lacking`: bytes that the disk has too few of; they find room likewise, if all that may go makes as much."""
        ordered = sorted(stored, key=lambda one: one.made)
        old = [one for one in ordered if one.made < oldest]
        rest = ordered[len(old) :]
        left = sum(one.taken for one in rest)
        pushed: list[Stored] = []
        aim = left
        more = on_the_way + (taken(size) if self.fits(size) else 0)
        if self.most is not None and left + more > self.most:
            aim = max(0, min(int(self.most * KEPT_PART), self.most - more))
        lacking -= sum(one.taken for one in old)
        if 0 < lacking <= sum(one.taken for one in rest if one.id not in live):
            aim = min(aim, int(left * KEPT_PART), left - lacking)
        for one in rest:
            if left <= aim:
                break
            if one.id not in live:
                pushed.append(one)
                left -= one.taken
        return Leaving(tuple(old), tuple(pushed), left)

    def looked(self, left: int, settled: int, size: int) -> None:
        """`left`: bytes of those that stay; `settled`: what was when the look began, for of all that was given and not settled then, and
        of what was given meanwhile, it may have seen nothing."""
        if self.most is not None:
            unseen = self._given - settled
            self._room = min(self.most - left - unseen, max(self.most // LOOKS - unseen, taken(size)))


@dataclass(frozen=True, slots=True)
class Leaving:
    old: tuple[Stored, ...]
    pushed: tuple[Stored, ...]  # by those that came later
    left: int  # bytes of those that stay


def taken(size: int) -> int:
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES

"""The rows: what the engine keeps of every admitted request, column by column, so that a step over n requests costs a few
numpy calls and no loop over requests or tokens.

A row belongs to one request from its admission to its release. While the result of a step with a released row is still to
come, the row is retired, not free, so that the result is not taken for that of the row's next owner: the loop hangs the
retired rows on that step and frees them with its result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from banyan_runtime.step import I32, Bool, Ragged, RowUpdates

SLACK: Final = 4  # columns beyond the context: with a step in flight a row is one token ahead of what is known
STOP_COLUMNS: Final = 8  # stop ids that are compared in one vectorised look; a row with more is looked at by itself


def ragged(lists: Sequence[I32]) -> Ragged:
    """The lists one after another, copied."""
    offsets: I32 = np.zeros(len(lists) + 1, dtype=np.int32)
    np.cumsum([len(part) for part in lists], out=offsets[1:])
    return Ragged(np.concatenate(lists) if lists else np.empty(0, dtype=np.int32), offsets)


class Tables:
    """Persistent per-row buffers. `slots` is the table that a runner mirrors: whoever writes to it other than by a step's
    out_slots notes that with `changed`."""

    def __init__(self, rows: int, context_len: int) -> None:
        # zeros, not empty: untouched rows then cost address space but no memory
        self.slots: I32 = np.zeros((rows, context_len + SLACK), dtype=np.int32)  # KV slot by position
        self.tokens: I32 = np.zeros((rows, context_len + SLACK), dtype=np.int32)  # token id by position, prompt and output
        self.length: I32 = np.zeros(rows, dtype=np.int32)  # known tokens, prompt and output
        self.prompt: I32 = np.zeros(rows, dtype=np.int32)  # tokens of the prompt
        self.max_new: I32 = np.zeros(rows, dtype=np.int32)
        self.allocated: I32 = np.zeros(rows, dtype=np.int32)  # positions that have a slot
        self.shared: I32 = np.zeros(rows, dtype=np.int32)  # positions whose slots belong to the prefix tree
        self.level: I32 = np.zeros(rows, dtype=np.int32)  # priority, raised for the batches that passed it by before its admission
        self.ids: npt.NDArray[np.int64] = np.zeros(rows, dtype=np.int64)  # request id
        self.stops: I32 = np.full((rows, STOP_COLUMNS), -1, dtype=np.int32)
        self.live: Bool = np.zeros(rows, dtype=np.bool_)
        self.reset()

    def reset(self) -> None:
        """All rows are free; only while nothing is in flight."""
        self.live[:] = False
        self.allocated[:] = 0
        self.shared[:] = 0
        self._free = list(range(len(self.live) - 1, -1, -1))
        self._retired: list[int] | None = None
        self._changes: list[tuple[int, int, I32]] = []  # (row, start, slots) since the last step

    def changed(self, row: int, start: int, end: int) -> None:
        """Slots of `row` from position `start` up to `end` were replaced; the next step says so."""
        self._changes.append((row, start, self.slots[row, start:end].copy()))

    def take_changes(self) -> RowUpdates | None:
        """What the next step must say about the table."""
        if not self._changes:
            return None
        rows, starts, slots = zip(*self._changes, strict=True)
        self._changes = []
        return RowUpdates(np.array(rows, dtype=np.int32), np.array(starts, dtype=np.int32), ragged(slots))

    @property
    def free_rows(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A free row. Its columns hold nothing of their last owner but what every admission overwrites."""
        row = self._free.pop()
        self.live[row] = True
        return row

    def release(self, row: int) -> None:
        assert self.live[row], f"row {row} released twice"
        self.live[row] = False
        self.allocated[row] = 0
        self.shared[row] = 0
        if self._retired is None:
            self._free.append(row)
        else:
            self._retired.append(row)

    def retire_into(self, retired: list[int] | None) -> None:
        """From now on released rows go into this list (a result may still come for them); None frees them at once."""
        self._retired = retired

    def reuse(self, retired: list[int]) -> None:
        """No result comes for these rows any more."""
        self._free.extend(retired)

"""Work on the event loop in turns: what takes long is done piece by piece, and the tokens of others go in between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Final

TURN_S: Final = 0.002
"""How long one request's work may go on at a time. One piece may take it beyond that, and what several write leaves behind it."""


class Turn:
    """A turn that begins now."""

    __slots__ = ("_end",)

    def __init__(self) -> None:
        self._end = time.perf_counter() + TURN_S

    @property
    def over(self) -> bool:
        return time.perf_counter() >= self._end


def in_turns(pieces: Iterator[object]) -> None:
    """Go through `pieces`: at once as far as a turn goes, then in further turns. Raises what they raise in the first one."""
    end = time.perf_counter() + TURN_S
    for _ in pieces:
        if time.perf_counter() >= end:
            asyncio.get_running_loop().call_soon(in_turns, pieces)
            return

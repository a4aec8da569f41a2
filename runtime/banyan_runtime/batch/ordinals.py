"""Sets of line ordinals as text: runs like '0-199,203', which stay short because lines end nearly in the order they began."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def written(ordinals: Iterable[int]) -> str:
    """The runs of `ordinals`, which ascend."""
    runs: list[str] = []
    first = last = -2
    for one in ordinals:
        assert one > last, (last, one)
        if one == last + 1:
            last = one
            continue
        if first >= 0:
            runs.append(_run(first, last))
        first = last = one
    if first >= 0:
        runs.append(_run(first, last))
    return ",".join(runs)


def read(text: str) -> Iterator[int]:
    """The ordinals of `text`, ascending. Raises ValueError for what `written` does not write."""
    last = -1
    for run in text.split(",") if text else ():
        first, dash, end = run.partition("-")
        start, stop = int(first), int(end if dash else first)
        if start <= last or stop < start:
            raise ValueError(f"runs must ascend: {run!r}")
        yield from range(start, stop + 1)
        last = stop


def _run(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"

"""Stop strings, found in the generated text across any border of tokens."""

from __future__ import annotations

from collections.abc import Sequence


def longest_partial(text: str, marker: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `marker`."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


class StopMatcher:
    """Cuts the text of one sequence at the first stop string.

    Holds back only the longest suffix that may still become a stop string. Of several that are found at once the one that
    ends first wins, then the one listed first.
    """

    __slots__ = ("_held", "_include", "_stops", "matched")

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        assert all(stops), "an empty stop string is refused before"
        self._stops = stops
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str, *, allowed: bool = True) -> str:
        """The text that can be given out now. With `allowed` false (min_tokens), what ends in this piece is no match."""
        if self.matched is not None:
            return ""
        seen = self._held + text
        if allowed:
            found = [(at + len(stop), order, stop) for order, stop in enumerate(self._stops) if (at := seen.find(stop)) >= 0]
            if found:
                end, _, stop = min(found)
                self.matched = stop
                self._held = ""
                return seen[: end if self._include else end - len(stop)]
        hold = max((longest_partial(seen, stop) for stop in self._stops), default=0)
        self._held = seen[len(seen) - hold :]
        return seen[: len(seen) - hold]

    def finish(self) -> str:
        """What was held back, when the sequence ends for another reason."""
        held, self._held = self._held, ""
        return held

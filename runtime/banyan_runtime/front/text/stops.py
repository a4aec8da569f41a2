"""Stop strings, found in the generated text across any border of tokens."""

from __future__ import annotations

from collections.abc import Sequence


def longest_partial(text: str, marker: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `marker`."""
    length = min(len(text), len(marker) - 1)
    while length > 0 and not text.endswith(marker[:length]):
        length = marker.rfind(text[-1], 0, length - 1) + 1  # it must end as the text does
    return length


class StopMatcher:
    """Cuts the text of one sequence at the first stop string.

    Holds back only the longest suffix that may still become a stop string. Of several that are found at once the one that
    ends first wins, then the one listed first.
    """

    __slots__ = ("_firsts", "_held", "_include", "_partial", "_stops", "matched")

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        assert all(stops), "an empty stop string is refused before"
        self._stops = stops
        self._include = include
        self._firsts = frozenset(stop[0] for stop in stops)
        self._held = ""
        self._partial = [0] * len(stops)  # of each stop: how much of it the text so far ends with
        self.matched: str | None = None

    def feed(self, text: str, *, allowed: bool = True) -> str:
        """The text that can be given out now. With `allowed` false (min_tokens), what ends in this piece is no match, now or later;
        what only begins in it may be one."""
        if self.matched is not None:
            return ""
        if not self._held and self._firsts.isdisjoint(text):  # the frequent case
            return text
        seen = self._held + text
        # A stop that ends here has begun no further back than where it may have begun before: so long stops cost no more than the
        # text is long, and none is found in what is held back for another.
        reach = [partial + len(text) for partial in self._partial]
        if allowed:
            found = [
                (at + len(stop), order, stop)
                for order, stop in enumerate(self._stops)
                if (at := seen.find(stop, len(seen) - reach[order])) >= 0
            ]
            if found:
                end, _, stop = min(found)
                self.matched = stop
                self._held = ""
                return seen[: end if self._include else end - len(stop)]
        self._partial = [longest_partial(seen[-most:], stop) if most else 0 for most, stop in zip(reach, self._stops, strict=True)]
        hold = max(self._partial, default=0)
        self._held = seen[len(seen) - hold :]
        return seen[: len(seen) - hold]

    def finish(self) -> str:
        """What was held back, when the text ends for another reason. A text that follows is another one."""
        held, self._held = self._held, ""
        self._partial = [0] * len(self._stops)
        return held

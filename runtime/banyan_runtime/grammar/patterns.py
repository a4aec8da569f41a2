"""Regexes of whole texts: those that the `pattern` of JSON Schema says, which may be found anywhere, and texts without some markers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from banyan_runtime.grammar.errors import GrammarError

_SHOWN: Final = 60  # characters
_SIGN: Final = re.compile(r"\\.|\(\?[A-Za-z-]+\)|\[\^?\]?|[\]()|^$]", re.DOTALL)  # what follows `[` or `[^` is never its end


@dataclass(frozen=True, slots=True)
class Alternative:
    """A regex, and whether the text begins and ends with what fits it."""

    regex: str
    begins: bool
    ends: bool


def alternatives(pattern: str) -> list[Alternative]:
    """Those at the top of the pattern. Raises GrammarError for ^ and $ elsewhere than at their ends."""
    anchors: set[int] = set()
    bars: list[int] = []
    groups = classes = 0
    flags = False
    for sign in _SIGN.finditer(pattern):
        char, at = sign[0], sign.start()
        if char[0] == "[":
            classes += 1
        elif classes:
            classes -= char == "]"
        elif char in ("^", "$"):
            anchors.add(at)
        elif char in ("(", ")"):
            groups += 1 if char == "(" else -1
        elif char == "|" and not groups:
            bars.append(at)
        flags = flags or (char[:2] == "(?" and not classes)
    found = []
    for start, end in zip([0, *(bar + 1 for bar in bars)], [*bars, len(pattern)], strict=True):
        begins = start in anchors and pattern[start] == "^"
        ends = end - 1 in anchors and end > start and pattern[end - 1] == "$"
        anchors -= {start} if begins else set()
        anchors -= {end - 1} if ends else set()
        found.append(Alternative(pattern[start + begins : end - ends], begins, ends))
    if anchors or (flags and found != [Alternative(pattern, False, False)]):
        shown = pattern if len(pattern) <= _SHOWN else pattern[:_SHOWN] + "…"
        raise GrammarError(
            f"the regex '{shown}': ^ or $ elsewhere than at its ends, and flags beside them, are not supported; leave them out."
        )
    return found


def without(markers: Sequence[str]) -> str:
    """A regex of texts in which none of these tags occurs. As an intersection with what has none in it, it would not be seen at once
    where nothing can follow: a compiler would look through all lengths that are left."""
    assert all(marker[0] == "<" and "<" not in marker[1:] for marker in markers), markers
    return f"[^<]*(?:<{_other([marker[1:] for marker in markers])})*"


def _other(tails: Sequence[str]) -> str:
    """A regex of texts up to the next bracket, none of which begins with one of these."""
    further: dict[str, list[str]] = {}
    for tail in tails:
        further.setdefault(tail[0], []).append(tail[1:])
    begun = [f"{re.escape(first)}{_other(rest)}|" for first, rest in further.items() if "" not in rest]
    return f"(?:{''.join(begun)}[^<{''.join(map(re.escape, further))}][^<]*)?"

"""What a chat template takes of a conversation: found out by rendering short ones, whose words must all be there."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from banyan_runtime.front.chat.messages import Arguments, Turn

Probe = Callable[[Sequence[Turn], Mapping[str, Any]], str | None]
"""Renders turns beside these variables. None: the template fails."""
INSTRUCTIONS: Final = ("system", "developer")
_ROLES: Final = {"S": "system", "D": "developer", "U": "user", "T": "tool", **dict.fromkeys("ANCBP", "assistant")}  # N says nothing
_CALLS: Final = {"C": 1, "B": 1, "P": 2}  # B beside text
_BEFORE: Final = {"": "", "system": "S", "developer": "D", "user": "U", "assistant": "UA", "calls": "UC", "silence": "UN", "tool": "UCT"}
_SHORT_ID: Final = "a1B2c3D4e"
_LONG_ID: Final = "call_0123456789abcdef"
_CALLED: Final = "look_up_tides"
_ASKS_FOR_NULL: Final = re.compile(r"\bcontent\b['\"]?\]?\s+is\s+(?:not\s+)?none\b")
_TOOL: Final = {"type": "function", "function": {"name": _CALLED, "description": "", "parameters": {"type": "object", "properties": {}}}}


class Limits:
    """Of one template. Each answer is found out when it is first asked for, and kept."""

    def __init__(self, source: str, probe: Probe) -> None:
        self._source = source
        self._probe = probe
        self._taken: dict[tuple[str, str, bool, bool], bool] = {}

    def takes(self, before: str, kind: str, *, tools: bool, result_last: bool) -> bool:
        """Whether it shows a turn of this kind behind one of the kind `before` (`""`: as the first), and all turns around them, beside
        tools or not. `result_last`: in a conversation that ends with what a tool gave; some templates show a system turn with the last
        turn, if that is the user's."""
        asked = (before, kind, tools, result_last)
        if asked not in self._taken:
            self._taken[asked] = self._find(before, kind, {"tools": [_TOOL]} if tools else {}, result_last)
        return self._taken[asked]

    @functools.cached_property
    def asks_for_null(self) -> bool:
        """Whether it wants the content of a turn of calls alone to be null, and not empty."""
        return _ASKS_FOR_NULL.search(self._source) is not None and self._shows_call("UCT", None)

    @functools.cached_property
    def parts_text(self) -> bool:
        """Whether it shows a call only if no text stands in the same turn."""
        alone = None if self.asks_for_null else ""
        return not self._shows_call("UBT", alone) and self._shows_call("UACT", alone)

    @functools.cached_property
    def parts_calls(self) -> bool:
        """Whether it takes no more than one call in a turn."""
        return not self._shows_call("UPTT", "") and self._shows_call("UCTCT", "")

    @functools.cached_property
    def takes_short_ids_alone(self) -> bool:
        """Whether it refuses ids of calls that are not nine letters or digits, as those of Mistral's models do."""
        return self._probe(_turns("UCT", _LONG_ID), {}) is None and self._probe(_turns("UCT"), {}) is not None

    def _find(self, before: str, kind: str, variables: Mapping[str, Any], result_last: bool) -> bool:
        if kind == "developer" and kind not in self._source:  # it would print any role, also those that the model has never seen
            return False
        letter = "N" if kind == "silence" else kind[0].upper()
        if before in ("", *INSTRUCTIONS):
            shapes = [f"{_BEFORE[before]}{letter}U{'CT' if result_last else ''}"]
        else:  # at the end, and amid others; some templates show only the first of several system turns, or the last
            shape = f"{'S' if kind in INSTRUCTIONS else ''}{_BEFORE[before]}{letter}"
            shapes = [shape, shape + ("U" if before == "assistant" or kind == "silence" else "AU")]
        if all(self._shows(shape, variables) for shape in shapes):
            return True
        return not self._shows("U", variables)  # of a template that does not take this either nothing can be said

    def _shows(self, shape: str, variables: Mapping[str, Any]) -> bool:
        turns = _turns(shape)
        text = self._probe(turns, variables)
        shown = (turn["content"] for turn in turns if turn["role"] != "tool")  # some templates know no tools
        return text is not None and all(word in text for word in shown)

    def _shows_call(self, shape: str, alone: str | None) -> bool:
        """`alone`: the content of a turn of calls alone."""
        turns = [{**turn, "content": turn["content"] or alone} if "tool_calls" in turn else turn for turn in _turns(shape)]
        return _CALLED in (self._probe(turns, {}) or "")


def kind_of(turn: Turn) -> str:
    """Its role, but `calls` for a turn with calls, and `silence` for one in which the model said nothing."""
    if "tool_calls" in turn:
        return "calls"
    return "silence" if turn["role"] == "assistant" and not turn["content"] else str(turn["role"])


def _turns(shape: str, call_id: str = _SHORT_ID) -> list[Turn]:
    """A turn for each letter, with a word of its own."""
    turns: list[Turn] = []
    for place, letter in enumerate(shape):
        turn: Turn = {"role": _ROLES[letter], "content": "" if letter in "CPN" else f"Word{place}of{letter}"}
        if letter in _CALLS:
            function = {"name": _CALLED, "arguments": Arguments({}, "{}")}
            turn["tool_calls"] = [{"id": call_id, "type": "function", "function": function}] * _CALLS[letter]
        elif letter == "T":
            turn |= {"tool_call_id": call_id, "name": _CALLED}
        turns.append(turn)
    return turns

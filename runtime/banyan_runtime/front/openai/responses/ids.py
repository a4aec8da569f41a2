"""Ids of items, which lead to the response that they belong to: nobody has to search for an item that is referred to."""

from __future__ import annotations

import re
from typing import Final, Literal

Side = Literal["output", "input"]
_PREFIXES: Final = {
    "reasoning": "rs", "message": "msg", "function_call": "fc", "function_call_output": "fco", "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco", "tool_search_call": "tsc", "tool_search_output": "tso", "local_shell_call": "lsh",
    "shell_call": "sh", "apply_patch_call": "apc", "agent_message": "amsg", "additional_tools": "at", "compaction": "cmp",
}  # fmt: skip
_OTHER: Final = "item"
_MARKS: Final[dict[Side, str]] = {"output": "0", "input": "1"}
_NOT_KEPT: Final = "2"
_ID: Final = re.compile(rf"(?:{'|'.join((*_PREFIXES.values(), _OTHER))})_([0-9a-f]{{32}})([0-2])[0-9a-f]{{7}}")


def item_id(kind: str, response_id: str, side: Side, place: int, *, kept: bool = True) -> str:
    """`kind`: the item's type; `place`: among the items of its side; `kept`: whether it can be found later."""
    return f"{_PREFIXES.get(kind, _OTHER)}_{response_id.removeprefix('resp_')}{_MARKS[side] if kept else _NOT_KEPT}{place:07x}"


def response_of(item: str) -> str | None:
    """The id of the response that an item belongs to; None: this is no id of ours, or of a response that was not kept."""
    found = _ID.fullmatch(item)
    return None if found is None or found.group(2) == _NOT_KEPT else f"resp_{found.group(1)}"


def was_not_kept(item: str) -> bool:
    """Whether the item belongs to a response that nobody wanted to be kept."""
    found = _ID.fullmatch(item)
    return found is not None and found.group(2) == _NOT_KEPT

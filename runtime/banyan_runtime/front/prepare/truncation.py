"""Conversations that are too long for the context: their oldest messages are left out, where a request lets the server do that."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from banyan_runtime.front.errors import ApiError
from banyan_runtime.front.plan import ChatPlan

Message = Mapping[str, Any]
_STAYING: Final = ("system", "developer")


def fitted(messages: Sequence[Message], plan: Callable[[list[Message]], ChatPlan]) -> ChatPlan:
    """The plan of these messages, without as many of the oldest as it takes to fit. Raises ApiError: where nothing that may be left
    out helps, that of the whole."""
    whole = _tried(plan, list(messages))
    if not _too_long(whole):
        return _made(whole)
    groups = droppable(messages)
    tried = functools.cache(lambda number: _tried(plan, _without(messages, groups[:number])))
    fewest = bisect.bisect_left(range(len(groups) + 1), True, lo=1, key=lambda number: not _too_long(tried(number)))
    if fewest > len(groups):
        return _made(whole)
    if isinstance(tried(fewest), ApiError):  # there are templates for conversations that a user begins, and no others
        turns = (number for number in range(fewest + 1, len(groups)) if messages[groups[number][0]]["role"] == "user")
        fewest = next(turns, len(groups))
    return _made(tried(fewest))


def droppable(messages: Sequence[Message]) -> list[list[int]]:
    """The places of messages that may be left out, the oldest first; calls go with what they gave. The last message of a user stays,
    and so does the last of all."""
    groups: list[list[int]] = []
    callers: dict[str, list[int]] = {}
    staying: list[int] = []
    for place, message in enumerate(messages):
        role = message["role"]
        if role in _STAYING:
            continue
        if role == "tool" and (caller := callers.get(message["tool_call_id"])) is not None:
            caller.append(place)
            continue
        groups.append([place])
        if role == "user":
            staying = groups[-1]
        for call in message.get("tool_calls") or ():
            callers[call["id"]] = groups[-1]
    last = max(groups, key=lambda group: group[-1], default=[])
    return [group for group in groups if group not in (staying, last)]


def _without(messages: Sequence[Message], groups: Sequence[Sequence[int]]) -> list[Message]:
    gone = {place for group in groups for place in group}
    return [message for place, message in enumerate(messages) if place not in gone]


def _tried(plan: Callable[[list[Message]], ChatPlan], messages: list[Message]) -> ChatPlan | ApiError:
    try:
        return plan(messages)
    except ApiError as error:
        return error


def _too_long(tried: ChatPlan | ApiError) -> bool:
    return isinstance(tried, ApiError) and tried.code == "context_length_exceeded"


def _made(tried: ChatPlan | ApiError) -> ChatPlan:
    if isinstance(tried, ApiError):
        raise tried
    return tried

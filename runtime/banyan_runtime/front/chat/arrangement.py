"""Turns put so that a template takes them, with every text in its order."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Final

from banyan_runtime.front.chat.limits import INSTRUCTIONS, kind_of
from banyan_runtime.front.chat.messages import Turn
from banyan_runtime.front.chat.tools.ids import mistral_id

Takes = Callable[[str, str], bool]
"""Whether a turn of the second kind is taken behind one of the first, as in `Limits.takes`."""
_JOINED: Final = {("user", "user"), ("tool", "user"), ("assistant", "assistant")}
_JOIN: Final = "\n\n"
_SAID: Final[tuple[str, ...]] = ("content", "reasoning_content")
_SHORT_ID: Final = re.compile(r"[A-Za-z0-9]{9}")


def arranged(turns: Sequence[Turn], takes: Takes) -> list[Turn]:
    """The turns, where none stands that is not taken there. It joins the turn beside it: an instruction the one before it, else the
    user's; what a user says twice, or behind a result, what is before it. A turn of no words is left out. So texts stay where they were
    said, and the beginning of a prompt is the same from request to request."""
    made: list[Turn] = []
    moved = False  # the last turn is an instruction in the user's name
    for turn in turns:
        before, role = kind_of(made[-1]) if made else "", kind_of(turn)
        if role == "developer" and not takes("", role):
            role = "system"
        if role == "silence" and made and not takes(before, role):
            continue
        stray = role in INSTRUCTIONS and not takes(before, role)
        if stray and before not in INSTRUCTIONS:
            role = "user"
        joins = (before in INSTRUCTIONS and stray) or (before == role == "user" and (stray or moved))
        if joins or ((before, role) in _JOINED and not takes(before, role)):
            said = {
                name: _JOIN.join(filter(None, (made[-1].get(name), turn.get(name)))) for name in _SAID if name in turn or name in made[-1]
            }
            made[-1] = {**turn, **made[-1], **said}
            moved = moved and stray
        else:
            made.append({**turn, "role": role} if role in ("user", *INSTRUCTIONS) else turn)
            moved = stray
    return made


def parted(turns: Sequence[Turn], *, text: bool, calls: bool) -> list[Turn]:
    """The turns, with those of calls in parts: `text`, what was said before them is one; `calls`, each call is one, before its result."""
    made: list[Turn] = []
    rest = list(turns)
    while rest:
        turn = rest.pop(0)
        listed = turn.get("tool_calls", [])
        if text and listed and turn["content"]:
            made.append({name: value for name, value in turn.items() if name != "tool_calls"})
            turn = {"role": turn["role"], "content": "", "tool_calls": listed}
        while calls and len(listed) > 1:
            made.append({**turn, "tool_calls": listed[:1]})
            given = listed[0]["id"]
            if (place := next((at for at, one in enumerate(_results(rest)) if one.get("tool_call_id") in (given, None)), None)) is not None:
                made.append(rest.pop(place))
            listed = listed[1:]
            turn = {"role": turn["role"], "content": "", "tool_calls": listed}
        made.append(turn)
    return made


def _results(turns: Sequence[Turn]) -> list[Turn]:
    return list(itertools.takewhile(lambda turn: turn["role"] == "tool", turns))


def with_short_ids(turns: Sequence[Turn]) -> list[Turn]:
    """The turns with nine letters or digits for every id of a call, the same for the call and its result. What has no id gets one: results
    are told from each other by their order."""
    made: list[Turn] = []
    waiting: list[str] = []  # calls without a result
    for place, turn in enumerate(turns):
        if "tool_calls" in turn:
            calls = [{**call, "id": _short(call["id"] or f"{place}.{index}")} for index, call in enumerate(turn["tool_calls"])]
            waiting = [call["id"] for call in calls]
            turn = {**turn, "tool_calls": calls}
        elif turn["role"] == "tool":
            given = turn.get("tool_call_id")
            own = _short(given) if given else next(iter(waiting), _short(str(place)))
            waiting = [one for one in waiting if one != own]
            turn = {**turn, "tool_call_id": own}
        made.append(turn)
    return made


def _short(given: str) -> str:
    return given if _SHORT_ID.fullmatch(given) else mistral_id("", 0, hashlib.sha256(given.encode()).digest())

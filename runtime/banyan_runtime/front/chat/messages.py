"""Chat messages as clients send them, and as templates want them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast

from banyan_runtime.front.errors import ApiError, invalid, invalid_type, missing, unsupported

ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_TEXT_PARTS: Final = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_REASONING_PARTS: Final = {"thinking": "thinking", "reasoning": "text"}
_TOLD: Final = ("assistant", "tool")  # what was said and found: a client cannot take a part of it back
Turn = dict[str, Any]
"""A turn as templates read it."""


class _FirstProblem(FailFast):
    def __hash__(self) -> int:  # unions of annotated types hash their annotations on Python 3.11
        return 1


FIRST_PROBLEM: Final = _FirstProblem()
"""For lists in requests: one wrong item is enough, so that a million of them do not make a million problems."""


class _Lenient(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, hide_input_in_errors=True)


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


class ContentPart(_Lenient):
    """One part of a message's content; only text can be served."""

    SILENT: ClassVar = frozenset({*_TEXT_PARTS.values(), *_REASONING_PARTS.values()})  # the text, by the part's type

    type: str


class FunctionCall(_Lenient):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(_Lenient):
    function: FunctionCall
    id: str | None = None
    type: str | None = None


class ChatMessage(_Lenient):
    """One turn of a conversation."""

    role: Annotated[str, BeforeValidator(_lower)]
    content: str | Annotated[list[ContentPart], FIRST_PROBLEM] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Annotated[list[ToolCall], FIRST_PROBLEM] | None = None
    tool_call_id: str | None = None


class Arguments(dict[str, Any]):
    """The arguments of a call in the history, for any template: most print an object with `tojson`, some join text with it."""

    __slots__ = ("__text",)

    def __init__(self, values: Mapping[str, Any], text: str) -> None:
        super().__init__(values)
        self.__text = text

    def __str__(self) -> str:
        return self.__text

    def __add__(self, text: str) -> str:
        return self.__text + text

    def __radd__(self, text: str) -> str:
        return text + self.__text


def for_template(messages: Sequence[ChatMessage]) -> tuple[list[Turn], list[str]]:
    """The turns as plain objects, content as one text; and the paths of parts that are no text. Of those only the kind is shown,
    where a tool or the model itself gave them.

    Raises ApiError for what a text model cannot read.
    """
    unread: list[str] = []
    return [_turn(message, f"messages[{position}]", unread) for position, message in enumerate(messages)], unread


def _turn(message: ChatMessage, where: str, unread: list[str]) -> Turn:
    if message.role not in ROLES:
        raise invalid(f"{where}.role", f"Invalid value for '{where}.role': must be one of {', '.join(ROLES)}.")
    if (message.model_extra or {}).get("function_call") is not None:
        raise unsupported(f"{where}.function_call", "use tool_calls")
    content, reasoning = _text(message, where, unread)
    turn: Turn = {"role": message.role, "content": content}
    if reasoning:
        turn["reasoning_content"] = reasoning
    if message.name is not None:
        turn["name"] = message.name
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if reasoning and not (content and message.tool_calls):  # gpt-oss's template refuses a turn with all three
        turn["thinking"] = reasoning
    if message.tool_calls:
        turn["tool_calls"] = [_call(call) for call in message.tool_calls]
    return turn


def _text(message: ChatMessage, where: str, unread: list[str]) -> tuple[str, str]:
    """Content and reasoning of one turn."""
    thoughts = [text for text in (message.reasoning_content or message.reasoning,) if text]
    if message.content is None:
        if message.role != "assistant":
            raise missing(f"{where}.content")
        return "", "\n".join(thoughts)
    if isinstance(message.content, str):
        return message.content, "\n".join(thoughts)
    texts: list[str] = []
    for index, part in enumerate(message.content):
        field = _TEXT_PARTS.get(part.type) or _REASONING_PARTS.get(part.type)
        shown = part.type[:40]
        if field is None and message.role in _TOLD:
            unread.append(f"{where}.content[{index}]")
            texts.append(f"[{shown}]")
            continue
        if field is None:
            message_text = f"Model only supports text input; received unsupported content type '{shown}'."
            raise ApiError(400, message_text, code="unsupported_content", param="messages")
        text = (part.model_extra or {}).get(field)
        if not isinstance(text, str):
            raise invalid_type(f"{where}.content[{index}].{field}", "expected a string.")
        (texts if part.type in _TEXT_PARTS else thoughts).append(text)
    return "\n".join(texts), "\n".join(thoughts)


def _call(call: ToolCall) -> dict[str, Any]:
    """A call in the history. Arguments that are no JSON object stay the text that a model wrote."""
    given = call.function.arguments or {}
    arguments: Arguments | str
    if isinstance(given, dict):
        arguments = Arguments(given, json.dumps(given, ensure_ascii=False))
    else:
        values = object_of(given)
        arguments = given if values is None else Arguments(values, given)
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def object_of(arguments: str) -> dict[str, Any] | None:
    """The object that the arguments of a call are, read as strictly as a body is: no NaN, no half of a character. None: they were cut
    off, or are none."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def without_textual_arguments(turns: Sequence[Turn]) -> list[Turn]:
    """The turns with an empty object in place of arguments that are text."""
    return [{**turn, "tool_calls": list(map(_emptied, turn["tool_calls"]))} if "tool_calls" in turn else turn for turn in turns]


def _emptied(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": Arguments({}, "{}")}} if isinstance(function["arguments"], str) else call

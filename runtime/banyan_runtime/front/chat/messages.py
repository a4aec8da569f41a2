"""Chat messages as clients send them, and as templates want them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast

from banyan_runtime.front.errors import ApiError, invalid, invalid_type, missing

ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
_TEXT_PARTS: Final = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_REASONING_PARTS: Final = {"thinking": "thinking", "reasoning": "text"}


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


def for_template(messages: Sequence[ChatMessage], *, knows_developer: bool) -> list[dict[str, Any]]:
    """The turns as plain objects: content as one text, `developer` as `system` where the template has no such role.

    Raises ApiError for what a text model cannot read.
    """
    return [_turn(message, f"messages[{position}]", knows_developer) for position, message in enumerate(messages)]


def _turn(message: ChatMessage, where: str, knows_developer: bool) -> dict[str, Any]:
    if message.role not in ROLES:
        raise invalid(f"{where}.role", f"Invalid value for '{where}.role': must be one of {', '.join(ROLES)}.")
    role = "system" if message.role == "developer" and not knows_developer else message.role
    role = "tool" if role == "function" else role
    content, reasoning = _text(message, where)
    turn: dict[str, Any] = {"role": role, "content": content}
    if reasoning:
        turn["reasoning_content"] = reasoning
    if message.name is not None:
        turn["name"] = message.name
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        turn["tool_calls"] = [_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(message.tool_calls)]
    return turn


def _text(message: ChatMessage, where: str) -> tuple[str, str]:
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
        if field is None:
            shown = part.type[:40]
            message_text = f"Model only supports text input; received unsupported content type '{shown}'."
            raise ApiError(400, message_text, code="unsupported_content", param="messages")
        text = (part.model_extra or {}).get(field)
        if not isinstance(text, str):
            raise invalid_type(f"{where}.content[{index}].{field}", "expected a string.")
        (texts if part.type in _TEXT_PARTS else thoughts).append(text)
    return "\n".join(texts), "\n".join(thoughts)


def _call(call: ToolCall, where: str) -> dict[str, Any]:
    """A call in the history. Templates print the arguments with `tojson`, so they must be an object, not its JSON text."""
    arguments: Any = call.function.arguments or {}
    if isinstance(arguments, str):
        try:  # as strictly as a body is read: no NaN, no half of a character
            arguments = msgspec.json.decode(arguments)
        except msgspec.DecodeError:
            raise invalid(f"{where}.function.arguments", "Assistant tool call function.arguments must be valid JSON.") from None
        except RecursionError:
            raise invalid(f"{where}.function.arguments", "Assistant tool call function.arguments is nested too deeply.") from None
        if not isinstance(arguments, dict):
            raise invalid(f"{where}.function.arguments", "Assistant tool call function.arguments must be a JSON object.")
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}

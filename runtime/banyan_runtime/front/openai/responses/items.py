"""Input items of a response as the messages of a chat, and as they are shown again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from banyan_runtime.front.errors import ApiError, invalid, invalid_type, missing, unsupported
from banyan_runtime.front.openai.responses.ids import item_id
from banyan_runtime.front.parsing import string_of
from banyan_runtime.front.renaming import Renaming


def messages_of(items: str | Sequence[Mapping[str, Any]], before: int = 0) -> tuple[list[dict[str, Any]], list[Renaming]]:
    """The messages that these items say, behind `before` others, and their fields' names. What an assistant thought, said and called
    in a row is one message. Raises ApiError."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}], [(f"messages[{before}]", "input")]
    messages: list[dict[str, Any]] = []
    names: list[Renaming] = []
    turn: dict[str, Any] | None = None  # of the assistant, while it goes on

    def begin(message: dict[str, Any], where: str) -> None:
        names.append((f"messages[{before + len(messages)}]", where))
        messages.append(message)

    for index, item in enumerate(items):
        where, kind = f"input[{index}]", item.get("type", "message")
        if kind == "message" and item.get("role") != "assistant":
            turn = None
            begin(_message(item, where), where)
            continue
        if kind == "function_call_output":
            turn = None
            begin({"role": "tool", "tool_call_id": string_of(item, "call_id", where), "content": _output(item, where)}, where)
            names.append((f"messages[{before + len(messages) - 1}].content", f"{where}.output"))
            continue
        if kind not in ("message", "function_call", "reasoning"):
            raise unsupported(f"{where}.type", f"items of type '{str(kind)[:40]}' are not served")
        if turn is None or (kind == "message" and turn["content"] is not None) or (kind == "reasoning" and _has_more(turn)):
            turn = {"role": "assistant", "content": None}
            begin(turn, where)
        place = f"messages[{before + len(messages) - 1}]"
        if kind == "message":
            turn["content"] = _message(item, where)["content"]
            names.append((f"{place}.content", f"{where}.content"))
        elif kind == "reasoning":
            turn["reasoning_content"] = turn.get("reasoning_content", "") + _reasoning(item, where)
        else:
            call = {"name": string_of(item, "name", where), "arguments": string_of(item, "arguments", where)}
            calls = turn.setdefault("tool_calls", [])
            names.append((f"{place}.tool_calls[{len(calls)}].function", where))
            calls.append({"id": string_of(item, "call_id", where), "type": "function", "function": call})
    return messages, names


def shown(items: str | Sequence[Mapping[str, Any]], response_id: str) -> list[dict[str, Any]]:
    """The items of a response as the API lists them: each with a type and an id."""
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    listed: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        kind = item.get("type", "message")
        content = item.get("content")
        own = item.get("id")
        one = {**item, "id": own if own and isinstance(own, str) else item_id(kind, response_id, "input", index), "type": kind}
        if kind == "message" and isinstance(content, str):
            one["content"] = [{"type": "output_text" if item.get("role") == "assistant" else "input_text", "text": content}]
        listed.append(one)
    return listed


def _has_more(turn: Mapping[str, Any]) -> bool:
    return turn["content"] is not None or "tool_calls" in turn


def _message(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    if "role" not in item:
        raise missing(f"{where}.role")
    if "content" not in item:
        raise missing(f"{where}.content")
    return {"role": item["role"], "content": item["content"]}


def _output(item: Mapping[str, Any], where: str) -> str | list[Any]:
    """What a tool gave: text, or parts of it."""
    output = item.get("output")
    if output is None:
        raise missing(f"{where}.output")
    if not isinstance(output, str | list):
        raise invalid_type(f"{where}.output", "expected a string or an array.")
    return output


def _reasoning(item: Mapping[str, Any], where: str) -> str:
    content = item.get("content") or []
    if not isinstance(content, list):
        raise invalid_type(f"{where}.content", "expected an array.")
    return "".join(_part(part, f"{where}.content[{index}]") for index, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("text"), str):
        raise _not_text(where)
    text: str = part["text"]
    return text


def _not_text(where: str) -> ApiError:
    return invalid(where, f"{where} must be an object with a text.")

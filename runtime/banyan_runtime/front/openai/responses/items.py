"""Input items of a response as the messages of a chat, and as they are shown again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from banyan_runtime.front.errors import ApiError, invalid, invalid_type, missing, unsupported
from banyan_runtime.front.openai.responses.ids import item_id
from banyan_runtime.front.openai.responses.kinds import (
    APPLY_PATCH,
    CALLS,
    LOCAL_SHELL,
    OUTPUTS,
    TEXT,
    TOOL_SEARCH,
    Kind,
    is_left_out,
    name_of,
)
from banyan_runtime.front.openai.responses.tools import ADDITIONAL, names_in, tools_of
from banyan_runtime.front.parsing import string_of
from banyan_runtime.front.renaming import Renaming

_AGENT: Final = "agent_message"  # which another agent of the client's has sent


def messages_of(items: str | Sequence[Mapping[str, Any]], before: int = 0) -> tuple[list[dict[str, Any]], list[Renaming]]:
    """The messages that these items say, behind `before` others, and their fields' names. What an assistant thought, said and called
    in a row is one message. Items that bring tools and those that are left out say nothing. Raises ApiError."""
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
        if kind == ADDITIONAL or is_left_out(item):
            continue
        if kind == _AGENT or (kind == "message" and item.get("role") != "assistant"):
            turn = None
            begin(_message(item, where) if kind != _AGENT else _from_agent(item, where), where)
            continue
        if isinstance(kind, str) and kind in OUTPUTS:
            turn = None
            begin(_result(OUTPUTS[kind], item, where), where)
            names.append((f"messages[{before + len(messages) - 1}].content", f"{where}.output"))
            continue
        if not isinstance(kind, str) or kind not in ("message", "reasoning", *CALLS):
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
            call = {"name": _called(CALLS[kind], item, where), "arguments": _arguments(CALLS[kind], item, where)}
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


def _from_agent(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    """It is for the model to answer, as a user's message is."""
    content = item.get("content")
    if not isinstance(content, list):
        raise invalid_type(f"{where}.content", "expected an array.")
    return {"role": "user", "content": "".join(_agents_part(part, f"{where}.content[{index}]") for index, part in enumerate(content))}


def _agents_part(part: Any, where: str) -> str:
    """Nothing that a model writes is encrypted here: what a client passes on as `encrypted_content` is the text of a call's argument."""
    if not isinstance(part, dict):
        raise _not_text(where)
    return string_of(part, "encrypted_content" if part.get("type") == "encrypted_content" else "text", where)


def _called(kind: Kind, item: Mapping[str, Any], where: str) -> str:
    """What the model knows the tool of a call by."""
    if not kind.named:
        return kind.tool
    name, namespace = string_of(item, "name", where), item.get("namespace")
    return name if namespace is None else name_of(string_of(item, "namespace", where), name)


def _arguments(kind: Kind, item: Mapping[str, Any], where: str) -> str:
    """The arguments of a call, as the model would have written them."""
    if kind.form == "json":
        return string_of(item, kind.called_with, where)
    if kind.form == "text":
        return _json({TEXT: string_of(item, kind.called_with, where)})
    given = item.get(kind.called_with)
    if not isinstance(given, dict):
        raise invalid_type(f"{where}.{kind.called_with}", "expected an object.")
    return _json(given)


def _result(kind: Kind, item: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What a call gave. Outputs of a local shell name their call by `id`."""
    call = "id" if kind is LOCAL_SHELL and item.get("call_id") is None else "call_id"
    if kind is TOOL_SEARCH:
        content: str | list[Any] = _json(names_in(tools_of(item, where)))
    elif kind is APPLY_PATCH and item.get("output") is None:
        content = string_of(item, "status", where)
    else:
        content = _output(item, where)
        content = content if kind.named or isinstance(content, str) else _json(content)
    return {"role": "tool", "tool_call_id": string_of(item, call, where), "content": content}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


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

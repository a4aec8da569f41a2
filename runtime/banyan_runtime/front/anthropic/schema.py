"""The request body of /v1/messages, and the chat completion that it asks for."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
from pydantic import Field

from banyan_runtime.front.anthropic.errors import THREADS
from banyan_runtime.front.errors import ApiError, invalid, invalid_type, missing, unsupported
from banyan_runtime.front.parsing import MAX_IGNORED, Int, Ints, Number, RequestModel, shown, strangers, string_of, unknown
from banyan_runtime.front.renaming import Renaming

LEAST_BUDGET: Final = 1024  # tokens of thinking
_BILLING: Final = "x-anthropic-billing-header"  # a block that changes with each call, and would keep prefixes from being shared
EXTRAS: Final = (
    "min_p", "seed", "repetition_penalty", "chat_template_kwargs", "priority", "cache_salt", "min_tokens", "ignore_eos", "stop_token_ids",
    "presence_penalty", "frequency_penalty", "skip_special_tokens", "logit_bias",
)  # fmt: skip
"""Fields of chat completions that a client may add."""
_SILENT: Final = frozenset({"metadata", "service_tier", "container", "betas", "cache_control", "inference_geo"})
_CLIENTS: Final = ("bash_", "text_editor_", "computer_", "memory_")  # tools without a schema that clients run, before their dates
OPTIONS: Final[tuple[Renaming, ...]] = (
    ("max_completion_tokens", "max_tokens"),
    ("response_format.json_schema", "output_config.format"),
    ("response_format", "output_config.format"),
    ("reasoning_effort", "output_config.effort"),
    ("stop", "stop_sequences"),
    ("tool_choice.function", "tool_choice"),
)
"""Fields of chat completions beside the conversation and the tools, and what they are called here."""
_MESSAGE_FIELDS: Final = frozenset({"role", "content", "cache_control"})
_BLOCK_FIELDS: Final = frozenset(
    {"type", "text", "cache_control", "citations", "thinking", "signature", "data", "id", "name", "input", "caller"}
    | {"tool_use_id", "content", "is_error", "source", "title"}
)
_TOOL_FIELDS: Final = frozenset({"type", "name", "description", "input_schema", "strict", "cache_control"})


class CountRequest(RequestModel):
    """What a prompt is made of."""

    model: str | None = None
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None

    def chat(self) -> dict[str, Any]:
        """The body of the chat completion. Raises ApiError."""
        if (self.model_extra or {}).get("thread") is not None:
            raise ApiError(400, "Threads are not served: send the whole conversation, without 'thread'.", code=THREADS, param="thread")
        tools = _tools(self.tools)
        messages, _ = _messages(self.system, self.messages)
        body: dict[str, Any] = {"model": self.model, "messages": messages, "tools": tools}
        body |= _choice(self.tool_choice, bool(tools))
        if _is_begun(messages[-1]):
            body["continue_final_message"] = True
        variables = _thinking(self.thinking)
        extra = self.model_extra or {}
        given = extra.get("chat_template_kwargs")
        if given is not None or variables:
            body["chat_template_kwargs"] = {**variables, **given} if isinstance(given, dict | None) and given else given or variables
        config = self.output_config or {}
        if config.get("effort") is not None:
            body["reasoning_effort"] = config["effort"]
        if config.get("format") is not None:
            body["response_format"] = _format(config["format"])
        return {name: value for name, value in body.items() if value is not None}

    def names(self) -> list[Renaming]:
        """What the fields of the chat completion are called here. Raises ApiError, as `chat` does."""
        _, names = _messages(self.system, self.messages)
        clients = [f"tools[{index}]" for index, tool in enumerate(self.tools) if _is_clients(tool)]
        for place, ours in enumerate(clients):
            function = f"tools[{place}].function"
            names += [(f"tools[{place}]", ours), (function, ours), (f"{function}.parameters", f"{ours}.input_schema")]
        return [*OPTIONS, *names]

    def without_effect(self) -> tuple[str, ...]:
        """The fields that ask for something harmless that does not happen, and those that nobody knows."""
        names = unknown(self, frozenset(EXTRAS) | _SILENT | frozenset(MessagesRequest.model_fields))
        return tuple(itertools.islice(itertools.chain(names, self._strangers()), MAX_IGNORED))

    def _strangers(self) -> Iterator[str]:
        """The fields inside messages, tools and options that nobody knows; tools that this server does not run."""
        for index, message in enumerate(self.messages):
            yield from strangers(message, _MESSAGE_FIELDS, f"messages[{index}]")
            content = message.get("content")
            for place, block in enumerate(content if isinstance(content, list) else ()):
                yield from strangers(block, _BLOCK_FIELDS, f"messages[{index}].content[{place}]")
        for index, block in enumerate(self.system if isinstance(self.system, list) else ()):
            yield from strangers(block, _BLOCK_FIELDS, f"system[{index}]")
        for index, tool in enumerate(self.tools):
            if not _is_clients(tool):
                yield f"tools[{index}]"
                continue
            yield from strangers(tool, _TOOL_FIELDS, f"tools[{index}]")
        yield from strangers(self.thinking, frozenset({"type", "display"}), "thinking")  # no budget is kept
        yield from strangers(self.tool_choice, frozenset({"type", "name", "disable_parallel_tool_use"}), "tool_choice")
        yield from strangers(self.output_config, frozenset({"effort", "format"}), "output_config")


class MessagesRequest(CountRequest):
    max_tokens: Int
    stop_sequences: list[str] = Field(default_factory=list)
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Int | None = None
    stream: bool = False
    stop_token_ids: Ints | None = None

    def chat(self) -> dict[str, Any]:
        extra = self.model_extra or {}
        body: dict[str, Any] = {name: extra[name] for name in EXTRAS if name in extra and name != "chat_template_kwargs"}
        body |= {"max_completion_tokens": self.max_tokens, "temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        body |= {"stop": self.stop_sequences or None, "stream": self.stream, "stop_token_ids": self.stop_token_ids}
        return {name: value for name, value in (body | super().chat()).items() if value is not None}


# --- messages ---


def _messages(system: str | list[dict[str, Any]] | None, messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[Renaming]]:
    """The turns of the chat, and what their fields are called here."""
    made: list[dict[str, Any]] = []
    names: list[Renaming] = []
    text = _system(system)
    if text:
        made.append({"role": "system", "content": text})
        names.append(("messages[0]", "system"))
    if not messages:
        raise ApiError(400, "messages: at least one message is required", code="empty_array", param="messages")
    for index, message in enumerate(messages):
        where, role, content = f"messages[{index}]", message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise invalid(f"{where}.role", f"Invalid value for '{where}.role': must be one of user, assistant, system.")
        if content is None:
            raise missing(f"{where}.content")
        if not isinstance(content, str | list):
            raise invalid_type(f"{where}.content", "expected a string or an array.")
        if isinstance(content, str):
            turns: list[_Turn] = [({"role": role, "content": content}, where, ())]
        else:
            turns = [_said(content, where)] if role == "assistant" else _asked(role, content, where)
        for turn, ours, inside in turns:
            place = f"messages[{len(made)}]"
            names.append((place, ours))
            names += [(f"{place}.{chats}", own) for chats, own in inside]
            made.append(turn)
    return made, names


def _system(system: str | list[dict[str, Any]] | None) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    texts = [_text(block, f"system[{index}]") for index, block in enumerate(system)]
    return "\n".join(text for text in texts if not text.startswith(_BILLING))


_Turn = tuple[dict[str, Any], str, Sequence[Renaming]]
"""A turn of the chat, what it is called here, and what its fields are."""


def _said(blocks: list[Any], where: str) -> _Turn:
    """An assistant turn. A block of a server's own tool has no text: the turn holds its kind."""
    parts: list[dict[str, Any]] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    names: list[Renaming] = []
    for index, block in enumerate(blocks):
        place = f"{where}.content[{index}]"
        match _kind(block, place):
            case "text":
                text = _text(block, place)
                if parts and "text" in parts[-1]:
                    text = parts.pop()["text"] + text
                parts.append({"type": "text", "text": text})
            case "thinking":
                thoughts.append(str(block.get("thinking") or ""))
            case "redacted_thinking":
                pass
            case "tool_use":
                arguments = block.get("input")
                if not isinstance(arguments, dict):
                    raise invalid_type(f"{place}.input", "expected an object.")
                call = f"tool_calls[{len(calls)}]"
                names += [(call, place), (f"{call}.function", place), (f"{call}.function.arguments", f"{place}.input")]
                function = {"name": string_of(block, "name", place), "arguments": msgspec.json.encode(arguments).decode()}
                calls.append({"id": string_of(block, "id", place), "type": "function", "function": function})
            case kind:
                names.append((f"content[{len(parts)}]", place))
                parts.append({"type": kind})
    said = parts[0]["text"] if len(parts) == 1 and "text" in parts[0] else parts or (None if calls else "")
    turn: dict[str, Any] = {"role": "assistant", "content": said}
    if thoughts:
        turn["reasoning_content"] = "\n".join(thoughts)
    if calls:
        turn["tool_calls"] = calls
    return turn, where, names


def _asked(role: str, blocks: list[Any], where: str) -> list[_Turn]:
    """A turn of the user's: what tools gave are messages of their own, in the order in which they stand."""
    made: list[_Turn] = []
    texts: list[str] = []

    def flush() -> None:
        if texts:
            made.append(({"role": role, "content": "\n".join(texts)}, where, ()))
            texts.clear()

    for index, block in enumerate(blocks):
        place = f"{where}.content[{index}]"
        match _kind(block, place):
            case "text":
                texts.append(_text(block, place))
            case "tool_result":
                flush()
                result = {"role": "tool", "tool_call_id": string_of(block, "tool_use_id", place), "content": _result(block, place)}
                made.append((result, place, [("tool_call_id", f"{place}.tool_use_id")]))
            case kind if (text := _source(block, place)) is not None:
                texts.append(text)
            case kind:
                raise _unserved(place, kind)
    flush()
    return made or [({"role": role, "content": ""}, where, ())]


def _result(block: Mapping[str, Any], where: str) -> str | list[dict[str, Any]]:
    """A tool's result as parts of a message. A part without text holds its kind."""
    content = block.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise invalid_type(f"{where}.content", "expected a string or an array.")
    parts: list[dict[str, Any]] = []
    for index, part in enumerate(content):
        place = f"{where}.content[{index}]"
        kind = _kind(part, place)
        text = _text(part, place) if kind == "text" else _source(part, place)
        parts.append({"type": kind} if text is None else {"type": "text", "text": text})
    return parts


def _source(block: Mapping[str, Any], where: str) -> str | None:
    """The text of a document or a search result, its title first; None where there is none."""
    kind, source = block["type"], block.get("source")
    if kind == "search_result":
        given = block.get("content")
    elif kind == "document" and isinstance(source, dict):
        given = {"text": source.get("data"), "content": source.get("content")}.get(str(source.get("type")))
    else:
        given = None
    if isinstance(given, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in given):
        given = "\n".join(_text(part, f"{where}.content") for part in given)
    title = block.get("title")
    return None if not isinstance(given, str) else f"{title}\n{given}" if isinstance(title, str) and title else given


def _kind(block: Any, where: str) -> str:
    if not isinstance(block, dict):
        raise invalid_type(where, "expected an object.")
    return string_of(block, "type", where)


def _text(block: Any, where: str) -> str:
    if not isinstance(block, dict):
        raise invalid_type(where, "expected an object.")
    return string_of(block, "text", where)


def _unserved(where: str, kind: str) -> ApiError:
    return ApiError(400, f"Model only supports text input; '{where}' is of type '{kind[:40]}'.", code="unsupported_content", param=where)


def _is_begun(turn: Mapping[str, Any]) -> bool:
    """Whether a last turn is the beginning of the answer."""
    return turn["role"] == "assistant" and bool(turn["content"]) and "tool_calls" not in turn


# --- options ---


def _tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Those that the client runs and describes. Tools of Anthropic's servers, which have a type with a date, are left out; those that a
    client runs would be missed, and no model of ours knows them by their type."""
    made: list[dict[str, Any]] = []
    for index, tool in enumerate(tools):
        if str(kind := tool.get("type")).startswith(_CLIENTS):
            raise unsupported(f"tools[{index}].type", f"tools of type '{str(kind)[:40]}' are not served, use a tool with an input_schema")
        if not _is_clients(tool):
            continue
        schema = tool.get("input_schema")
        if not isinstance(schema, dict):
            raise invalid_type(f"tools[{index}].input_schema", "expected an object.")
        function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": {"type": "object", **schema}}
        if tool.get("strict"):
            function["strict"] = True
        made.append({"type": "function", "function": {name: value for name, value in function.items() if value is not None}})
    return made or None


def _is_clients(tool: Mapping[str, Any]) -> bool:
    return tool.get("type") in (None, "custom")


_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}


def _choice(choice: Mapping[str, Any] | None, tools: bool) -> dict[str, Any]:
    if choice is None:
        return {}
    kind = choice.get("type")
    if kind == "tool":
        wanted: Any = {"type": "function", "function": {"name": choice.get("name")}}
    elif isinstance(kind, str) and kind in _CHOICES:
        wanted = _CHOICES[kind]
    else:
        raise invalid("tool_choice.type", "Invalid value for 'tool_choice.type': supported values are auto, any, tool, none.")
    if kind in ("any", "tool") and not tools:
        raise invalid("tool_choice", "tool_choice forces a call, and there is no tool that this server's client could run.")
    parallel = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
    return {"tool_choice": wanted, **parallel}


def _thinking(thinking: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the chat template is told."""
    if thinking is None:
        return {}
    kind = thinking.get("type")
    if kind not in ("enabled", "adaptive", "disabled"):
        raise invalid("thinking.type", "Invalid value for 'thinking.type': supported values are enabled, adaptive, disabled.")
    budget = thinking.get("budget_tokens")
    if budget is not None and type(budget) is not int:
        raise invalid_type("thinking.budget_tokens", "expected an integer.")
    if kind == "enabled" and budget is not None and budget < LEAST_BUDGET:
        raise invalid("thinking.budget_tokens", f"thinking.budget_tokens must be at least {LEAST_BUDGET}, got {shown(budget)}.")
    return {"enable_thinking": kind != "disabled", "thinking": kind != "disabled"}


def _format(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict) or given.get("type") != "json_schema":
        raise unsupported("output_config.format.type", "only 'json_schema' is served")
    return {"type": "json_schema", "json_schema": {"schema": given.get("schema")}}

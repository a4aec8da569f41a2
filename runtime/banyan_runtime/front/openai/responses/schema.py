"""The request body of /v1/responses, and the chat completion that it asks for."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from pydantic import Field

from banyan_runtime.front.errors import ApiError, invalid, invalid_type, missing, unsupported
from banyan_runtime.front.openai.schema import ChatRequest
from banyan_runtime.front.openai.tools import refuse_custom
from banyan_runtime.front.parsing import MAX_IGNORED, Int, Neutral, RequestModel, check_choice, refuse_unsupported, strangers, unknown
from banyan_runtime.front.renaming import Renaming

MAX_METADATA: Final = 16
MAX_KEY: Final = 64
MAX_VALUE: Final = 512
UNSUPPORTED: Final[Neutral] = {"conversation": ("",), "prompt": ({},), "moderation": ({},), "context_management": ([],)}
PASSED_ON: Final = frozenset(ChatRequest.model_fields) - {
    "messages", "tools", "tool_choice", "stream", "stream_options", "max_tokens", "max_completion_tokens", "response_format",
    "reasoning", "reasoning_effort", "logprobs", "top_logprobs", "n", "store", "metadata", "rid", "request_id",
}  # fmt: skip
"""Fields of chat completions that mean the same here: OpenAI's common ones, and SGLang's and vLLM's sampling fields."""
_ITEM_FIELDS: Final = frozenset(
    {"type", "id", "status", "role", "content", "call_id", "name", "arguments", "output", "summary", "encrypted_content"}
)
_PART_FIELDS: Final = frozenset({"type", "text", "refusal", "annotations", "logprobs"})
_TOOL_FIELDS: Final = frozenset({"type", "name", "description", "parameters", "strict"})
_FORMAT_FIELDS: Final = frozenset({"type", "name", "description", "schema", "strict"})
LOGPROBS: Final = "message.output_text.logprobs"
_NAMES: Final[tuple[Renaming, ...]] = (
    ("max_completion_tokens", "max_output_tokens"),
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("reasoning_effort", "reasoning.effort"),
    ("verbosity", "text.verbosity"),
    ("messages", "input"),
    ("function.arguments", "arguments"),
    ("tool_choice.function", "tool_choice"),
    ("tool_choice.allowed_tools", "tool_choice"),
)
"""Fields of chat completions, and what they are called here."""


class TextOptions(RequestModel):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class Reasoning(RequestModel):
    effort: str | None = None
    summary: str | None = None


class ResponsesRequest(RequestModel):
    """What is not declared here goes to the chat completion as it is."""

    input: str | list[Any]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Int | None = None
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: str | dict[str, Any] | None = None
    text: TextOptions = TextOptions()
    reasoning: Reasoning = Reasoning()
    previous_response_id: str | None = None
    store: bool = True
    background: bool = False
    stream: bool = False
    include: list[str] = Field(default_factory=list)
    metadata: dict[str, str] = Field(default_factory=dict)
    truncation: str | None = None
    max_tool_calls: Int | None = None
    top_logprobs: Int = 0

    def check(self) -> None:
        """Raises ApiError."""
        refuse_unsupported(self, UNSUPPORTED)
        check_choice("truncation", self.truncation, ("disabled", "auto"))
        if self.background and not self.store:
            raise invalid("background", "A response in the background must be stored: set 'store' to true.")
        if len(self.metadata) > MAX_METADATA:
            raise invalid("metadata", f"at most {MAX_METADATA} pairs are allowed, got {len(self.metadata)}", "object_above_max_properties")
        for key, value in self.metadata.items():
            if len(key) > MAX_KEY:
                message = f"the key '{key[:MAX_KEY]}…' has {len(key)} characters, at most {MAX_KEY} are allowed. Shorten it."
                raise invalid("metadata", f"Invalid 'metadata': {message}")
            if len(value) > MAX_VALUE:
                message = f"its value has {len(value)} characters, at most {MAX_VALUE} are allowed. Shorten it."
                raise invalid("metadata", f"Invalid 'metadata.{key}': {message}")

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The body of the chat completion over these messages. Raises ApiError."""
        extra = self.model_extra or {}
        body: dict[str, Any] = {name: value for name, value in extra.items() if name in PASSED_ON}
        body |= {"messages": messages, "stream": self.stream, "tools": _tools(self.tools), "tool_choice": _choice(self.tool_choice)}
        body |= {"model": self.model, "max_completion_tokens": self.max_output_tokens, "response_format": _format(self.text.format)}
        body |= {"reasoning_effort": self.reasoning.effort, "verbosity": self.text.verbosity}
        if LOGPROBS in self.include or self.top_logprobs:
            body |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        return {name: value for name, value in body.items() if value is not None}

    def names(self) -> list[Renaming]:
        """What the fields of the chat completion are called here, its messages' aside."""
        allowed = (self.tool_choice if isinstance(self.tool_choice, dict) else {}).get("tools")
        functions = [f"tools[{index}]" for index in range(len(self.tools))]
        functions += [f"tool_choice.allowed_tools.tools[{index}]" for index in range(len(allowed) if isinstance(allowed, list) else 0)]
        flat = [(f"{name}.function", name.replace(".allowed_tools", "")) for name in functions]
        return [*_NAMES, *flat]

    def without_effect(self) -> tuple[str, ...]:
        """The fields that ask for something harmless that does not happen, and those that nobody knows."""
        idle = {
            "text.verbosity": self.text.verbosity in ("low", "high"),
            "reasoning.summary": self.reasoning.summary is not None,
            "max_tool_calls": self.max_tool_calls is not None,
            "include": any(name != LOGPROBS for name in self.include),
        }
        names = [name for name, asked in idle.items() if asked]
        names += unknown(self, PASSED_ON | frozenset(UNSUPPORTED) | {"user", "safety_identifier", "prompt_cache_key"})
        return tuple(itertools.islice(itertools.chain(names, self._strangers()), MAX_IGNORED))

    def _strangers(self) -> Iterator[str]:
        """The fields inside items, tools and the format that nobody knows."""
        for index, item in enumerate(self.input if isinstance(self.input, list) else ()):
            yield from strangers(item, _ITEM_FIELDS, f"input[{index}]")
            content = item.get("content")
            for place, part in enumerate(content if isinstance(content, list) else ()):
                yield from strangers(part, _PART_FIELDS, f"input[{index}].content[{place}]")
        for index, tool in enumerate(self.tools):
            yield from strangers(tool, _TOOL_FIELDS, f"tools[{index}]")
        yield from strangers(self.text.format, _FORMAT_FIELDS, "text.format")


def _tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    refuse_custom(tools)
    made: list[dict[str, Any]] = []
    for index, tool in enumerate(tools):
        kind = tool.get("type")
        if kind is None:
            raise missing(f"tools[{index}].type")
        if kind != "function":
            reason = f"tools of type '{str(kind)[:40]}' are run by OpenAI's servers; only 'function' is served"
            raise unsupported(f"tools[{index}].type", reason)
        made.append({"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}})
    return made or None


def _choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools":
        tools = choice.get("tools")
        named = [_choice(tool) if isinstance(tool, dict) else tool for tool in tools] if isinstance(tools, list) else tools
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode", "auto"), "tools": named}}
    raise unsupported("tool_choice.type", "only 'function' and 'allowed_tools' are served")


def _format(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if given is None:
        return None
    if given.get("type") != "json_schema":
        return dict(given)
    return {"type": "json_schema", "json_schema": {name: value for name, value in given.items() if name != "type"}}


def check_input(given: str | list[Any]) -> None:
    """Raises ApiError."""
    if not given:
        raise ApiError(400, "input cannot be empty.", code="empty_array", param="input")
    if isinstance(given, list) and not all(isinstance(item, dict) for item in given):
        raise invalid_type("input", "expected a string or an array of objects.")

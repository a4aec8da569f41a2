"""The request body of /v1/responses, and the chat completion that it asks for."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from pydantic import Field

from banyan_runtime.front.errors import ApiError, invalid, invalid_type
from banyan_runtime.front.openai.responses.kinds import is_left_out
from banyan_runtime.front.openai.responses.tools import Tools
from banyan_runtime.front.openai.schema import REMOVED, ChatRequest
from banyan_runtime.front.parsing import MAX_IGNORED, Int, Neutral, RequestModel, check_choice, refuse_unsupported, strangers, unknown
from banyan_runtime.front.renaming import Renaming

MAX_METADATA: Final = 16
MAX_KEY: Final = 64
MAX_VALUE: Final = 512
UNSUPPORTED: Final[Neutral] = {"conversation": ("",), "prompt": ({},), "moderation": ({},), "context_management": ([],), **REMOVED}
PASSED_ON: Final = frozenset(ChatRequest.model_fields) - {
    "messages", "tools", "tool_choice", "stream", "stream_options", "max_tokens", "max_completion_tokens", "response_format",
    "reasoning", "reasoning_effort", "logprobs", "top_logprobs", "n", "store", "metadata", "rid", "request_id",
}  # fmt: skip
"""Fields of chat completions that mean the same here: OpenAI's common ones, and SGLang's and vLLM's sampling fields."""
_ITEM_FIELDS: Final = frozenset(
    {
        "type", "id", "status", "role", "content", "call_id", "name", "namespace", "arguments", "input", "action", "operation", "output",
        "summary", "encrypted_content", "execution", "environment", "max_output_length", "tools", "author", "recipient",
    }
)  # fmt: skip
_PART_FIELDS: Final = frozenset({"type", "text", "refusal", "annotations", "logprobs", "encrypted_content"})
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

    def chat(self, messages: Sequence[Mapping[str, Any]], tools: Tools) -> dict[str, Any]:
        """The body of the chat completion over these messages, with these tools. Raises ApiError."""
        extra = self.model_extra or {}
        body: dict[str, Any] = {name: value for name, value in extra.items() if name in PASSED_ON}
        body |= {"messages": messages, "stream": self.stream, "tools": tools.functions(), "tool_choice": tools.choice(self.tool_choice)}
        body |= {"model": self.model, "max_completion_tokens": self.max_output_tokens, "response_format": _format(self.text.format)}
        body |= {"reasoning_effort": self.reasoning.effort, "verbosity": self.text.verbosity}
        if LOGPROBS in self.include or self.top_logprobs:
            body |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        return {name: value for name, value in body.items() if value is not None}

    def names(self, tools: Tools) -> list[Renaming]:
        """What the fields of the chat completion are called here, its messages' aside."""
        return [*_NAMES, *tools.names(self.tool_choice)]

    def without_effect(self, tools: Tools) -> tuple[str, ...]:
        """Fields without effect, tools and items that are left out, and unknown fields."""
        idle = {
            "text.verbosity": self.text.verbosity in ("low", "high"),
            "reasoning.summary": self.reasoning.summary is not None,
            "max_tool_calls": self.max_tool_calls is not None,
            "include": any(name != LOGPROBS for name in self.include),
        }
        names = [name for name, asked in idle.items() if asked]
        names += unknown(self, PASSED_ON | frozenset(UNSUPPORTED) | {"user", "safety_identifier", "prompt_cache_key"})
        return tuple(itertools.islice(itertools.chain(names, tools.without_effect, self._strangers()), MAX_IGNORED))

    def _strangers(self) -> Iterator[str]:
        """Items that are left out, and unknown fields of the others and of the format."""
        for index, item in enumerate(self.input if isinstance(self.input, list) else ()):
            if is_left_out(item):
                yield f"input[{index}]"
                continue
            yield from strangers(item, _ITEM_FIELDS, f"input[{index}]")
            content = item.get("content")
            for place, part in enumerate(content if isinstance(content, list) else ()):
                yield from strangers(part, _PART_FIELDS, f"input[{index}].content[{place}]")
        yield from strangers(self.text.format, _FORMAT_FIELDS, "text.format")


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

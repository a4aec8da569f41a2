"""From messages to the prompt that the model continues, and to the parser that reads what it writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from banyan_runtime.front.chat.events import OutputParser
from banyan_runtime.front.chat.messages import ChatMessage, for_template
from banyan_runtime.front.chat.reasoning import ReasoningFormat, ReasoningParser, Start
from banyan_runtime.front.chat.template import ChatTemplate, TemplateError
from banyan_runtime.front.errors import ApiError, invalid

MAX_MESSAGES: Final = 2048
RESERVED: Final = frozenset(
    {
        "chat_template",
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "raise_exception",
        "strftime_now",
    }
)
"""Names in templates that a request has other fields for, or none at all; so have the special tokens (bos_token …)."""


@dataclass(frozen=True)
class ChatOptions:
    """How a request wants its messages rendered."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)  # chat_template_kwargs


@dataclass(frozen=True)
class ChatPrompt:
    text: str
    opening: str  # what the template put behind the last finished turn: the start of the model's own


def render(template: ChatTemplate | None, messages: Sequence[ChatMessage], options: ChatOptions) -> ChatPrompt:
    """Render one conversation. Raises ApiError for messages or options that the template does not take."""
    if not messages:
        raise ApiError(400, "Messages cannot be empty.", code="empty_array", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise invalid("messages", f"at most {MAX_MESSAGES} messages are allowed, got {len(messages)}", "array_above_max_length")
    if template is None:
        raise ApiError(
            400,
            "This model has no chat template: start the server with --chat-template FILE, or use /v1/completions.",
            param="messages",
        )
    for name in options.variables:
        if name in RESERVED or name in template.tokens:
            raise invalid(f"chat_template_kwargs.{name}", f"Request-supplied {name} is not allowed in chat_template_kwargs.", "unsupported")
    turns = for_template(messages, knows_developer=template.knows_developer)
    try:
        if options.continue_final_message:
            return _continued(template, turns, options)
        text = template.render(turns, add_generation_prompt=options.add_generation_prompt, variables=options.variables)
        closed = template.render(turns, add_generation_prompt=False, variables=options.variables)
    except TemplateError as error:
        raise ApiError(400, f"The chat template failed: {error}", param="messages") from error
    return ChatPrompt(text, text[_common(text, closed) :])


def _common(text: str, other: str) -> int:
    """Length of the beginning that both share."""
    if text.startswith(other):
        return len(other)
    return next((at for at, (one, two) in enumerate(zip(text, other, strict=False)) if one != two), min(len(text), len(other)))


def _continued(template: ChatTemplate, turns: list[dict[str, Any]], options: ChatOptions) -> ChatPrompt:
    """The prompt that ends inside the last assistant turn."""
    if turns[-1]["role"] != "assistant":
        raise invalid("continue_final_message", "continue_final_message needs a last message of role assistant.")
    if not turns[-1]["content"]:
        raise invalid("continue_final_message", "continue_final_message needs a last message with content.")
    before = template.render(turns[:-1], add_generation_prompt=False, variables=options.variables) if len(turns) > 1 else ""
    text = template.render(turns, add_generation_prompt=False, variables=options.variables)
    content = turns[-1]["content"]
    at = text.rfind(content)
    if at < 0:  # a template may strip what it prints
        content = content.strip()
        at = text.rfind(content) if content else -1
    if at < 0:
        raise TemplateError("it does not print the last message as it is, so the message cannot be continued")
    text = text[: at + len(content)]
    return ChatPrompt(text, text[_common(text, before) :])


@dataclass(frozen=True)
class ReasoningReader:
    """What a server knows of its model's reasoning; makes the parser of each choice."""

    form: ReasoningFormat
    end_is_token: bool
    marker_ids: frozenset[int]  # of markers that are single tokens: they must reach the parser as text

    def parser(self, start: Start, *, stream: bool) -> OutputParser:
        return ReasoningParser(self.form, start, end_is_token=self.end_is_token, stream=stream)

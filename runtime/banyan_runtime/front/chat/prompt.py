"""From messages to the prompt that the model continues, and to the parser that reads what it writes."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from banyan_runtime.front.chat.arrangement import arranged, parted, with_short_ids
from banyan_runtime.front.chat.messages import ChatMessage, Turn, for_template, without_textual_arguments
from banyan_runtime.front.chat.reasoning import ReasoningFormat
from banyan_runtime.front.chat.template import ChatTemplate, TemplateError
from banyan_runtime.front.errors import ApiError, invalid

MAX_MESSAGES: Final = 2048
MAX_UNREAD: Final = 20  # parts of messages that are named
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


_END: Final = "\ue0c7end\ue0c7 "
"""Marks where the last message ends in a rendered text, and with its blank whether the template strips messages."""


@dataclass(frozen=True)
class ChatOptions:
    """How a request wants its messages rendered."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)  # chat_template_kwargs
    tools: Sequence[Mapping[str, Any]] = ()  # as the client wrote them: keys keep their order
    documents: Sequence[Mapping[str, Any]] = ()

    @property
    def fields(self) -> Mapping[str, Any]:
        """What a request brings beside its messages, in fields of its own."""
        return {"tools": list(self.tools) or None, "documents": list(self.documents) or None}

    @property
    def scope(self) -> Mapping[str, Any]:
        """What the template sees beside the messages."""
        return {**self.variables, **self.fields}


@dataclass(frozen=True)
class ChatPrompt:
    text: str
    opening: str  # what the template put behind the last finished turn: the start of the model's own
    unshown: tuple[str, ...] = ()  # fields of the request that this template shows the model nothing of


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
    turns, unread = for_template(messages)
    turns = _fitted(template, turns, bool(options.tools))
    try:
        prompt = _rendered(template, turns, options)
    except TemplateError as error:
        if (told := _told(template, turns, options)) is None:
            raise ApiError(400, f"The chat template failed: {error}", param="messages") from error
        prompt = told
    unshown = [name for name, given in options.fields.items() if given and name in template.unread]
    return replace(prompt, unshown=(*unshown, *unread[:MAX_UNREAD]))


def _fitted(template: ChatTemplate, turns: list[Turn], tools: bool) -> list[Turn]:
    """The turns within the limits of this template."""
    limits = template.limits
    given = turns
    for result_last in (False, True):
        takes = functools.partial(limits.takes, tools=tools, result_last=result_last)
        turns = arranged(given, takes)
        if turns[-1]["role"] != "tool":
            break
    if any("tool_calls" in turn for turn in turns):
        turns = parted(turns, text=limits.parts_text, calls=limits.parts_calls)
        if limits.takes_short_ids_alone:
            turns = with_short_ids(turns)
        if limits.asks_for_null:
            turns = [{**turn, "content": turn["content"] or None} if "tool_calls" in turn else turn for turn in turns]
    return turns


def _told(template: ChatTemplate, turns: list[Turn], options: ChatOptions) -> ChatPrompt | None:
    """The prompt where arguments that are no object, such as those that were cut off, are what the template fails on: without them."""
    objects = without_textual_arguments(turns)
    try:
        return None if objects == turns else _rendered(template, objects, options)
    except TemplateError:
        return None


def _rendered(template: ChatTemplate, turns: list[Turn], options: ChatOptions) -> ChatPrompt:
    if options.continue_final_message:
        return _continued(template, turns, options)
    text = template.render(turns, add_generation_prompt=options.add_generation_prompt, variables=options.scope)
    closed = template.render(turns, add_generation_prompt=False, variables=options.scope)
    return ChatPrompt(text, text[_common(text, closed) :])


def _common(text: str, other: str) -> int:
    """Length of the beginning that both share."""
    if text.startswith(other):
        return len(other)
    return next((at for at, (one, two) in enumerate(zip(text, other, strict=False)) if one != two), min(len(text), len(other)))


def _continued(template: ChatTemplate, turns: list[Turn], options: ChatOptions) -> ChatPrompt:
    """The prompt that ends inside the last assistant turn."""
    if turns[-1]["role"] != "assistant":
        raise invalid("continue_final_message", "continue_final_message needs a last message of role assistant.")
    if not turns[-1]["content"]:
        raise invalid("continue_final_message", "continue_final_message needs a last message with content.")
    before = template.render(turns[:-1], add_generation_prompt=False, variables=options.scope) if len(turns) > 1 else ""
    content = turns[-1]["content"]
    marked = [*turns[:-1], {**turns[-1], "content": content + _END}]
    text = template.render(marked, add_generation_prompt=False, variables=options.scope)
    text, end, rest = text.rpartition(_END.rstrip())
    if not end or content.strip() not in text:
        raise TemplateError("it does not print the last message as it is, so the message cannot be continued")
    if content.strip() and not rest.startswith(" "):  # the template strips what it prints, which the mark has prevented
        text = text.rstrip()
    return ChatPrompt(text, text[_common(text, before) :])


@dataclass(frozen=True)
class ReasoningReader:
    """What a server knows of its model's reasoning."""

    form: ReasoningFormat
    marker_ids: frozenset[int]  # of markers that are single tokens: they must reach the parser as text

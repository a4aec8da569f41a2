"""Chat templates: Jinja from the model, in a sandbox, with the names that Hugging Face templates expect."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import jinja2

from banyan_runtime.front.chat.limits import Limits
from banyan_runtime.front.chat.sandbox import environment

_MAX_RENDERED: Final = 64 * 1024 * 1024  # characters; twice the largest request body, so only a runaway template meets it
_MAX_SOURCE: Final = 1 << 18  # characters; the longest known template has 50,000
_MAX_REASON: Final = 1000  # characters of a template's own words in an error
_CITY: Final = {"type": "object", "properties": {"city": {"type": "string", "description": "Where."}}, "required": ["city"]}
_TOOL: Final = {"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": _CITY}}
_DOCUMENT: Final = dict.fromkeys(("id", "doc_id", "title", "text", "content", "contents", "snippet", "url"), "Weather")
"""With the names that templates have for its parts."""
_PROBES: Final[Mapping[str, Mapping[str, Any]]] = {"tools": _TOOL, "documents": _DOCUMENT}
_USER: Final = {"role": "user", "content": "Hello"}
_PROBED: Final = ([_USER], [{"role": "system", "content": "Be kind."}, _USER])
"""Conversations that are tried: some templates take no system message, others might show tools beside one alone."""


class TemplateError(Exception):
    """The template refused the messages, or failed on them. The text is fit for the client."""


Guard = Callable[[], AbstractContextManager[None]]
"""What compiling and each rendering happen in: it may limit time and memory, with a TemplateError."""


class ChatTemplate:
    """One compiled template. Safe to use from several threads.

    Raises TemplateError when `source` is no valid template.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], guard: Guard = nullcontext) -> None:
        self.source = source
        self.guard = guard
        self.tokens = dict(tokens)  # bos_token, eos_token …
        self.limits = Limits(source, self._probed)
        if len(source) > _MAX_SOURCE:
            raise TemplateError(f"it has {len(source)} characters; at most {_MAX_SOURCE} are read, no template needs more")
        try:
            with guard():
                self._template = environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"line {error.lineno}: {error.message}") from error

    @functools.cached_property
    def unread(self) -> frozenset[str]:
        """Which of `tools` and `documents` the template shows a model nothing of, whatever a request brings: found out once, by what it
        makes of one of each."""
        return frozenset(name for name in _PROBES if not self._reads(name))

    def _reads(self, name: str) -> bool:
        known = False
        for turns in _PROBED:
            if (plain := self._probed(turns, {})) is not None:
                if self._probed(turns, {name: [_PROBES[name]]}) != plain:  # what it fails on it has read, too
                    return True
                known = True
        return not known  # of a template that takes none of these conversations nothing can be said

    def _probed(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str | None:
        """None: it fails, or takes too much."""
        try:
            return self.render(messages, add_generation_prompt=True, variables=variables)
        except (TemplateError, MemoryError):
            return None

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, variables: Mapping[str, Any]) -> str:
        """The prompt's text. `variables` are the request's `chat_template_kwargs`; unknown ones do no harm.

        Raises TemplateError.
        """
        scope = {
            **self.tokens,
            "tools": None,
            "documents": None,
            **variables,
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            with self.guard():
                return self._rendered(scope)
        except (jinja2.TemplateError, TypeError, ValueError, OverflowError, LookupError, AttributeError, ArithmeticError) as error:
            raise TemplateError(_reason(error)) from error
        except RecursionError as error:
            raise TemplateError("the messages are nested too deeply") from error

    def _rendered(self, scope: Mapping[str, Any]) -> str:
        pieces: list[str] = []
        length = 0
        for piece in self._template.generate(scope):
            length += len(piece)
            if length > _MAX_RENDERED:
                raise TemplateError(f"the prompt is longer than {_MAX_RENDERED} characters")
            pieces.append(piece)
        text = "".join(pieces)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TemplateError("it writes half a character (a lone surrogate), which no tokenizer reads") from error
        return text


def _reason(error: Exception) -> str:
    """What went wrong, fit to be sent: a template may raise any text."""
    return str(error)[:_MAX_REASON].encode(errors="replace").decode() or type(error).__name__

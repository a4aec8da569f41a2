"""Chat templates: Jinja from the model, in a sandbox, with the names that Hugging Face templates expect."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MAX_RENDERED: Final = 64 * 1024 * 1024  # characters; twice the largest request body, so only a runaway template meets it
_MAX_REPEATED: Final = 1_000_000  # length of a sequence that a template may make with `*`


class TemplateError(Exception):
    """The template refused the messages, or failed on them. The text is fit for the client."""


Guard = Callable[[], AbstractContextManager[None]]
"""What each rendering happens in: it may limit the time, with a TemplateError."""


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant text for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        for sequence, times in ((left, right), (right, left)):
            if isinstance(sequence, str | bytes | list | tuple) and isinstance(times, int) and len(sequence) * times > _MAX_REPEATED:
                raise SecurityError("a repeated sequence is too long")
        if operator == "**" and isinstance(left, int) and isinstance(right, int) and abs(right) > 64:
            raise SecurityError("an exponent is too large")
        return super().call_binop(context, operator, left, right)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    """Jinja's own filter escapes HTML, which would show up in prompts."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _environment() -> _Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class ChatTemplate:
    """One compiled template. Safe to use from several threads.

    Raises TemplateError when `source` is no valid template.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], guard: Guard = nullcontext) -> None:
        self.source = source
        self.guard = guard
        self.tokens = dict(tokens)  # bos_token, eos_token …
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"line {error.lineno}: {error.message}") from error

    @property
    def knows_developer(self) -> bool:
        """Whether the template has a role `developer` of its own."""
        return "developer" in self.source

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
            raise TemplateError(str(error) or type(error).__name__) from error
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
        return "".join(pieces)

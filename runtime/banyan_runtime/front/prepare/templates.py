"""The chat template of a request: the model's, or one that the request brings along, where the server lets it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, Final

from banyan_runtime.config import ServerConfig
from banyan_runtime.front.chat.template import ChatTemplate, Guard, TemplateError
from banyan_runtime.front.errors import invalid, invalid_type, unsupported
from banyan_runtime.front.text.text import Text

_FLAG: Final = "this server takes no templates of requests; it would with --trust-request-chat-template"
_VARIABLE: Final = "chat_template"  # of chat_template_kwargs: another place for it


class Templates:
    def __init__(self, config: ServerConfig, text: Text) -> None:
        self._trusting = config.trust_request_chat_template
        self._text = text
        self.guard: Guard = nullcontext  # around compiling and rendering what a request brings

    def of(self, source: str | None, variables: Mapping[str, Any]) -> tuple[ChatTemplate | None, Mapping[str, Any]]:
        """The template, and the variables for it, for a request's `chat_template` and `chat_template_kwargs`. Raises ApiError."""
        if source and not self._trusting:
            raise unsupported("chat_template", _FLAG)
        param = "chat_template"
        if self._trusting and _VARIABLE in variables:
            variables = dict(variables)
            given, where = variables.pop(_VARIABLE), f"chat_template_kwargs.{_VARIABLE}"
            if given is not None and not isinstance(given, str):
                raise invalid_type(where, "expected a string.")
            if given and source:
                raise invalid(where, f"chat_template and {where} exclude each other.")
            source, param = (given, where) if given else (source, param)
        if not source:
            return self._text.template, variables
        try:
            return ChatTemplate(source, self._text.needed_tokenizer.named, self.guard, param), variables
        except (TemplateError, SyntaxError, RecursionError, OverflowError, ValueError) as error:
            # The latter are what Python says of a template that is nested too deeply.
            raise invalid(param, f"The chat template does not work: {error}") from error

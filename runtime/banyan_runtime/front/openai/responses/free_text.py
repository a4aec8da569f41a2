"""The free text that a tool is called with, out of the JSON in which the model writes it: {"input": "…"}."""

from __future__ import annotations

import json
import re
from typing import Final

from banyan_runtime.front.chat.messages import object_of
from banyan_runtime.front.openai.responses.kinds import TEXT

_OPENING: Final = re.compile(rf'\s*\{{\s*"{TEXT}"\s*:\s*"')
_OPENING_AT_MOST: Final = 64  # characters, with blanks between them
_HIGH, _LOW = r"\\u[dD][89abAB][0-9a-fA-F]{2}", r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_SURE: Final = re.compile(
    rf'(?:[^"\\]|\\["\\/bfnrt]|{_HIGH}(?:{_LOW}|(?=[^\\]|\\[^u]|\\u.{{4}}))|(?!{_HIGH})\\u[0-9a-fA-F]{{4}})*', re.DOTALL
)
"""Characters of a JSON string that what follows cannot change: no half of an escape, nor of a pair of them."""


class FreeText:
    """Takes the arguments of one call in pieces."""

    def __init__(self) -> None:
        self._unread = ""
        self._open: bool | None = None  # whether the text goes on; None: it has not begun

    def feed(self, fragment: str) -> str:
        """The text that can be given out now."""
        if self._open is None and len(self._unread) <= _OPENING_AT_MOST:
            self._unread += fragment
            if (opening := _OPENING.match(self._unread)) is None:
                return ""
            self._open, self._unread, fragment = True, self._unread[opening.end() :], ""
        if not self._open:
            return ""
        self._unread += fragment
        end = _SURE.match(self._unread).end()  # type: ignore[union-attr]  # it matches nothing, at least
        text, self._unread = self._unread[:end], self._unread[end:]
        self._open = not self._unread.startswith('"')
        return _decoded(text)

    def finish(self, arguments: str) -> str:
        """What has not been given out of the text, for these arguments as a whole: all of it, where they do not begin with it."""
        return "" if self._open is not None else arguments if (text := text_of(arguments)) is None else text


def text_of(arguments: str) -> str | None:
    """The text, where these arguments are a whole object that has it."""
    text = (object_of(arguments) or {}).get(TEXT)
    return text if isinstance(text, str) else None


def _decoded(text: str) -> str:
    """What a part of a JSON string says. Halves of characters become U+FFFD."""
    said: str = json.loads(f'"{text}"', strict=False)
    return said if "\\u" not in text else said.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")

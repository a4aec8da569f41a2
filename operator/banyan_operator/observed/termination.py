"""The termination message of the runtime's containers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

TAIL: Final = 300  # characters of a text that is no such message


@dataclass(frozen=True, slots=True)
class TerminationMessage:
    """JSON {code, field, value, message}. `code` is "" in any other text."""

    code: str
    field: str  # the flag or variable that is to blame
    value: str
    message: str
    report: Mapping[str, Any]  # the whole object: a batch's worker puts its counts beside the four

    @staticmethod
    def parse(text: str) -> TerminationMessage:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):  # the latter where it is nested a thousand deep
            found = None
        if not isinstance(found, dict) or not isinstance(found.get("code"), str):
            return TerminationMessage("", "", "", text.strip()[-TAIL:], {})
        code, field, value, message = (str(found.get(key) or "") for key in ("code", "field", "value", "message"))
        return TerminationMessage(code, field, value, message, found)

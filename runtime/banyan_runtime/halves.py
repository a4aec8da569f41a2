"""JSON with half of a surrogate pair in a string, which is no character. JavaScript writes such text where it cuts an emoji in two."""

from __future__ import annotations

import json
import re
from typing import Any, Final

WORDS: Final = "a string has half of a surrogate pair, such as \\ud83d alone, which is no character"
_LOOKED_AT: Final = 1 << 20  # bytes of a text that cannot be decoded
_ESCAPED: Final = re.compile(rb"\\u[dD]")


def read(text: bytes | bytearray | memoryview) -> Any | None:
    """Of what cannot be decoded: its value, where nothing else is wrong with it; None else, and where it is long."""
    told = bytes(text[:_LOOKED_AT])
    if len(text) > _LOOKED_AT or not _ESCAPED.search(told):
        return None
    try:
        value = json.loads(told)
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return value
    except (ValueError, RecursionError):
        pass
    return None

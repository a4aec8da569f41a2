"""JSON as others read and write it: what cuts it where they read by lines, and the words for numbers that it lacks."""

from __future__ import annotations

import re
from typing import Final

_BREAKS: Final = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))
_AT_BYTE: Final = re.compile(r"\(byte ([0-9]+)\)$")
_NO_NUMBER: Final = re.compile(rb"-?(?:NaN|Infinity)")


def uncut(encoded: bytes) -> bytes:
    """JSON without the three characters other than line ends at which clients cut lines (`str.splitlines`, httpx's `iter_lines`). They
    can stand in strings only, where their escapes mean the same."""
    if encoded.isascii() or not (b"\xe2" in encoded or b"\xc2" in encoded):  # soon found out, and true of most texts in any script
        return encoded
    for character, escape in _BREAKS:
        encoded = encoded.replace(character, escape)
    return encoded


def no_number(text: bytes | bytearray | memoryview, error: Exception) -> str | None:
    """What is wrong with a text that msgspec would not read, where that is a word for a number which Python writes and JSON lacks."""
    found = _AT_BYTE.search(str(error))
    if found is None:
        return None
    at = int(found[1])
    begins = bytes(text[max(0, at - 1) : at + len(b"Infinity")])  # a sign is read before it
    word = _NO_NUMBER.match(begins) or _NO_NUMBER.match(begins, min(at, 1))
    return f"{word[0].decode()} is not JSON (byte {at}): write a number, or null" if word else None

"""How deep JSON may be nested. Parsers go as deep as the stack lets them, which is deeper in one place than in the next; so what is very
deep is refused where it comes in, lest it be read in one pass and not in another."""

from __future__ import annotations

import itertools
from typing import Final

MOST: Final = 500

_ALIKE: Final = bytes.maketrans(b"{}", b"[]")
_BESIDE: Final = bytes(set(range(256)) - set(b'[]{}"'))
_USUAL: Final = 16  # levels that most of what is nested has at most


def too_deep(json: bytes | bytearray) -> bool:
    """Whether arrays and objects lie more than MOST within one another. Of what is no JSON it may say either."""
    if json.count(b"[") + json.count(b"{") <= MOST:
        return False
    bare = json.replace(b"\\\\", b"").replace(b'\\"', b"").translate(_ALIKE, _BESIDE)  # brackets, and quotes that begin or end a string
    bare = bare.replace(b'""', b"")  # whatever two these are, what lies within strings and without stays where it is
    brackets = b"".join(bare.split(b'"')[::2])
    levels = min(_USUAL, MOST)
    for _ in range(levels):
        brackets = brackets.replace(b"[]", b"")  # the innermost
        if not brackets:
            return False
    return levels + max(itertools.accumulate(1 if one == ord("[") else -1 for one in brackets)) > MOST

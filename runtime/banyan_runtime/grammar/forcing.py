"""How much text a grammar may leave no choice about. llguidance looks such text up in one go, before the next mask, so that it comes
in the tokens that a model would write; a megabyte of it takes a second, in which nobody gets a token."""

from __future__ import annotations

import math
import re
from typing import Any, Final

from banyan_runtime.grammar.pieces import Splitter

MAX_FORCED: Final = 4096  # characters: 5 ms

_REPEATED: Final = re.compile(r"\{\s*(\d+)")


def forces(value: Any, splitter: Splitter) -> bool:
    """Whether texts that leave no choice may be looked up: not where one in `value`, JSON or a text itself, may stand for more than
    `MAX_FORCED` characters, its repetitions (`{7}`) written out, nor where one has the name of a special token in it, which would
    then come as that token. Says rather no than yes: an output is as good without, but for its tokens."""
    if isinstance(value, dict):
        return all(forces(name, splitter) and forces(item, splitter) for name, item in value.items())
    if isinstance(value, list | tuple):
        return all(forces(item, splitter) for item in value)
    if not isinstance(value, str):
        return True
    counts = [int(count[1][:9]) for count in _REPEATED.finditer(value)]
    if len(value) * math.prod(max(1, count) for count in counts) > MAX_FORCED:
        return False
    return all(isinstance(piece, str) for piece in splitter.split(value.replace("\\", "")))

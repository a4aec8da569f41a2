"""Ids of calls. Models of some families find their own calls in the history only by ids of their form."""

from __future__ import annotations

import string
from typing import Final, Protocol

RANDOM_BYTES: Final = 12
"""What an `IdMaker` wants of randomness."""
_ALPHANUMERIC: Final = string.digits + string.ascii_letters


class IdMaker(Protocol):
    def __call__(self, name: str, number: int, random: bytes, /) -> str:
        """The id of a call of the tool `name`. `number` counts the conversation's calls before it, `random` are `RANDOM_BYTES`."""
        ...


def call_id(name: str, number: int, random: bytes, /) -> str:
    """`call_` and 24 hexadecimal digits, as OpenAI's."""
    return f"call_{random[:RANDOM_BYTES].hex()}"


def kimi_id(name: str, number: int, random: bytes, /) -> str:
    return f"functions.{name}:{number}"


def mistral_id(name: str, number: int, random: bytes, /) -> str:
    """Nine letters and digits."""
    left, digits = int.from_bytes(random[:RANDOM_BYTES], "little"), []
    for _ in range(9):
        left, digit = divmod(left, len(_ALPHANUMERIC))
        digits.append(_ALPHANUMERIC[digit])
    return "".join(digits)

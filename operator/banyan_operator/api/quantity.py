"""Kubernetes quantities ("500m", "4Gi", 2) as numbers."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Final

PATTERN: Final = r"^\+?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?[0-9]{1,2}))?$"
"""Kubernetes' own, but for signs, as nothing here is less than nothing, and for exponents: a number of a billion digits would keep
whoever computes with it busy for ever."""

_SPLIT: Final = re.compile(r"^([+-]?[0-9.]+)(.*)$")
_SUFFIX: Final = {
    "": Fraction(1),
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 1000),
    "k": Fraction(1000),
    "M": Fraction(10**6),
    "G": Fraction(10**9),
    "T": Fraction(10**12),
    "P": Fraction(10**15),
    "E": Fraction(10**18),
    "Ki": Fraction(2**10),
    "Mi": Fraction(2**20),
    "Gi": Fraction(2**30),
    "Ti": Fraction(2**40),
    "Pi": Fraction(2**50),
    "Ei": Fraction(2**60),
}


def amount(quantity: float | str) -> Fraction:
    """The exact number that a quantity stands for. Raises ValueError for text that is no quantity."""
    text = str(quantity).strip()
    if not re.match(PATTERN, text):
        raise ValueError(f"{text!r} is not a quantity; write a number with a unit, such as 500m, 2, 512Mi or 4Gi")
    found = _SPLIT.match(text)
    assert found is not None, text
    number, suffix = found.groups()
    if suffix not in _SUFFIX:  # an exponent: 1e3
        return Fraction(text)
    return Fraction(number) * _SUFFIX[suffix]


def same(a: object, b: object, *, rounded: bool = False) -> bool:
    """Whether two values are the same quantity, however each is written ("1000m", 1 and 1.0). `rounded`: up to thousandths, as the API
    server keeps what containers ask for."""
    if a == b:
        return True
    if not isinstance(a, int | float | str) or not isinstance(b, int | float | str) or isinstance(a, bool) or isinstance(b, bool):
        return False
    try:
        one, other = amount(a), amount(b)
    except ValueError:
        return False
    return math.ceil(1000 * one) == math.ceil(1000 * other) if rounded else one == other

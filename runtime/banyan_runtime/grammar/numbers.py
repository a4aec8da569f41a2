"""Numbers in schemas, as far as llguidance tells them apart: it computes with floats, which lose the last digit of 9007199254740993."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any, Final

from banyan_runtime.grammar.schema import Schema, parts, refuse

_EXACT: Final = (1 << 53) - 1  # beyond it not every integer is a float
_DIGITS: Final = 15  # that every float keeps
_STEP: Final = 128_000  # each multiple below 2**63 is a float, and is written with its own digits
_MOST: Final = ((1 << 63) - 1) // _STEP * _STEP
_LOW: Final = ("minimum", "exclusiveMinimum")
_HIGH: Final = ("maximum", "exclusiveMaximum")


def held(schema: Schema, at: str = "#") -> Schema:
    """The schema (it is changed) in numbers that outputs are held to exactly. Bounds that are no such numbers move inwards, to the next
    ones. `at`: its place. Raises GrammarError for what cannot be told apart from something else."""
    for path, part in parts(schema, at):
        written = dict(part)
        for keyword in (*_LOW, *_HIGH):
            bound = part.get(keyword)
            if isinstance(bound, int | float) and abs(bound) > _EXACT:
                sign = 1 if keyword in _LOW else -1
                moved = sign * _moved(sign * bound, beyond=keyword not in ("minimum", "maximum"))
                if abs(moved) > _MOST:
                    raise refuse(path, part, keyword, f"is out of the range that numbers can be held to, {-_MOST} to {_MOST}")
                part[keyword] = moved
        if part != written and _is_empty(part) and not _is_empty(written):
            keyword = next(keyword for keyword in (*_LOW, *_HIGH) if part.get(keyword) != written.get(keyword))
            reason = f"leaves no number: those of more than {_DIGITS} digits are told apart in steps of {_STEP:,}; let it be a string"
            raise refuse(path, written, keyword, reason)
        for keyword in ("const", "enum"):
            for number in _numbers(part.get(keyword)):
                if not _is_kept(number):
                    reason = f"holds {str(number)[:40]}, whose last digits would be lost ({_DIGITS} are kept): let it be a string"
                    raise refuse(path, part, keyword, reason)
    return schema


def _moved(bound: float, *, beyond: bool) -> int:
    """The least multiple of the step that is at least `bound`, or `beyond` it, and that outputs can be compared with."""
    if bound < -_MOST:
        return -_MOST
    whole = int(bound)
    return (whole // _STEP + 1) * _STEP if beyond else -(-whole // _STEP) * _STEP


def _is_empty(part: Schema) -> bool:
    """Whether no number is within its bounds."""
    lows = [(part[keyword], keyword == "exclusiveMinimum") for keyword in _LOW if type(part.get(keyword)) in (int, float)]
    highs = [(part[keyword], keyword == "exclusiveMaximum") for keyword in _HIGH if type(part.get(keyword)) in (int, float)]
    return any(low > high or (low == high and (below or above)) for low, below in lows for high, above in highs)


def _numbers(value: Any) -> Iterator[int | float]:
    """All there are in some JSON."""
    if type(value) in (int, float):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _numbers(item)


def _is_kept(number: float) -> bool:
    if isinstance(number, float):
        return len(Decimal(repr(number)).normalize().as_tuple().digits) <= _DIGITS
    try:
        return abs(number) <= _EXACT or Decimal(repr(float(number))) == number
    except OverflowError:
        return False

"""Rules between fields, in CEL: the API server evaluates them, and `validation` does where there is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cel import Program


@dataclass(frozen=True, slots=True)
class Rule:
    """Must hold of one object at any time."""

    cel: str
    message: str
    found: Callable[[Any], str] | None = None
    """Names what in the object breaks the rule; follows the message. The API server does not show it."""

    def holds(self, value: Any) -> bool:
        """`value`: JSON, as the API server stores it."""
        return _program(self.cel).execute({"self": value}) is True

    def told(self, value: Any) -> str:
        return self.message + (f": {self.found(value)}" if self.found else "")


@dataclass(frozen=True, slots=True)
class Transition:
    """Must hold between an object and its earlier self."""

    cel: str
    message: str

    def holds(self, new: Any, old: Any) -> bool:
        """`new`, `old`: JSON, as the API server stores it."""
        return _program(self.cel).execute({"self": new, "oldSelf": old}) is True


@cache
def _program(rule: str) -> Program:
    from cel import compile  # imports a command line of its own, which takes as long as half of our start

    return compile(rule)

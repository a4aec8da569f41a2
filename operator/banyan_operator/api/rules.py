"""Rules between fields, each declared once: as CEL for the API server and as a Python predicate for local mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Rule:
    """Must hold of one object at any time. `holds` says in Python what `cel` says to the API server."""

    cel: str
    message: str
    holds: Callable[[Any], bool]
    found: Callable[[Any], str] | None = None
    """What in the object breaks it, in words that follow the message; the API server does not say it."""
    when_made: bool = False
    """Is asked only when an object is made: one that is there from before the rule can still be changed and finished."""

    def told(self, value: Any) -> str:
        return self.message + (f": {self.found(value)}" if self.found else "")


@dataclass(frozen=True, slots=True)
class Transition:
    """Must hold between an object and its earlier self: `holds(new, old)`."""

    cel: str
    message: str
    holds: Callable[[Any, Any], bool]

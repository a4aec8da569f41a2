"""How each format writes a call, as data: what a grammar needs to hold a model to it.

A forced answer is

    opening  call  (separator call)*  closing        call = begin arguments end

A free one is any text, in which `trigger` begins such an answer: the trigger is the beginning of `opening + begin`.
Texts are as the model writes them. Those of the format's `markers` that are tokens of the vocabulary stand for these tokens.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final, TypeAlias


class Hole(enum.Enum):
    """A place in a text that is filled in."""

    NAME = "name"  # the tool's name, or the parameter's key: [A-Za-z0-9_-]
    NUMBER = "number"  # decimal digits of the model's choice


NAME: Final = Hole.NAME
NUMBER: Final = Hole.NUMBER
Parts: TypeAlias = tuple[str | Hole, ...]


@dataclass(frozen=True, slots=True)
class JsonArguments:
    """The arguments are one JSON object: the tool's schema where it is strict, else any object."""


@dataclass(frozen=True, slots=True)
class TextArguments:
    """Each parameter is written for itself, in the order of the schema: begin value end. The value of a string is its text, which
    cannot contain `end`, nor what the parser takes for the end of a value or the beginning of something else, `excludes`; other values
    are JSON."""

    begin: Parts
    end: str
    separator: str = ""
    excludes: tuple[str, ...] = ()


ArgumentsForm: TypeAlias = JsonArguments | TextArguments


@dataclass(frozen=True, slots=True)
class ToolTag:
    trigger: str
    begin: Parts
    end: str
    separator: str
    opening: str = ""
    closing: str = ""
    arguments: ArgumentsForm = JsonArguments()
    prose: str = ""  # where nothing marks calls but their place, the beginning of an output: a regex of outputs that begin otherwise
    marker: str = ""  # with `prose`: what marks calls behind it

    def begin_of(self, name: str, number: int = 0) -> str:
        """The text that begins a call of this tool."""
        return filled(self.begin, name, number)


def filled(parts: Parts, name: str, number: int = 0) -> str:
    """The parts as one text."""
    fill = {Hole.NAME: name, Hole.NUMBER: str(number)}
    return "".join(fill[part] if isinstance(part, Hole) else part for part in parts)

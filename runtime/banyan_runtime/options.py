"""What an option of the server is: a field with a default, a unit, a check and its help."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any

Check = Callable[[Any], str | None]
"""Says what is wrong with a value ("must be at least 1"), or None."""


def at_least(low: float) -> Check:
    return lambda value: None if value >= low else f"must be at least {low}"


def between(low: float, high: float) -> Check:
    return lambda value: None if low <= value <= high else f"must be between {low} and {high}"


class OneOf:
    def __init__(self, choices: Sequence[object]) -> None:
        self._choices = choices
        self.named = [str(choice) for choice in choices if choice is not None]

    def __call__(self, value: object) -> str | None:
        return None if value in self._choices else "must be one of " + ", ".join(self.named)


def one_of(*choices: object) -> Check:
    return OneOf(choices)


def chunk_size(value: int) -> str | None:
    return None if value == -1 or value >= 1 else "must be at least 1, or -1 for no chunking"


def origins(values: Sequence[str]) -> str | None:
    wrong = [value for value in values if value != "*" and (value.count("/") != 2 or "://" not in value or value.endswith("/"))]
    return f"must be * or origins like https://chat.example, without a path: {wrong[0]}" if wrong else None


def storage(value: str) -> str | None:
    """What of an address shows before anybody opens it."""
    typo = re.match("([a-z][a-z0-9+.-]*):/(?!/)", value)
    return f"must be a folder or s3://BUCKET/PREFIX; a folder of that name is ./{value}" if typo else None


def folder(value: str) -> str | None:
    return "must be a folder" if "://" in value else None


def json_object(value: str) -> str | None:
    try:
        parsed = json.loads(value)
    except ValueError as error:
        return f"must be a JSON object ({error})"
    return None if isinstance(parsed, dict) else "must be a JSON object"


def option(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    check: Check | None = None,
    metavar: str | None = None,
    secret: bool = False,
    group: str = "server",
) -> Any:
    """A field of `ServerConfig` with what the command line and the docs need to know of it."""
    if metavar is None and isinstance(check, OneOf):
        metavar = "{" + ",".join(check.named) + "}"
    metadata = {"help": help, "check": check, "metavar": metavar, "secret": secret, "group": group}
    if isinstance(default, list | tuple):
        return field(default_factory=lambda: tuple(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")

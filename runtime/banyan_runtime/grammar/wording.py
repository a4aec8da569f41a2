"""What the library that compiles grammars says of one that is wrong, in the words of the client who wrote it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Final

from banyan_runtime.grammar.schema import Schema, parts

MOST: Final = 250  # characters
_QUOTED: Final = 60  # characters of a client's regex
TOO_COMPLEX: Final = "it is too complex: make it smaller, with fewer alternatives, optional parts and repetitions."

_SOURCE: Final = re.compile(r"\n\s*\d+ \| .*", re.DOTALL)  # lines of the grammar that was written for the library, and the place in them
_AT: Final = re.compile(r"^(?:at )?(\d+)\(\d+\): ")
_NOISE: Final = re.compile(r"failed to compile JSON schema: |invalid regex \".*?\" \(in regex\): |^Parser Error: ", re.DOTALL)
_REGEX: Final = re.compile(r"regex parse error:\n(?:~+\n)?(.*?)\n(?:~+\n)?error: ", re.DOTALL)
_REGEX_LINE: Final = re.compile(r"^\s*(?:\d+: )?\s{0,4}(.*?)\s*$")
_ONE_OF: Final = re.compile(r"oneOf constraints are not supported.*", re.DOTALL)
_EXHAUSTED: Final = re.compile(
    r"schema too large$|^Current row has \d+ items|\bfuel exhausted|\blex(?:er)? fuel\b|check fuel|^Too many items \(limit|"
    r"^too many expressions constructed|\(grammar\) too big"
)

_SAID: Final[tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...]] = (
    (
        re.compile(r"lookarounds not supported yet; \w+ in regex /(.*)/", re.DOTALL),
        lambda found: f"the regex {_short(found[1])}: \\b, and ^ or $ elsewhere than at its ends, are not supported; leave them out",
    ),
    (re.compile(r"Unsatisfiable schema: Regex is empty:.*", re.DOTALL), "no text fits its 'pattern', 'format' and lengths together"),
    (re.compile(r"Unsatisfiable schema: anyOf is empty"), "'anyOf' or 'enum' is empty, so no value fits it"),
    (re.compile(r"Unsatisfiable schema: "), "no value fits it: "),
    (re.compile(r"Pointer '(.*?)' does not exist", re.DOTALL), r"'$ref' points to '#\1', which does not exist"),
    (re.compile(r"Resource '(.*?)' is not present in a registry.*", re.DOTALL), r"'\1' is not known here and never fetched; leave it out"),
    (re.compile(r"Failed to generate regex for \w+ range: .*", re.DOTALL), "its bounds are too large for numbers to be held to them"),
    (re.compile(r"^Unknown format: (.*)"), r"'format' \1 is not supported; use 'pattern', or leave it out"),
    (re.compile(r"; following special tokens are available.*", re.DOTALL), ""),
)


def in_clients_words(error: str, *, line_before: int | None = None, schemas: Iterable[Schema] = ()) -> str:
    """One line, without what the library or we made of the grammar. `line_before`: lines that stand before the client's own, if what
    was compiled is that; `schemas`: those in the grammar, in which a keyword may have to be looked for."""
    text = _SOURCE.sub("", error.strip())
    place = _AT.match(text)
    if place is not None:
        line = 0 if line_before is None else int(place[1]) - line_before
        text = (f"line {line}: " if line > 0 else "") + text[place.end() :]
    text = _NOISE.sub("", text)
    text = _REGEX.sub(lambda found: f"the regex {_short(_pattern(found[1]))}: ", text)
    text = _ONE_OF.sub(lambda found: _one_of(schemas), text)
    for pattern, said in _SAID:
        text = pattern.sub(said, text)
    if _EXHAUSTED.search(text):
        return TOO_COMPLEX
    text = " ".join(text.split())
    return text if len(text) <= MOST else text[: MOST - 1] + "…"


def _pattern(shown: str) -> str:
    """The regex, of which its lines and marks below what is wrong are shown."""
    lines = [line for line in shown.split("\n") if line.strip(" ^")]
    found = _REGEX_LINE.match(lines[0]) if lines else None
    return found[1] if found is not None else ""


def _short(regex: str) -> str:
    return f"'{regex if len(regex) <= _QUOTED else regex[:_QUOTED] + '…'}'"


def _one_of(schemas: Iterable[Schema]) -> str:
    places = [path for schema in schemas for path, part in parts(schema) if "oneOf" in part]
    where = f" at {places[0][:100]}" if len(places) == 1 else ""
    return f"'oneOf'{where} is not supported where a value may fit several of its schemas; use 'anyOf'"

"""How large a grammar may be, whatever its notation, and how long it may take to compile. What is larger takes
seconds to compile, or memory that others need."""

from __future__ import annotations

from typing import Final

from banyan_runtime.grammar.errors import GrammarError

MAX_TEXT_BYTES: Final = 65_536  # of a schema or a grammar
MAX_TAG_BYTES: Final = 262_144  # of a structural tag, which may hold the schemas of many tools
MAX_REGEX_BYTES: Final = 2048
MAX_NESTING: Final = 64
MAX_PROPERTIES: Final = 1000
MAX_ALTERNATIVES: Final = 10_000
COMPILE_CPU_S: Final = 10  # of computing time


def check_text(text: str, what: str, most: int = MAX_TEXT_BYTES) -> None:
    """Raises GrammarError for text that is too long, and for what no text may hold."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise GrammarError(f"{what} has half of a surrogate pair, which no output can have.") from None
    if size > most:
        raise GrammarError(f"{what} has {size} bytes; at most {most} are allowed.")
    if "\0" in text:
        raise GrammarError(f"{what} has a NUL character, which no output can have.")


def check_count(number: int, what: str, most: int) -> None:
    """Raises GrammarError for more of something than a grammar may have."""
    if number > most:
        raise GrammarError(f"it has {number} {what}; at most {most} are allowed.")


def check_ebnf(text: str, what: str) -> None:
    """Raises GrammarError for one that is too large."""
    check_text(text, what)
    check_count(text.count("|") + 1, "alternatives", MAX_ALTERNATIVES)

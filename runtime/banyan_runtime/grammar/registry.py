"""The grammar backends by name. A backend's library is imported when it is chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from banyan_runtime.grammar.backend import Backend
from banyan_runtime.grammar.errors import GrammarError
from banyan_runtime.grammar.vocabulary import Vocabulary


def _llguidance(vocabulary: Vocabulary) -> Backend:
    from banyan_runtime.grammar.backends.llguidance import LlguidanceBackend

    return LlguidanceBackend(vocabulary)


def _xgrammar(vocabulary: Vocabulary) -> Backend:
    from banyan_runtime.grammar.backends.xgrammar import XgrammarBackend

    return XgrammarBackend(vocabulary)


BACKENDS: Final[Mapping[str, Callable[[Vocabulary], Backend]]] = {"llguidance": _llguidance, "xgrammar": _xgrammar}


def open_backend(name: str, vocabulary: Vocabulary) -> Backend:
    """The backend of that name. Raises GrammarError where its library is missing, or cannot read the vocabulary."""
    try:
        return BACKENDS[name](vocabulary)
    except ImportError as error:
        raise GrammarError(f"--grammar-backend {name} needs a library that is not installed: {error}.") from None

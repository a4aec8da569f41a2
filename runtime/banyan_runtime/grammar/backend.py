"""What a grammar backend is: it compiles grammars for one vocabulary, and its matchers follow outputs token by token.

Errors of a grammar, while it is compiled or used, are `GrammarError`s and concern its own request alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from banyan_runtime.wire import Grammar

Words = npt.NDArray[np.uint32]
"""Which token ids may come next, as bits: uint32[ceil(vocab_size / 32)], token t is bit t % 32 of word t // 32."""

Masks = npt.NDArray[np.uint32]
"""Of several outputs, contiguous: uint32[n, ceil(vocab_size / 32)]."""

SideBySide = Callable[[Sequence[tuple[Any, int]], Masks], None]
"""Computes what the library says of several outputs, on threads: of each pair's `Matcher.library` into that row. What goes wrong with one
is told when its mask is filled."""


class Matcher(Protocol):
    """Follows one output."""

    @property
    def library(self) -> Any:
        """What `SideBySide` computes the mask with; None where it takes no time, or nothing can."""
        ...

    def fill(self, words: Words, *, computed: bool = False) -> None:
        """Write which tokens may come next. Raises GrammarError, also when none may. `computed`: `words` has what the library says."""
        ...

    def accept(self, token_id: int) -> bool:
        """This one came. False: it may not, and nothing has changed. Raises GrammarError."""
        ...

    def rollback(self, tokens: int) -> None:
        """Forget the last ones that were accepted. Raises GrammarError for more than there were."""
        ...

    @property
    def is_completed(self) -> bool:
        """Whether the output may end here."""
        ...

    @property
    def is_terminated(self) -> bool:
        """Whether nothing may follow: it has ended, or only an end is possible."""
        ...

    def copy(self) -> Matcher:
        """Another one at the same place, which goes its own way."""
        ...


class Compiled(Protocol):
    """A grammar that is ready. Safe to use from several threads."""

    def matcher(self, stop_ids: Sequence[int]) -> Matcher:
        """At the beginning of an output. `stop_ids`: tokens that may end it once it is complete."""
        ...


class Backend(Protocol):
    """Compiles grammars for one vocabulary. Safe to use from several threads."""

    def compile(self, grammar: Grammar) -> Compiled:
        """Raises GrammarError, with a reason for the client, for a grammar that is wrong or cannot be enforced."""
        ...

    def side_by_side(self, threads: int) -> SideBySide | None:
        """None where it computes masks one after another. Raises GrammarError where there are no threads to be had."""
        ...

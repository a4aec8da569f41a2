"""What follows an output token by token: a grammar, or what stands before one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]
"""Which token ids may come next, as bits: uint32[ceil(vocab_size / 32)], token t is bit t % 32 of word t // 32."""

Masks = npt.NDArray[np.uint32]
"""Of several outputs, contiguous: uint32[n, ceil(vocab_size / 32)]."""

SideBySide = Callable[[Sequence[tuple[Any, int]], Masks], None]
"""Computes the masks of several outputs on threads: of each pair's `Matcher.library` into that row. An error of one shows when its mask is
filled."""


class Matcher(Protocol):
    """Follows one output."""

    @property
    def library(self) -> Any:
        """What `SideBySide` computes the mask with; None where there is nothing to compute, or it cannot."""
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

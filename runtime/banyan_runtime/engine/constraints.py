"""Requests whose output must obey a grammar: what the engine asks of grammars, and who waits for one that is being compiled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from banyan_runtime.grammar.errors import GrammarError
from banyan_runtime.step import I32, U32, Bool, TokenMask

if TYPE_CHECKING:
    from banyan_runtime.engine.request import Request
    from banyan_runtime.wire import Constraint


class Matcher(Protocol):
    """Follows one output."""

    def accept(self, token_id: int) -> bool:
        """This one came; False: it may not. Raises GrammarError."""
        ...

    @property
    def is_terminated(self) -> bool:
        """Whether nothing may follow."""
        ...


class Ticket(Protocol):
    """A grammar that was asked for."""

    def ready(self) -> Matcher | GrammarError | None:
        """None: not yet. Never waits."""
        ...


class Grammars(Protocol):
    """Compiles grammars beside the engine's loop, and wakes the loop when one is ready."""

    def request(self, constraint: Constraint, stop_ids: tuple[int, ...]) -> Ticket:
        """`stop_ids`: the tokens that end the output once the grammar lets it end."""
        ...

    def fill(self, matchers: Sequence[Any], words: U32) -> list[GrammarError | None]:
        """Write which token ids may come next in each output, whose matchers came from here: uint32[n, ceil(vocab_size / 32)], as in
        `step.TokenMask`. Returns the errors; their rows mean nothing."""
        ...


class Pending:
    """Requests that are held until their grammars are ready."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._waiting: list[tuple[Request, Ticket]] = []

    def ask(self, request: Request, constraint: Constraint) -> None:
        self._waiting.append((request, self._grammars.request(constraint, request.sampling.stop_token_ids)))

    def decided(self) -> Iterator[tuple[Request, Matcher | GrammarError]]:
        """Those that need not wait any longer, each once; who ended meanwhile is forgotten."""
        if not self._waiting:
            return
        still: list[tuple[Request, Ticket]] = []
        done: list[tuple[Request, Matcher | GrammarError]] = []
        for request, ticket in self._waiting:
            if request.over:
                continue
            answer = ticket.ready()
            if answer is None:
                still.append((request, ticket))
            else:
                done.append((request, answer))
        self._waiting = still
        yield from done


def masks_of(requests: Sequence[Request], indices: list[int], young: Bool, vocab_size: int, grammars: Grammars | None) -> TokenMask | None:
    """What those at `indices` may generate next. One whose grammar fails may generate nothing, so that it fails alone.

    `young`: who has fewer tokens than were asked for at least. They may not stop, unless their grammar admits nothing else.
    """
    if not indices:
        return None
    words: U32 = np.empty((len(indices), -(-vocab_size // 32)), dtype=np.uint32)
    masks = np.full(len(requests), -1, dtype=np.int32)
    assert grammars is not None, "who has a matcher has it from there"
    matchers = [matcher for index in indices if (matcher := requests[index].matcher) is not None]
    for place, (index, error) in enumerate(zip(indices, grammars.fill(matchers, words), strict=True)):
        masks[index] = place
        requests[index].trouble = ""  # of a step whose result was not waited for
        if error is not None:
            requests[index].trouble = str(error)
            words[place] = 0
        if young[index]:
            _keep_going(words[place], requests[index].stop_ids)
    return TokenMask(words, masks)


def _keep_going(words: U32, stop_ids: I32) -> None:
    """Take the stop ids out of a mask, where anything else is left."""
    longer = words.copy()
    np.bitwise_and.at(longer, stop_ids >> 5, ~(np.uint32(1) << (stop_ids & 31).astype(np.uint32)))
    if longer.any():
        words[:] = longer

"""Grammars compiled on trial, where nobody waits but who brought them: what fails here, or is slow, never reaches the engine."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Final

import numpy as np

from banyan_runtime.grammar.errors import GrammarError
from banyan_runtime.grammar.llguidance import LlguidanceBackend, LlguidanceCompiled
from banyan_runtime.wire import Grammar

KEPT: Final = 1024  # verdicts
KEPT_BYTES: Final = 4 << 20  # of the grammars that they are on
MASKS: Final = 4  # the first ones of an output are the slowest
MASK_CPU_S: Final = 0.25  # that one may take: all others wait for it in the engine


def try_out(compiled: LlguidanceCompiled, vocab_size: int) -> None:
    """Begin an output. Raises GrammarError for a grammar that admits none, or whose masks take too long."""
    words = np.zeros(-(-vocab_size // 32), dtype=np.uint32)
    matcher = compiled.matcher((0,))
    for _ in range(MASKS):
        begun = time.thread_time()
        matcher.fill(words)
        if (taken := time.thread_time() - begun) > MASK_CPU_S:
            raise GrammarError(f"it is too complex: finding the tokens that may come next takes {taken:.1f} s.")
        word = int(np.flatnonzero(words)[0])
        bits = int(words[word])
        matcher.accept(word * 32 + (bits & -bits).bit_length() - 1)
        if matcher.is_terminated:
            break


class Trial:
    """Remembers its verdicts. For one thread."""

    def __init__(self, backend: LlguidanceBackend, vocab_size: int) -> None:
        self._backend = backend
        self._vocab_size = vocab_size
        self._verdicts: OrderedDict[Grammar, str] = OrderedDict()  # the one used last comes last; "": it can be used
        self._bytes = 0

    def knows(self, grammar: Grammar) -> bool:
        return grammar in self._verdicts

    def check(self, grammar: Grammar) -> None:
        """Raises GrammarError for one that cannot be used."""
        verdict = self._verdicts.get(grammar)
        if verdict is None:
            verdict = self._verdicts[grammar] = self._tried(grammar)
            self._bytes += len(grammar.text)
            while len(self._verdicts) > KEPT or self._bytes > KEPT_BYTES:
                oldest, _ = self._verdicts.popitem(last=False)
                self._bytes -= len(oldest.text)
        else:
            self._verdicts.move_to_end(grammar)
        if verdict:
            raise GrammarError(verdict)

    def _tried(self, grammar: Grammar) -> str:
        try:
            try_out(self._backend.compile(grammar), self._vocab_size)
        except GrammarError as error:
            return str(error) or "it cannot be used."
        return ""

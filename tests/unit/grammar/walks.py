"""Outputs of grammars: walks through masks, of tokens that chance chooses."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import tokenizers

from banyan_runtime.grammar.llguidance import LlguidanceBackend
from banyan_runtime.grammar.matcher import Matcher
from banyan_runtime.grammar.vocabulary import Vocabulary
from banyan_runtime.wire import Grammar

CLOSERS = '"}],:0'  # what brings JSON to an end, in this order of liking


def words(vocabulary: Vocabulary) -> np.ndarray:
    return np.zeros(-(-vocabulary.size // 32), dtype=np.uint32)


@dataclass(frozen=True)
class Language:
    """A tokenizer, and a backend for it."""

    vocabulary: Vocabulary
    backend: LlguidanceBackend
    tokenizer: tokenizers.Tokenizer
    eos: int

    @staticmethod
    def load(folder: Path, *, eos: str | None = None, padding: int = 0) -> Language:
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        if eos is None:
            named = json.loads((folder / "tokenizer_config.json").read_text())["eos_token"]
            eos = named if isinstance(named, str) else named["content"]
        eos_id = tokenizer.token_to_id(eos)
        size = Vocabulary.load(folder, 0, ()).size + padding
        vocabulary = Vocabulary.load(folder, size, [eos_id])
        return Language(vocabulary, LlguidanceBackend(vocabulary), tokenizer, eos_id)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def text(self, ids: Iterable[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)

    def matcher(self, grammar: Grammar, stops: Iterable[int] | None = None) -> Matcher:
        """Raises GrammarError."""
        return self.backend.compile(grammar).matcher((self.eos,) if stops is None else tuple(stops))

    def admitted(self, matcher: Matcher) -> np.ndarray:
        """The ids that may come next."""
        mask = words(self.vocabulary)
        matcher.fill(mask)
        return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))

    def follow(self, matcher: Matcher, text: str) -> str:
        """As much of `text` as the matcher takes. Mask and `accept` must agree about each token."""
        ids = self.ids(text)
        for place, token_id in enumerate(ids):
            may = token_id in self.admitted(matcher)
            assert matcher.accept(token_id) == may, (text, place, token_id)
            if not may:
                return self.text(ids[:place])
        return text

    def takes(self, grammar: Grammar, text: str) -> bool:
        """Whether `text` is a whole output."""
        matcher = self.matcher(grammar)
        return self.follow(matcher, text) == text and matcher.is_completed

    def walk(self, matcher: Matcher, dice: Random, *, free: int = 40, most: int = 400) -> tuple[list[int], bool]:
        """The ids of one output, and whether it came to its end: after `free` steps what closes JSON is preferred, after `most`
        it is given up."""
        ids: list[int] = []
        closers = [self.tokenizer.token_to_id(sign) for sign in CLOSERS]
        while not matcher.is_terminated and len(ids) < most:
            admitted = self.admitted(matcher)
            if self.eos in admitted and (len(admitted) == 1 or len(ids) >= free or dice.random() < 0.3):
                assert matcher.is_completed
                assert matcher.accept(self.eos)
                break
            token_id = int(dice.choice(admitted[admitted != self.eos]))
            if len(ids) >= free:
                token_id = next((closer for closer in closers if closer in admitted), token_id)
            assert matcher.accept(token_id), (self.text(ids), token_id)
            ids.append(token_id)
        return ids, matcher.is_completed

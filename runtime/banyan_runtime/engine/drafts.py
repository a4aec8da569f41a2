"""Drafts: what a request will say next, guessed from its own text. The step that computes its last token computes the guesses as
well, and draws a token behind each; those up to the first wrong guess are what it would have said anyway, for one reading of the
weights (`--speculative-algorithm NGRAM`).

A guess is what followed when the text's last tokens stood in it before, prompt or output; of several such places the one with the
longest match, of equal ones the latest. How often such guesses were right is known for every request even while it drafts nothing,
for each guess is compared with what comes, computed or not. How much another token in a step costs is learnt from the steps. A guess
is computed where it is likely enough to pay for that: at one stream nearly always, in a large batch only in text that is sure to
repeat itself, in free text not at all.

Who gets no drafts: requests with penalties, since each guess would change the odds of the next; and with grammars, since a mask
would be needed behind each guess, and matchers cannot go back.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from banyan_runtime.engine.memory.tables import Tables
from banyan_runtime.engine.step_cost import StepCost
from banyan_runtime.step import I32, MOST_GUESSES

if TYPE_CHECKING:
    from banyan_runtime.engine.request import Request

SIZES: Final = (12, 6, 3, 2)  # tokens of a match that are looked up, longest first
EXPECTED: Final = (0.8, 0.6, 0.4, 0.2)  # by SIZES, of guesses that are right, where nothing is known of a text
FIRST_BUCKETS: Final = 1 << 10
MOST_BUCKETS: Final = 1 << 17  # of 4 bytes; beyond some 30,000 tokens the earliest are forgotten
MOST_FILLED: Final = 0.75  # of the buckets, before there are more of them: what falls into one bucket hides what was there
EXPECTED_WEIGHT: Final = 2.0  # guesses that what is expected counts for
MEMORY: Final = 0.9  # of what earlier guesses count for, for each step with another: what a text does changes
MARGIN: Final = 1.2  # by which a guess must be worth more than it costs

_WORD: Final = (1 << 64) - 1
_BASE: Final = 0x9E3779B97F4A7C15
_SPREAD: Final = 0xD6E8FEB86659FD93
_POWERS: Final = tuple(pow(_BASE, size, 1 << 64) for size in SIZES)


class Text:
    """What one request was told and has said, with an index of its matches. A token more costs the same whatever its length; memory
    is at most 4 * MOST_BUCKETS bytes."""

    __slots__ = ("_buckets", "_guess", "_hashes", "_hits", "_length", "_shift", "_size", "_trials")

    def __init__(self) -> None:
        self._length = 0
        self._hashes = [0] * len(SIZES)  # of the last tokens
        self._grow(FIRST_BUCKETS)
        self._guess: list[int] = []  # of what follows the known tokens
        self._size = 0  # which of SIZES it was found by
        self._hits = [part * EXPECTED_WEIGHT for part in EXPECTED]
        self._trials = [EXPECTED_WEIGHT] * len(SIZES)

    def follow(self, tokens: I32, length: int) -> None:
        """`tokens` [>= length] are known up to `length` now; those known before are as they were."""
        new = tokens[self._length : length]
        if not len(new):
            return
        self._judge(new[: len(self._guess)].tolist())
        if length * len(SIZES) > MOST_FILLED * len(self._buckets) < MOST_FILLED * MOST_BUCKETS:
            wanted = int(length * len(SIZES) / MOST_FILLED)
            self._grow(min(1 << wanted.bit_length(), MOST_BUCKETS))
            self._length = 0
        if length - self._length > 4 * max(SIZES):
            self._index(tokens, length)
        else:
            self._append(tokens, length)
        self._length = length
        self._guess = []

    def guess(self, tokens: I32, count: int) -> list[int]:
        """At most `count` tokens that may come next; as many or none. To be asked once for each length."""
        end = self._length
        for index, size in enumerate(SIZES):
            if end <= size:
                continue
            place = self._buckets[self._bucket(index)]
            if place >= size and tokens[place - size : place].tobytes() == tokens[end - size : end].tobytes():
                found = tokens[place : min(place + count, end)].tolist()
                # a text that runs on in a circle goes on so
                self._guess = [found[at % len(found)] for at in range(count)] if len(found) < count else found
                self._size = index
                return self._guess
        return []

    @property
    def trust(self) -> float:
        """The part of such guesses as the last one that were right, of those that the text was right up to; over 0 and under 1."""
        return self._hits[self._size] / self._trials[self._size]

    def _judge(self, came: list[int]) -> None:
        """Compare the guess with what came."""
        if not came:
            return
        right = 0
        while right < len(came) and came[right] == self._guess[right]:
            right += 1
        tried = min(right + 1, len(came))
        index = self._size
        floor = (1 - MEMORY) * EXPECTED_WEIGHT  # so that what nothing is known of keeps its weight
        self._hits[index] = MEMORY * self._hits[index] + right + floor * EXPECTED[index]
        self._trials[index] = MEMORY * self._trials[index] + tried + floor

    def _bucket(self, index: int) -> int:
        """Where matches like the last tokens are noted: the place behind the latest one."""
        return (self._hashes[index] * _SPREAD & _WORD) >> self._shift

    def _append(self, tokens: I32, length: int) -> None:
        """Note each match once it is known what follows it."""
        hashes, buckets = self._hashes, self._buckets
        start = max(0, self._length - max(SIZES))
        window = tokens[start:length].tolist()
        for end in range(self._length, length):
            token = window[end - start] + 1
            for index, size in enumerate(SIZES):
                if end >= size:
                    buckets[self._bucket(index)] = end
                    left = window[end - size - start] + 1
                    hashes[index] = (hashes[index] * _BASE + token - left * _POWERS[index]) & _WORD
                else:
                    hashes[index] = (hashes[index] * _BASE + token) & _WORD

    def _index(self, tokens: I32, length: int) -> None:
        """As `_append`, for many tokens at once."""
        begin = max(0, self._length - max(SIZES))
        text = tokens[begin:length].astype(np.uint64) + np.uint64(1)
        buckets: I32 = np.frombuffer(self._buckets, dtype=np.int32)
        for index, size in enumerate(SIZES):
            ends = len(text) - size + 1
            hashes: npt.NDArray[np.uint64] = np.zeros(ends, dtype=np.uint64)
            for offset in range(size):
                hashes = hashes * np.uint64(_BASE) + text[offset : offset + ends]
            places = (hashes[:-1] * np.uint64(_SPREAD)) >> np.uint64(self._shift)
            buckets[places] = np.arange(begin + size, length, dtype=np.int32)  # of equal ones the last stays
            self._hashes[index] = int(hashes[-1])

    def _grow(self, size: int) -> None:
        """To so many buckets, all empty."""
        self._buckets = array("i", bytes(4 * size))
        self._shift = 64 - (size.bit_length() - 1)


class Drafts:
    """Chooses what a decode step computes beside the last token of each request; `most`: tokens of a request in a step, that one
    included."""

    def __init__(self, most: int) -> None:
        self._most = most - 1
        self._cost = StepCost()

    def propose(self, requests: Sequence[Request], rows: I32, tables: Tables) -> list[list[int]] | None:
        """The guesses to compute for each request, never more than it may still say beside one; None: nobody has any."""
        guesses, trusts, most = list[list[int]](), list[float](), list[int]()
        for request, row, length in zip(requests, rows.tolist(), tables.length[rows].tolist(), strict=True):
            if request.text is None and not request.penalised and request.matcher is None:
                request.text = Text()
            if request.text is None:
                guess, trust = list[int](), 0.0
            else:
                tokens = tables.tokens[row]
                request.text.follow(tokens, length)
                guess, trust = request.text.guess(tokens, self._most), request.text.trust
            guesses.append(guess)
            trusts.append(trust)
            most.append(min(len(guess), max(0, room_for(request, length))))
        if not any(most):
            return None
        counts = worth_computing(trusts, most, self._cost.weights_worth())
        return [guess[:count] for guess, count in zip(guesses, counts, strict=True)] if any(counts) else None

    def learn(self, tokens: int, seconds: float) -> None:
        """A decode step with so many tokens took so long."""
        self._cost.learn(tokens, seconds)


def worth_computing(trusts: Sequence[float], most: Sequence[int], weights_worth: float) -> list[int]:
    """How many guesses of each row to compute, so that a step gives the most tokens for its time; MOST_GUESSES at most.

    trusts: how likely a guess of the row is right if those before it are; most: how many it has. `weights_worth` as in `StepCost`.
    """
    rows = len(trusts)
    # the odds of each guess of each row, most likely first; in a row each is less likely than the one before
    odds = np.asarray(trusts, dtype=np.float64)[:, np.newaxis] ** np.arange(1, max(most, default=0) + 1)
    odds[np.arange(odds.shape[1]) >= np.asarray(most)[:, np.newaxis]] = 0.0
    order = np.argsort(-odds, axis=None, kind="stable")
    best = odds.ravel()[order]
    given = rows + np.cumsum(best) - best  # tokens that the step gives before this one
    cost = weights_worth + rows + np.arange(len(best))
    pays = best * cost > given * MARGIN  # more for its cost than those before; once one does not, none does
    count = min(MOST_GUESSES, len(best) if pays.all() else int(pays.argmin()))
    counts: list[int] = np.bincount(order[:count] // odds.shape[1], minlength=rows).tolist()
    return counts


def room_for(request: Request, length: int) -> int:
    """How many guesses `request` has use for behind `length` tokens: one token comes without any. Stop ids that it may not say yet
    are forbidden in a whole step or not at all."""
    room = request.prompt_len + request.max_new - length
    stops_from = request.prompt_len + request.sampling.min_new_tokens
    if len(request.stop_ids) and length < stops_from:
        room = min(room, stops_from - length)
    return room - 1

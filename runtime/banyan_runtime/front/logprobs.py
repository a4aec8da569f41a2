"""Log probabilities of tokens: out of the wire's columns, and into the words of each answer.

A token is shown as its own bytes (`bytes`) and as these bytes read as UTF-8, where a part of a character becomes U+FFFD. Every
token that the usage counts has its entry: the stop token too, the tokens of a stop string that was cut off, and those that a
parser moved into the reasoning.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from banyan_runtime import wire
from banyan_runtime.front.text.tokenizer import Tokenizer

FLOOR: Final = -9999.0
"""Stands for anything less likely, minus infinity included, which JSON does not have."""


class TokenLogprob(NamedTuple):
    token_id: int
    logprob: float | None  # None: nothing comes before it (the first token of a prompt)
    top: Sequence[tuple[int, float]]  # the likeliest tokens at its place, likeliest first; may be more than were asked for


def unpack(columns: wire.LogprobColumns, token_ids: Sequence[int]) -> list[TokenLogprob]:
    """The columns of `token_ids`, token by token. Raises ValueError when the lengths differ."""
    values = _floats(columns.values)
    if not columns.width:
        return [TokenLogprob(token_id, value, ()) for token_id, value in zip(token_ids, values, strict=True)]
    tops = list(zip(wire.unpack_ids(columns.top_ids).tolist(), _floats(columns.top_values), strict=True))
    rows = (tops[start : start + columns.width] for start in range(0, len(tops), columns.width))
    return [TokenLogprob(token_id, value, row) for token_id, value, row in zip(token_ids, values, rows, strict=True)]


def _floats(raw: bytes) -> list[float]:
    values: list[float] = np.nan_to_num(np.frombuffer(raw, dtype="<f4"), nan=FLOOR, posinf=0.0, neginf=FLOOR).clip(min=FLOOR).tolist()
    return values


class PromptTokens:
    """The tokens of a prompt from position `first` on, which an answer tells with their log probabilities.

    Holds their ids, which the wire does not repeat. The first of them has no value: in a prompt nothing comes before position 0,
    and SGLang's `logprob_start_len` names the place that is told of, not the first that is scored.
    """

    def __init__(self, token_ids: bytes, first: int) -> None:
        self._first = first
        self._ids: list[int] = wire.unpack_ids(token_ids)[first:].tolist()

    def scored(self, parts: Iterable[wire.PromptLogprobs]) -> list[TokenLogprob]:
        """Put together what the chunks of the prompt brought."""
        rows = [TokenLogprob(token_id, None, ()) for token_id in self._ids]
        for part in parts:
            before = max(self._first - part.start, 0)  # scored, but not told of
            start, count = part.start + before - self._first, len(part.columns.values) // 4
            found = self._ids[start : start + count - before]
            rows[start : start + len(found)] = unpack(part.columns, [0] * before + found)[before:]
        if rows:
            rows[0] = TokenLogprob(self._ids[0], None, ())
        return rows


def chat_content(tokenizer: Tokenizer, logprobs: Iterable[TokenLogprob], top: int) -> list[dict[str, Any]]:
    """`choices[].logprobs.content` of chat completions, with the `top` likeliest tokens beside each."""

    def entry(token_id: int, logprob: float | None) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token_id)
        return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}

    return [
        {**entry(one.token_id, one.logprob), "top_logprobs": [entry(token_id, value) for token_id, value in one.top[:top]]}
        for one in logprobs
    ]


def completion_columns(tokenizer: Tokenizer, logprobs: Iterable[TokenLogprob], top: int, offset: int) -> tuple[dict[str, Any], int]:
    """`choices[].logprobs` of completions, and the offset of the token after these. `offset`: characters of all tokens before.

    `top_logprobs` of a token holds the `top` likeliest and itself; of tokens with the same text the likeliest one.
    """
    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for one in logprobs:
        text = tokenizer.token_text(one.token_id)
        tokens.append(text)
        values.append(one.logprob)
        tops.append(None if one.logprob is None else _by_text(tokenizer, [(one.token_id, one.logprob), *one.top[:top]]))
        offsets.append(offset)
        offset += len(text)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}, offset


def _by_text(tokenizer: Tokenizer, pairs: Iterable[tuple[int, float]]) -> dict[str, float]:
    """Likeliest first."""
    found: dict[str, float] = {}
    for token_id, value in sorted(pairs, key=lambda pair: -pair[1]):
        found.setdefault(tokenizer.token_text(token_id), value)
    return found


def native_rows(tokenizer: Tokenizer | None, logprobs: Iterable[TokenLogprob]) -> list[list[Any]]:
    """`meta_info.output_token_logprobs` and its like: [logprob, id, text]. The text is null without a tokenizer."""
    return [_native(tokenizer, one.token_id, one.logprob) for one in logprobs]


def native_tops(tokenizer: Tokenizer | None, logprobs: Iterable[TokenLogprob], top: int) -> list[list[list[Any]] | None]:
    """`meta_info.output_top_logprobs` and its like: the likeliest tokens at each place; null where the token itself has none."""
    return [None if one.logprob is None else [_native(tokenizer, token_id, value) for token_id, value in one.top[:top]] for one in logprobs]


def _native(tokenizer: Tokenizer | None, token_id: int, logprob: float | None) -> list[Any]:
    return [logprob, token_id, None if tokenizer is None else tokenizer.token_text(token_id)]

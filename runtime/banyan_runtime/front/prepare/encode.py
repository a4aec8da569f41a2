"""Tokens of a prompt that is text. One that is far too long is found out by its beginning: tokenizing all of it takes seconds."""

from __future__ import annotations

from typing import Final

from banyan_runtime.front.prepare.prompts import too_long
from banyan_runtime.front.prepare.sequences import Served
from banyan_runtime.front.text.tokenizer import Tokenizer

LONG: Final = 8  # characters for each token that fits: text has about four, so what fits is nearly always shorter
BORDER: Final = 1024  # tokens at the cut through a text that may not be those of the whole


def encode(served: Served, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
    """Token ids of one prompt. Raises ApiError context_length_exceeded, and where no tokenizer is loaded."""
    info = served.info
    ids, certain = beginning(served.text.needed_tokenizer, text, info.max_req_input_len, add_special_tokens=add_special_tokens)
    if certain < len(ids):
        raise too_long(certain, info, param, "at least ")
    return ids


def beginning(tokenizer: Tokenizer, text: str, enough: int, *, add_special_tokens: bool) -> tuple[list[int], int]:
    """Token ids of a text, and how many of them are certain: all, except where it has far more than `enough` tokens. Then only
    a beginning is tokenized, with more than so many that are certain."""
    size = LONG * max(enough, BORDER)
    while size < len(text):
        ids = tokenizer.encode(text[:size], add_special_tokens=add_special_tokens)
        if len(ids) - BORDER > enough:
            return ids, len(ids) - BORDER
        size *= 2  # long runs of one character make few tokens
    ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return ids, len(ids)


def ending(tokenizer: Tokenizer, text: str, enough: int) -> list[int]:
    """The last `enough` token ids of a text, or all of them where there are fewer; no special ones are added."""
    size = LONG * max(enough, BORDER)
    while size < len(text):
        ids = tokenizer.encode(text[-size:], add_special_tokens=False)
        if len(ids) - BORDER > enough:
            break
        size *= 2
    else:
        ids = tokenizer.encode(text, add_special_tokens=False)
    return ids[max(0, len(ids) - enough) :]

"""The bytes behind every token id, so that text can be streamed without decoding anything twice.

A byte-level vocabulary spells bytes as the printable characters of GPT-2's table; a SentencePiece one writes a space as `▁`
and unknown bytes as `<0xNN>`. Any other kind of vocabulary has no such table and is decoded over a window of tokens.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import tokenizers

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CHECKED_SEQUENCES: Final = 200


def _byte_level_table() -> dict[int, str]:
    """GPT-2's alphabet, inverted: code point of the printable character → the character of its byte in Latin-1."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table.update({256 + position: chr(byte) for position, byte in enumerate(others)})
    return table


_BYTE_LEVEL: Final = _byte_level_table()


def _byte_level_piece(piece: str) -> bytes:
    try:
        return piece.translate(_BYTE_LEVEL).encode("latin-1")
    except UnicodeEncodeError:  # a character outside the alphabet stands for itself
        return b"".join(_BYTE_LEVEL[ord(char)].encode("latin-1") if ord(char) in _BYTE_LEVEL else char.encode() for char in piece)


def _sentencepiece_piece(piece: str) -> bytes:
    if match := _BYTE_TOKEN.fullmatch(piece):
        return bytes([int(match[1], 16)])
    return piece.replace("▁", " ").encode()


def _kinds(decoder: Any) -> set[str]:
    """The types named by the `decoder` of a tokenizer.json."""
    if not isinstance(decoder, dict):
        return set()
    return {str(decoder.get("type"))}.union(*(_kinds(part) for part in decoder.get("decoders", ())))


def token_bytes(backend: tokenizers.Tokenizer, decoder: Any, vocabulary: Mapping[str, int], added: Mapping[str, int]) -> list[bytes] | None:
    """The bytes of each token id, b"" for a gap; None where the vocabulary does not have this form.

    `decoder` is that entry of tokenizer.json. The table is compared with the library's own decoding before it is trusted.
    """
    kinds = _kinds(decoder)
    if "ByteLevel" in kinds:
        spell = _byte_level_piece
    elif kinds & {"ByteFallback", "Metaspace"} and "WordPiece" not in kinds:
        spell = _sentencepiece_piece
    else:
        return None
    table = [b""] * (1 + max(vocabulary.values(), default=-1))
    for piece, token_id in vocabulary.items():
        table[token_id] = spell(piece)
    for content, token_id in added.items():  # a byte-level decoder leaves these alone, a SentencePiece one does not
        table[token_id] = content.encode() if spell is _byte_level_piece else spell(content)
    return table if _agrees(backend, table) else None


def _agrees(backend: tokenizers.Tokenizer, table: Sequence[bytes]) -> bool:
    """Whether joining bytes gives what the library decodes, for sequences whose bytes are valid UTF-8."""
    dice = random.Random(0)
    checked = 0
    for _ in range(20 * _CHECKED_SEQUENCES):
        ids = [token_id for token_id in dice.sample(range(len(table)), min(6, len(table))) if table[token_id]]
        try:
            ours = b"".join(table[token_id] for token_id in ids).decode()
        except UnicodeDecodeError:
            continue
        # A leading space may be the vocabulary's dummy prefix, which the library strips and a continuation keeps.
        if ours.lstrip(" ") != backend.decode(ids, skip_special_tokens=False).lstrip(" "):
            return False
        checked += 1
        if checked == _CHECKED_SEQUENCES:
            break
    return checked > 0

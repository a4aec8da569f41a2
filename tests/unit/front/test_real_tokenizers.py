"""Text of real families' tokens, piece by piece: never half a character, and what the library makes of all of them at once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Final

import pytest
import tokenizers

from banyan_runtime.front.text.tokenizer import Tokenizer
from tests.unit.front import real

_BLOCKS: Final = (  # first and last code point
    (0x20, 0x7E), (0xA0, 0x24F), (0x300, 0x36F), (0x370, 0x52F), (0x531, 0x586), (0x5D0, 0x5EA), (0x621, 0x64A), (0x904, 0x939),
    (0x985, 0x9B9), (0xB85, 0xBB9), (0xE01, 0xE3A), (0xF40, 0xF6C), (0x1000, 0x102A), (0x10D0, 0x10FA), (0x1200, 0x1248),
    (0x1780, 0x17B3), (0x2000, 0x206F), (0x2190, 0x21FF), (0x3041, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0xFF01, 0xFF5E),
    (0x10330, 0x1034A), (0x12000, 0x1202F), (0x1D400, 0x1D454), (0x1F300, 0x1F5FF), (0x1F600, 0x1F64F), (0x1F900, 0x1F9FF),
    (0x20000, 0x2A6DF), (0xE000, 0xE01F), (0x1, 0x1F),
)  # fmt: skip
_WHOLE: Final = (
    "👨‍👩‍👧‍👦", "🏳️‍🌈", "👩🏽‍🚀", "🇨🇿🇯🇵", "1️⃣", "🏴󠁧󠁢󠁷󠁬󠁳󠁿", "é", "क्षि", "ก็้", "Příliš žluťoučký kůň", "中文和English", "مرحبا بالعالم",
    "שָׁלוֹם", "👋🏿 hi", "한국어", "日本語、です。", "நிஜமாக", "  \t\n\n ", "…", "�", "é́́", "\u200b\ufeff", "def f(x):\n\treturn 1",
)  # fmt: skip
TEXTS: Final = 1000


def strings(number: int) -> Iterator[str]:
    """Texts that mix scripts, emoji sequences, marks and blanks."""
    dice = random.Random(0)
    for _ in range(number):
        parts: list[str] = []
        for _ in range(dice.randrange(1, 5)):
            first, last = dice.choice(_BLOCKS)
            parts.append("".join(chr(dice.randint(first, last)) for _ in range(dice.randrange(1, 9))))
            parts.append(dice.choice((*_WHOLE, " ", "")))
        yield "".join(parts)


@pytest.fixture(scope="module", params=real.families(real.NAMES))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def tokenizer(name: str) -> Tokenizer:
    return real.text(name).needed_tokenizer


@pytest.fixture(scope="module")
def library(name: str) -> tokenizers.Tokenizer:
    """The same tokenizer.json as the library alone reads it."""
    return tokenizers.Tokenizer.from_file(str(real.folder(name) / "tokenizer.json"))


def streamed(tokenizer: Tokenizer, ids: list[int], *, skip: bool = False) -> str:
    """The text, given out id by id: no piece holds half a character, and at most three bytes are held back."""
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
    pieces: list[str] = []
    owed = 0  # bytes that came and have not been given out, at most: U+FFFD has three, and stands for no more
    for token_id in ids:
        piece = detokenizer.feed([token_id])
        piece.encode()  # no half of a surrogate pair
        owed += 0 if skip and token_id in tokenizer.special_ids else len(tokenizer.token_bytes(token_id))
        owed -= len(piece.encode())
        assert owed <= 3
        pieces.append(piece)
    return "".join([*pieces, detokenizer.finish()])


def cut(tokenizer: Tokenizer, ids: list[int], dice: random.Random) -> str:
    """The text, given out several ids at a time."""
    detokenizer = tokenizer.detokenizer(skip_special_tokens=False)
    pieces: list[str] = []
    while ids:
        size = dice.randint(1, 5)
        pieces.append(detokenizer.feed(ids[:size]))
        ids = ids[size:]
    return "".join([*pieces, detokenizer.finish()])


@pytest.mark.matrix(gate=1)
def test_text_in_any_language_comes_whole_and_as_the_library_decodes_it(tokenizer: Tokenizer, library: tokenizers.Tokenizer) -> None:
    dice = random.Random(1)
    assert tokenizer.has_bytes
    for text in strings(TEXTS):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == library.encode(text, add_special_tokens=False).ids
        expected = library.decode(ids, skip_special_tokens=False)
        assert streamed(tokenizer, ids) == expected
        assert cut(tokenizer, ids, dice) == expected == tokenizer.decode(ids, skip_special_tokens=False)


def test_a_text_that_breaks_off_within_a_character_ends_in_one_replacement_at_most(tokenizer: Tokenizer) -> None:
    dice = random.Random(2)
    for text in strings(200):
        ids = tokenizer.encode(text.replace("�", ""), add_special_tokens=False)
        ids = ids[: dice.randint(0, len(ids))]
        found = streamed(tokenizer, ids)
        assert "�" not in found[:-1]
        assert found == b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", "replace")


def test_a_continuation_of_half_a_character_gives_out_nothing_of_the_prompt(tokenizer: Tokenizer) -> None:
    """A prompt of token ids may end anywhere; what follows is decoded by itself."""
    for text in strings(100):
        ids = tokenizer.encode(text, add_special_tokens=False)
        for at in range(1, len(ids)):
            expected = b"".join(map(tokenizer.token_bytes, ids[at:])).decode("utf-8", "replace")
            assert streamed(tokenizer, ids[at:]) == expected


def streams(tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Ids that no text would have: any, lone bytes, beside the vocabulary, U+FFFD, outside of it, and all of these mixed."""
    dice = random.Random(3)
    size = tokenizer.size
    single = [token_id for token_id in range(size) if len(tokenizer.token_bytes(token_id)) == 1]
    broken = [token_id for token_id in dice.sample(range(size), 20_000) if not _is_text(tokenizer.token_bytes(token_id))]
    replacements = [token_id for token_id in range(size) if "�" in tokenizer.token_bytes(token_id).decode("utf-8", "ignore")]
    added = list(tokenizer.added.values())
    assert len(single) >= 128
    assert replacements
    kinds = [range(size), single, single, broken or single, added or single, replacements, [size, size + 7, 1 << 40, -1]]
    for kind in kinds:
        for _ in range(40):
            yield [dice.choice(kind) for _ in range(dice.randrange(1, 24))]
    for _ in range(200):
        yield [dice.choice(dice.choice(kinds)) for _ in range(dice.randrange(1, 24))]
    yield [replacements[0]] * 4000


def _is_text(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_whatever_ids_come_the_pieces_make_the_text_of_all_at_once(tokenizer: Tokenizer, library: tokenizers.Tokenizer) -> None:
    dice = random.Random(4)
    compared = 0
    for ids in streams(tokenizer):
        pieces = [tokenizer.token_bytes(token_id) for token_id in ids]
        whole = tokenizer.decode(ids, skip_special_tokens=False)
        assert whole == b"".join(pieces).decode("utf-8", "replace")
        assert streamed(tokenizer, ids) == cut(tokenizer, ids, dice) == whole
        spoken = [piece for token_id, piece in zip(ids, pieces, strict=True) if token_id not in tokenizer.special_ids]
        assert streamed(tokenizer, ids, skip=True) == b"".join(spoken).decode("utf-8", "replace")
        if _is_text(b"".join(pieces)) and all(0 <= token_id < tokenizer.size for token_id in ids):
            assert whole == library.decode(ids, skip_special_tokens=False)
            compared += 1
    assert compared > 50


def test_the_bytes_of_tokens_beside_their_probabilities_make_the_text(tokenizer: Tokenizer) -> None:
    for text in strings(100):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == tokenizer.decode(ids, skip_special_tokens=False)

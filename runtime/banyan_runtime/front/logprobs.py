"""Log probabilities of tokens: out of the wire's columns, and into the words of each answer.

They stay packed until they are written: a token with twenty others beside it is 168 bytes, as objects it would be ten thousand.
They are written slice by slice, straight into JSON, so that whoever writes many can let others go first.

A token is shown as its own bytes (`bytes`) and as these bytes read as UTF-8, where a part of a character becomes U+FFFD. Completions
have no place for the bytes, so there such a token is written as OpenAI writes it: `bytes:\\xf0\\x9f`. Every
token that the usage counts has its entry: the stop token too, the tokens of a stop string that was cut off, and those that a
parser moved into the reasoning.
"""

from __future__ import annotations

import codecs
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from banyan_runtime import wire
from banyan_runtime.front.text.tokenizer import Tokenizer

FLOOR: Final = -9999.0
"""Stands for anything less likely, minus infinity included, which JSON does not have."""
SLICE: Final = 512
"""Cells that are written at a time: less than a millisecond's work."""
_REMEMBERED: Final = 65_536  # tokens whose JSON is kept
_AS_THEY_ARE: Final = frozenset(map(chr, range(0x20, 0x7F))) - {"\\"}  # beside bytes that are written as \xf0
_to_json: Final = msgspec.json.Encoder().encode

Row = bytes
"""A token and the likeliest ones at its place, likeliest first, perhaps more than were asked for, and last those that its request
named: the ids of them all (int32), then their log probabilities (float32)."""


def mean_of(rows: Sequence[Row]) -> float:
    """The mean log probability of tokens; that of none is 0."""
    values = [np.frombuffer(row, dtype="<f4", count=1, offset=len(row) // 2)[0] for row in rows]
    return float(np.mean(values)) if values else 0.0


def rows_of(columns: wire.LogprobColumns, token_ids: Sequence[int]) -> list[Row]:
    """The columns of `token_ids`, token by token. Raises ValueError when the lengths differ."""
    number, width = len(token_ids), columns.width
    if len(columns.values) != 4 * number:
        raise ValueError(f"{len(columns.values)} bytes of log probabilities for {number} tokens")
    table = np.empty((number, 2, 1 + width), dtype="<i4")
    table[:, 0, 0] = token_ids
    table[:, 0, 1:] = np.frombuffer(columns.top_ids, dtype="<i4").reshape(number, width)
    table[:, 1, 0] = np.frombuffer(columns.values, dtype="<i4")
    table[:, 1, 1:] = np.frombuffer(columns.top_values, dtype="<i4").reshape(number, width)
    raw, size = table.tobytes(), 8 * (1 + width)
    return [raw[start : start + size] for start in range(0, len(raw), size)]


@dataclass(frozen=True, slots=True)
class Cells:
    """At most `SLICE` cells (but a row at least), ready to be written."""

    ids: npt.NDArray[np.int32]  # [tokens, 1 + width]: each token, and the likeliest at its place, or those that were named
    values: npt.NDArray[np.float32] | None  # as `ids`; None: nothing comes before these tokens (width 0)


def cells_of(rows: Sequence[Row], top: int, *, named: int = 0) -> Iterator[Cells]:
    """The tokens with the `top` likeliest beside each, or with the `named` ones that the request named, slice by slice."""
    step = _rows_at_a_time(named or top)
    for start in range(0, len(rows), step):
        # The width is that of a whole step of the engine, so it changes with the neighbours.
        for size, run in itertools.groupby(rows[start : start + step], len):
            table = np.frombuffer(b"".join(run), dtype="<i4").reshape(-1, 2, size // 8)
            table = np.concatenate([table[:, :, :1], table[:, :, -named:]], axis=2) if named else table[:, :, : 1 + top]
            yield Cells(table[:, 0], table[:, 1].view("<f4"))


def _rows_at_a_time(top: int) -> int:
    return max(1, SLICE // (1 + top))


class PromptTokens:
    """The tokens of a prompt from position `first` on, which an answer tells with their log probabilities.

    Holds their ids, which the wire does not repeat. The first of them has no value: in a prompt nothing comes before position 0,
    and SGLang's `logprob_start_len` names the place that is told of, not the first that is scored.
    """

    def __init__(self, token_ids: bytes, first: int) -> None:
        self._first = first
        self._ids = wire.unpack_ids(token_ids)[first:].copy()

    def cells(self, parts: Iterable[wire.PromptLogprobs], top: int, *, named: int = 0) -> Iterator[Cells]:
        """Put together what the chunks of the prompt brought, slice by slice; what none of them brought has no values. `top` and
        `named` as in `cells_of`."""
        position, end, step = self._first, self._first + len(self._ids), _rows_at_a_time(named or top)
        beside = slice(-named, None) if named else slice(top)
        scored = min(position + 1, end)
        for part in (*parts, None):
            start = end if part is None else max(part.start, scored)
            for begin in range(position, start, SLICE):
                yield Cells(self._of(begin, min(begin + SLICE, start))[:, None], None)
            position = max(position, start)
            if part is None:
                return
            columns, width = part.columns, part.columns.width
            stop = min(part.start + len(columns.values) // 4, end)
            ids = wire.unpack_ids(columns.top_ids).reshape(-1, width) if width else None
            values, likely = np.frombuffer(columns.values, "<f4"), np.frombuffer(columns.top_values, "<f4")
            for begin in range(start, stop, step):
                chosen = slice(begin - part.start, min(begin + step, stop) - part.start)
                told, scores = self._of(begin, min(begin + step, stop))[:, None], values[chosen, None]
                if ids is not None:
                    told = np.concatenate([told, ids[chosen, beside]], axis=1)
                    scores = np.concatenate([scores, likely.reshape(-1, width)[chosen, beside]], axis=1)
                yield Cells(told, scores)
            position = max(position, stop)

    def _of(self, start: int, stop: int) -> npt.NDArray[np.int32]:
        return self._ids[start - self._first : stop - self._first]


class _Memory(dict[int, Any]):
    """What is made of a token's id, kept for the next time."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, token_id: int) -> Any:
        if len(self) >= _REMEMBERED:
            self.clear()
        made = self[token_id] = self._make(token_id)
        return made

    def of(self, ids: npt.NDArray[np.int32]) -> list[Any]:
        return list(map(self.__getitem__, ids.ravel().tolist()))


class _Spelling:
    """The tokens of a vocabulary as answers write them: as texts, or (`as_ids`) as token_id:123."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool = False) -> None:
        def text(token_id: int) -> bytes:
            return _by_id(token_id) if as_ids else _to_json(tokenizer.token_text(token_id))

        self.completion = _Memory(_by_id if as_ids else lambda token_id: _to_json(_text_or_bytes(tokenizer.token_bytes(token_id))))
        self.chat_open = _Memory(lambda token_id: b'{"token":%b,"logprob":' % text(token_id))
        self.chat_close = _Memory(lambda token_id: b',"bytes":%b' % _to_json(list(tokenizer.token_bytes(token_id))))
        self.native_close = _Memory(lambda token_id: b",%d,%b]" % (token_id, text(token_id)))


def _by_id(token_id: int) -> bytes:
    return b'"token_id:%d"' % token_id


def _text_or_bytes(raw: bytes) -> str:
    """A token as completions write it: no two tokens of different bytes alike."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(chr(byte) if chr(byte) in _AS_THEY_ARE else f"\\x{byte:02x}" for byte in raw)


_spelling: Final = functools.lru_cache(maxsize=4)(_Spelling)
_BARE: Final = _Memory(lambda token_id: b",%d,null]" % token_id)


def _floored(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return np.nan_to_num(values, nan=FLOOR, posinf=0.0, neginf=FLOOR).clip(min=FLOOR)


def _numbers(values: npt.NDArray[np.float32]) -> list[bytes]:
    """Each value as JSON writes it."""
    return _to_json(_floored(values).ravel().tolist())[1:-1].split(b",")


def json_list(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Parts of a JSON list, each with items of its own, as the whole list."""
    before = b"["
    for part in parts:
        yield before + part
        before = b","
    yield b"[]" if before == b"[" else b"]"


# --- chat completions ---


def chat_content(tokenizer: Tokenizer, rows: Sequence[Row], top: int, *, as_ids: bool = False) -> Iterator[bytes]:
    """`choices[].logprobs.content` of chat completions, with the `top` likeliest tokens beside each, in parts."""
    spelling = _spelling(tokenizer, as_ids)
    return json_list(_chat_entries(spelling, cells) for cells in cells_of(rows, top))


def _chat_entries(spelling: _Spelling, cells: Cells) -> bytes:
    assert cells.values is not None, "a generated token without a value"
    number, width = cells.ids.shape
    behind = [b',"top_logprobs":[', *[b"},"] * (width - 2), b"}]},"] if width > 1 else [b',"top_logprobs":[]},']
    pieces = [b""] * (4 * number * width)
    pieces[0::4] = spelling.chat_open.of(cells.ids)
    pieces[1::4] = _numbers(cells.values)
    pieces[2::4] = spelling.chat_close.of(cells.ids)
    pieces[3::4] = behind * number
    pieces[-1] = pieces[-1][:-1]
    return b"".join(pieces)


# --- completions ---


class CompletionLogprobs:
    """`choices[].logprobs` of one choice of completions, whose offsets (into the text, however tokens are written) go on from
    call to call."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool = False, echo: str = "", skip_special_tokens: bool = True) -> None:
        """`echo`: what the text begins with before anything is generated."""
        self._spelling = _spelling(tokenizer, as_ids)
        self._offsets = _Offsets(tokenizer, echo, tokenizer.special_ids if skip_special_tokens else frozenset())

    def parts(self, cells: Callable[[], Iterator[Cells]], prompt: Callable[[], Iterator[Cells]] = lambda: iter(())) -> Iterator[bytes]:
        """The object, in parts: the tokens of the prompt, once, and then others. `cells` and `prompt` begin anew with each call.

        `top_logprobs` of a token holds the likeliest and itself. Of tokens with the same text it has that text, or the likeliest; the
        others are told by their ids.
        """
        spelling = self._spelling

        def each(write: Callable[[Cells], bytes]) -> Iterator[bytes]:
            return json_list(map(write, itertools.chain(prompt(), cells())))

        yield b'{"tokens":'
        yield from each(lambda some: b",".join(spelling.completion.of(some.ids[:, 0])))
        yield b',"token_logprobs":'
        yield from each(_own_values)
        yield b',"top_logprobs":'
        yield from each(self._tops)
        yield b',"text_offset":'
        told = self._offsets
        yield from json_list(itertools.chain(map(told.of_prompt, prompt()), map(told.of_output, cells())))
        yield b"}"

    def _tops(self, cells: Cells) -> bytes:
        if cells.values is None:
            return _nulls(cells)
        values = _floored(cells.values)
        order = np.argsort(-values, axis=1, kind="stable")
        ids = np.take_along_axis(cells.ids, order, axis=1)
        numbers, width = _numbers(np.take_along_axis(values, order, axis=1)), values.shape[1]
        rows = zip(cells.ids[:, 0].tolist(), ids.tolist(), range(0, len(numbers), width), strict=True)
        return b",".join(self._top(own, beside, numbers[start : start + width]) for own, beside, start in rows)

    def _top(self, own: int, ids: list[int], numbers: list[bytes]) -> bytes:
        spelled = self._spelling.completion
        named = {spelled[own]: own}
        entries: dict[int, bytes] = {}
        for token_id, number in zip(ids, numbers, strict=True):
            if token_id not in entries:
                name = spelled[token_id]
                told = name if named.setdefault(name, token_id) == token_id else _by_id(token_id)
                entries[token_id] = b"%b:%b" % (told, number)
        return b"{%b}" % b",".join(entries.values())


class _Offsets:
    """Where each token begins in a text; one that begins within a character, where that character does."""

    def __init__(self, tokenizer: Tokenizer, echo: str, skipped: frozenset[int]) -> None:
        """The text is `echo` and what is generated behind it, without the tokens that are `skipped`."""
        self._tokenizer = tokenizer
        self._echo = echo
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._generating = False
        self._at = 0  # characters before, without one that is not complete

    def of_prompt(self, cells: Cells) -> bytes:
        return self._told(cells, self._echoed)

    def of_output(self, cells: Cells) -> bytes:
        if not self._generating:
            self._generating = True
            self._decoder.reset()
            self._at = len(self._echo)
        return self._told(cells, self._generated)

    def _told(self, cells: Cells, shown: Callable[[int], bytes]) -> bytes:
        return _to_json([self._pass(shown(token_id)) for token_id in cells.ids[:, 0].tolist()])[1:-1]

    def _pass(self, raw: bytes) -> int:
        """Where these bytes begin, the next ones of the text."""
        self._at += len(self._decoder.decode(raw[:1]))
        begins = self._at if self._partial or not raw else self._at - 1
        self._at += len(self._decoder.decode(raw[1:]))
        return begins

    @property
    def _partial(self) -> bool:
        """Whether the last character so far is not complete."""
        return bool(self._decoder.getstate()[0])

    def _generated(self, token_id: int) -> bytes:
        return b"" if token_id in self._skipped else self._tokenizer.token_bytes(token_id)

    def _echoed(self, token_id: int) -> bytes:
        """What the prompt shows of a token. One that was written as text has neither the special tokens nor the space that the tokenizer
        put before it."""
        raw, special = self._tokenizer.token_bytes(token_id), token_id in self._tokenizer.special_ids
        if not special and raw[:1] != b" ":
            return raw
        place = self._at + self._partial
        if special:
            return raw if self._echo.startswith(self._tokenizer.token_text(token_id), place) else b""
        return raw if self._echo.startswith(" ", place) else raw[1:]


def _own_values(cells: Cells) -> bytes:
    return _nulls(cells) if cells.values is None else b",".join(_numbers(cells.values[:, 0]))


def _nulls(cells: Cells) -> bytes:
    return b",".join([b"null"] * len(cells.ids))


# --- /generate ---


class NativeLogprobs:
    """`meta_info.output_token_logprobs`, `output_top_logprobs` and their likes: [logprob, id, text]."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """Without a tokenizer the texts are null."""
        self._close = _BARE if tokenizer is None else _spelling(tokenizer).native_close

    def own(self, cells: Cells) -> bytes:
        """The tokens themselves, as items of a list."""
        ids = cells.ids[:, :1]
        numbers = [b"null"] * len(ids) if cells.values is None else _numbers(cells.values[:, :1])
        return self._triples(numbers, ids, [b","] * len(ids))

    def tops(self, cells: Cells) -> bytes:
        """The tokens beside each token; null where the token itself has no value."""
        ids = cells.ids[:, 1:]
        number, width = ids.shape
        if cells.values is None:
            return _nulls(cells)
        if not width:
            return b",".join([b"[]"] * number)
        behind = [*[b","] * (width - 1), b"],["] * number
        return b"[%b]" % self._triples(_numbers(cells.values[:, 1:]), ids, behind)

    def _triples(self, numbers: list[bytes], ids: npt.NDArray[np.int32], behind: list[bytes]) -> bytes:
        pieces = [b"["] * (4 * len(numbers))
        pieces[1::4] = numbers
        pieces[2::4] = self._close.of(ids)
        pieces[3::4] = behind
        pieces[-1] = b""
        return b"".join(pieces)

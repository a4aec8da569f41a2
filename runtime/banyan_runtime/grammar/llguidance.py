"""Grammars compiled and followed by llguidance: in milliseconds, and with bounds on what a step may cost.

Errors of a grammar, while it is compiled or used, are `GrammarError`s and concern its own request alone.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import llguidance
import msgspec
import numpy as np
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from banyan_runtime.grammar import structural
from banyan_runtime.grammar.errors import GrammarError
from banyan_runtime.grammar.lark import LarkWriter
from banyan_runtime.grammar.matcher import Masks, SideBySide, Words
from banyan_runtime.grammar.pieces import Splitter
from banyan_runtime.grammar.vocabulary import Vocabulary
from banyan_runtime.wire import Grammar

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_JSON: Final[Mapping[str, JsonCompileOptions]] = {
    # A blank, or a new line and its indentation: what models write, compact or pretty, and no more of it.
    "bounded": {"whitespace_flexible": True, "whitespace_pattern": r" |\n[ \t]{0,32}"},
    "any": {"whitespace_flexible": True},
    "none": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
}
_ESCAPE: Final = re.compile(r"\x7f|\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.DOTALL)  # in GBNF; and what Lark wants escaped
ALLOWED_S: Final = 0.01
"""Of computing time for each mask, and for each token behind it, while all others wait: ten times of what nearly all grammars take."""
DEBT_S: Final = 0.3  # beyond what is allowed, of an output so far; then its grammar is given up
_SLOW: Final = (
    "it takes too long to find what may come next: the same text can come of it in too many ways. Write it so that each can come of it "
    "in one way, without rules that begin with themselves or match nothing, repeatedly."
)
_SHOWN: Final = 250  # characters of the compiler's own words
_SOURCE: Final = re.compile(r"\n\s*\d+ \| .*", re.DOTALL)  # the lines of the grammar that was written for it
_PLACE: Final = re.compile(r"^(?:at )?\d+\(\d+\): (?:failed to compile JSON schema: )?")


def _limits(kind: str) -> llguidance.LLParserLimits:
    return llguidance.LLParserLimits(
        initial_lexer_fuel=1_000_000,  # 50,000 take a millisecond
        step_lexer_fuel=200_000,  # 14,000 take a millisecond: so much may a mask cost, while all others wait
        step_max_items=50_000,  # 20,000 take a millisecond
        # A thousand properties that may be left out; else alternatives that are rules, which cost more each.
        max_items_in_row=4500 if kind == "json_schema" else 2000,
        max_lexer_states=100_000,  # 1 to 2 KB each, of an output
        max_grammar_size=500_000,
        verbose_errors=False,
    )


class LlguidanceBackend:
    """Compiles grammars for one vocabulary. Takes a second to make at 150,000 tokens, and 120 MB. Safe to use from several threads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Raises GrammarError for a tokenizer that llguidance cannot read."""
        size = max(vocabulary.size, vocabulary.tokens)
        try:
            tokenizer = llguidance.LLTokenizer(vocabulary.tokenizer, n_vocab=size, eos_token=list(vocabulary.eos_ids) or None)
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise GrammarError(f"this model's tokenizer cannot be held to a grammar: {_one_line(str(error))}") from None
        self._tokenizer = tokenizer
        self._splitter = Splitter(vocabulary.added)
        self._ends = frozenset(vocabulary.eos_ids) | frozenset(tokenizer.eos_tokens)
        self._size = size
        self._rows = vocabulary.size

    def compile(self, grammar: Grammar) -> LlguidanceCompiled:
        """Raises GrammarError for a grammar that is wrong or cannot be enforced, with the reason for the client."""
        try:
            source = self._source(grammar)
        except (ValueError, msgspec.DecodeError, RecursionError) as error:
            raise GrammarError(_one_line(str(error))) from None
        with _no_panics():
            matcher = llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=_limits(grammar.kind))
        if matcher.is_error():
            raise GrammarError(_reason(matcher, placed=grammar.kind == "ebnf" and is_lark_syntax(grammar.text)))
        return LlguidanceCompiled(matcher, self._ends, self._size, self._rows)

    def side_by_side(self, threads: int) -> SideBySide:
        """Raises GrammarError where there are no threads to be had."""
        try:
            with _no_panics():
                executor = llguidance.LLExecutor(num_threads=threads)
        except Exception as error:
            raise GrammarError(f"{threads} threads cannot be had: {error}") from None

        def compute(those: Sequence[tuple[Any, int]], masks: Masks) -> None:
            with _no_panics():
                executor.unsafe_compute_mask_ptr(list(those), masks.ctypes.data, masks[0].nbytes, len(masks))

        return compute

    def _source(self, grammar: Grammar) -> str:
        options = _JSON.get(grammar.whitespace)
        if options is None:
            raise GrammarError(f"there is no whitespace {grammar.whitespace[:40]!r}; there are {', '.join(_JSON)}.")
        match grammar.kind:
            case "json_schema" | "json_object":
                schema = msgspec.json.decode(grammar.text or '{"type":"object"}')
                return _lark("start: %json " + msgspec.json.encode({**schema, "x-guidance": options}).decode())
            case "regex":
                return _lark(f"start: /{_regex(grammar.text)}/")
            case "choice":
                choices = msgspec.json.decode(grammar.text, type=list[str])
                quoted = " | ".join(msgspec.json.encode(choice).decode().replace("\x7f", r"\u007f") for choice in choices)
                return _lark(f"start: CHOICE\nCHOICE: {quoted}")
            case "ebnf":
                return _lark(_ebnf(grammar.text))
            case "structural_tag":
                lark, inner = LarkWriter(self._splitter, options, _regex, _ebnf).write(structural.decode(grammar.text))
                return _lark(lark, inner)
        raise GrammarError(f"there is no kind of grammar {grammar.kind[:40]!r}.")


@contextlib.contextmanager
def _no_panics() -> Iterator[None]:
    """Of a grammar that the library stumbles over, which is no Exception and would end the process. Raises GrammarError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise GrammarError("the grammar library fails on it.") from None


def _lark(lark: str, inner: Mapping[str, str] | None = None) -> str:
    """A whole grammar, and the `inner` ones that it refers to by name.

    Text that leaves no choice is not looked up before the next mask: a megabyte of it would take a second, in which nobody gets a token."""
    grammars = [{"lark_grammar": f'{lark}\n%llguidance {{"no_forcing": true}}'}]  # at the end: lines in errors are the client's
    grammars += [{"name": name, "lark_grammar": text} for name, text in (inner or {}).items()]
    return msgspec.json.encode({"grammars": grammars}).decode()


class LlguidanceCompiled:
    """Safe to use from several threads."""

    def __init__(self, first: llguidance.LLMatcher, ends: frozenset[int], size: int, rows: int) -> None:
        self._first = first
        self._ends = ends
        self._size = size
        self._rows = rows

    def matcher(self, stop_ids: Sequence[int]) -> LlguidanceMatcher:
        """At the beginning of an output. `stop_ids`: tokens that may end it once it is complete."""
        stops = frozenset(stop for stop in stop_ids if 0 <= stop < self._rows)
        return LlguidanceMatcher(self._first.deep_copy(), self._ends, stops, self._size, self._rows)


class LlguidanceMatcher:
    """Ends are looked after here: which tokens may end an output is each request's own matter."""

    def __init__(self, matcher: llguidance.LLMatcher, ends: frozenset[int], stops: frozenset[int], size: int, rows: int) -> None:
        self._matcher = matcher
        self._ends = ends  # never part of an output
        self._stops = stops  # may end it
        self._size = size  # ids that the library masks
        self._rows = rows  # ids that the model has
        self._accepted = 0
        self._ended = False
        self._debt = 0.0  # seconds

    @property
    def library(self) -> llguidance.LLMatcher | None:
        return None if self._ended or self._size > self._rows else self._matcher

    def fill(self, words: Words, *, computed: bool = False) -> None:
        matcher = self._matcher
        if self._ended:
            words[:] = 0
            self._allow(words, self._stops)
            return
        if not computed:
            with self._owing():
                self._compute(words)
        if matcher.is_error():
            check(matcher)
        if self._debt > DEBT_S:
            raise GrammarError(_SLOW)
        for token_id in self._ends:
            if token_id < self._rows:
                words[token_id >> 5] &= np.uint32(~(1 << (token_id & 31)) & 0xFFFFFFFF)
        if matcher.is_accepting():
            self._allow(words, self._stops)
        if not words.any():
            raise GrammarError("no token of the vocabulary can come next in this grammar.")

    @contextlib.contextmanager
    def _owing(self) -> Iterator[None]:
        """What this thread computes meanwhile beyond what is allowed is owed; what it computes less is paid back."""
        began = time.thread_time()
        yield
        self._debt = max(0.0, self._debt + time.thread_time() - began - ALLOWED_S)

    def _compute(self, words: Words) -> None:
        """What the library says."""
        if self._size <= self._rows:
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            return
        wide = np.empty(-(-self._size // 32), dtype=np.uint32)
        self._matcher.unsafe_compute_mask_ptr(wide.ctypes.data, wide.nbytes)
        words[:] = wide[: words.size]
        if rest := self._rows % 32:
            words[-1] &= np.uint32((1 << rest) - 1)

    def _allow(self, words: Words, ids: frozenset[int]) -> None:
        for token_id in ids:
            words[token_id >> 5] |= np.uint32(1 << (token_id & 31))

    def accept(self, token_id: int) -> bool:
        if self._ended:
            return False
        if token_id in self._stops and self._matcher.is_accepting():
            self._ended = True
            return True
        if token_id in self._ends or not 0 <= token_id < self._rows:
            return False
        with self._owing():
            taken = self._matcher.try_consume_tokens([token_id]) == 1
        if taken:
            self._accepted += 1
            return True
        if self._matcher.is_error():
            check(self._matcher)
        return False

    def rollback(self, tokens: int) -> None:
        if tokens > self._accepted + self._ended:
            raise GrammarError(f"{tokens} tokens cannot be taken back: there were {self._accepted + self._ended}.")
        if tokens and self._ended:
            self._ended = False
            tokens -= 1
        if tokens:
            self._matcher.rollback(tokens)
            check(self._matcher)
            self._accepted -= tokens

    @property
    def is_completed(self) -> bool:
        return self._ended or self._matcher.is_accepting()

    @property
    def is_terminated(self) -> bool:
        return self._ended or (self._matcher.is_stopped() and self._matcher.is_accepting())

    def copy(self) -> LlguidanceMatcher:
        other = LlguidanceMatcher(self._matcher.deep_copy(), self._ends, self._stops, self._size, self._rows)
        other._accepted, other._ended, other._debt = self._accepted, self._ended, self._debt
        return other


def check(matcher: llguidance.LLMatcher) -> None:
    """Raises GrammarError for a matcher that has failed; it stays so."""
    if matcher.is_error():
        raise GrammarError(_reason(matcher))


def _reason(matcher: llguidance.LLMatcher, *, placed: bool = False) -> str:
    """`placed`: the library's place in the grammar is one in the client's text."""
    reason = matcher.get_error().partition("\n<state>")[0].replace("<non-verbose/>", "")
    if "NoExtension" in reason:
        return "it admits no output."
    reason = _SOURCE.sub("", reason)
    return _one_line(reason if placed else _PLACE.sub("", reason)) or "it is too complex."


def _one_line(reason: str) -> str:
    return " ".join(reason.split())[:_SHOWN]


def _regex(pattern: str) -> str:
    try:
        text: str = llguidance.regex_to_lark(pattern, "d")  # \d is a digit of ASCII, as in JSON Schema and in what SGLang and vLLM do
    except Exception as error:
        raise GrammarError(_one_line(str(error))) from None
    return text


def _ebnf(text: str) -> str:
    """GBNF as Lark; Lark as it is."""
    if "%llguidance" in text:
        raise GrammarError("%llguidance is the server's own matter; leave it out.")
    try:
        lark = text if is_lark_syntax(text) else str(gbnf_to_lark(_ESCAPE.sub(_character, text))).removeprefix("%llguidance {}")
    except RecursionError:
        raise GrammarError("the grammar is nested too deeply.") from None
    except Exception as error:  # the library's own, and what it stumbles over
        raise GrammarError(_one_line(str(error)) or "it cannot be read.") from None
    return lark


def _character(escape: re.Match[str]) -> str:
    """The character that an escape in GBNF stands for, in a form that the library does not spoil: of \\u0041 it makes \\u41."""
    if escape[0] == "\x7f":
        return r"\x7f"
    code = int(escape[1] or escape[2] or "110000", 16)
    if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
        return escape[0]
    return chr(code) if code > 0x7F else f"\\x{code:02x}"

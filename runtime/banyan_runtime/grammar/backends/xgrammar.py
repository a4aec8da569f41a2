"""xgrammar: cheaper masks where few grammars serve many requests; compiling takes far longer, and cannot be interrupted, so it happens in
processes of its own. Needs torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np
import tokenizers
import torch
import xgrammar

from banyan_runtime.grammar import structural
from banyan_runtime.grammar.backend import Words
from banyan_runtime.grammar.backends import xgrammar_rules
from banyan_runtime.grammar.backends.xgrammar_schemas import enforced
from banyan_runtime.grammar.errors import GrammarError
from banyan_runtime.grammar.isolated import PATIENCE_S, IsolatedCompiler
from banyan_runtime.grammar.limits import COMPILE_CPU_S
from banyan_runtime.grammar.pieces import Splitter
from banyan_runtime.grammar.vocabulary import Vocabulary
from banyan_runtime.grammar.wording import TOO_COMPLEX, in_clients_words
from banyan_runtime.wire import Grammar

_MAX_BLANKS: Final = 33  # in a row: a new line and its indentation
_BLANKS: Final[Mapping[str, dict[str, Any]]] = {
    "bounded": {"any_whitespace": True, "max_whitespace_cnt": _MAX_BLANKS},
    "any": {"any_whitespace": True},
    "none": {"any_whitespace": False, "separators": (", ", ": ")},
}
_NO_TEXT: Final[Mapping[Any, str | bytes]] = {  # the sign that free text excludes, and a byte that no other text has
    xgrammar.VocabType.RAW: b"\x01\xff",
    xgrammar.VocabType.BYTE_FALLBACK: b"\x01\xff",
    xgrammar.VocabType.BYTE_LEVEL: "āÿ",
}
_SHOWN: Final = 1000


class XgrammarBackend:
    """Holds what was compiled elsewhere."""

    def __init__(self, vocabulary: Vocabulary, *, cpu_s: int = COMPILE_CPU_S, patience_s: float = PATIENCE_S) -> None:
        """Raises GrammarError for a tokenizer that xgrammar cannot read."""
        self._table = _Table(vocabulary)
        self._compiler = IsolatedCompiler(vocabulary, cpu_s=cpu_s, patience_s=patience_s)

    def compile(self, grammar: Grammar) -> XgrammarCompiled:
        """Raises GrammarError."""
        xgrammar_rules.check(grammar)
        raw = self._compiler.compiled(grammar).decode()
        return XgrammarCompiled(xgrammar.CompiledGrammar.deserialize_json(raw, self._table.info), self._table.eos_ids, self._table.size)

    def side_by_side(self, threads: int) -> None:
        return None


class _Table:
    """The vocabulary as xgrammar sees it. The tokens beside the vocabulary proper are no text, so that they are part of an output only
    where a structural tag names them."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Raises GrammarError for a tokenizer that xgrammar cannot read."""
        self.splitter = Splitter(vocabulary.added)
        try:
            backend = tokenizers.Tokenizer.from_str(vocabulary.tokenizer)
            found = xgrammar.TokenizerInfo._detect_metadata_from_hf(vocabulary.tokenizer)
            no_text = _NO_TEXT[found["vocab_type"]]
            named = frozenset(self.splitter.ids.values())
            encoded: list[Any] = [""] * vocabulary.size  # text, or bytes as they are
            for text, token_id in backend.get_vocab(with_added_tokens=True).items():
                if token_id < vocabulary.size:
                    encoded[token_id] = no_text if token_id in named else text
            self.info = xgrammar.TokenizerInfo(
                encoded,
                vocab_type=found["vocab_type"],
                vocab_size=vocabulary.size,
                stop_token_ids=list(vocabulary.eos_ids) or None,
                add_prefix_space=found["add_prefix_space"],
            )
        except Exception as error:
            raise GrammarError(f"this model's tokenizer cannot be held to a grammar: {str(error)[:_SHOWN]}") from None
        self.eos_ids = frozenset(vocabulary.eos_ids)
        self.size = vocabulary.size


class LocalXgrammar:
    """Compiles in this process."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Raises GrammarError for a tokenizer that xgrammar cannot read."""
        self._table = _Table(vocabulary)
        self._compiler = xgrammar.GrammarCompiler(self._table.info, max_threads=1, cache_enabled=False)

    def compile(self, grammar: Grammar) -> XgrammarCompiled:
        """Raises GrammarError."""
        try:
            return XgrammarCompiled(self._compiled(grammar), self._table.eos_ids, self._table.size)
        except (RuntimeError, ValueError, TypeError, msgspec.MsgspecError, RecursionError) as error:
            raise GrammarError(_shown(error, line_before=0 if grammar.kind == "ebnf" else None)) from None

    def side_by_side(self, threads: int) -> None:
        return None

    def _compiled(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        blanks = _BLANKS.get(grammar.whitespace, {})
        match grammar.kind:
            case "json_schema":
                schema = enforced(msgspec.json.decode(grammar.text))
                return self._compiler.compile_json_schema(msgspec.json.encode(schema).decode(), strict_mode=False, **blanks)
            case "json_object":
                return self._compiler.compile_json_schema('{"type":"object"}', strict_mode=False, **blanks)
            case "regex":
                return self._compiler.compile_regex(grammar.text)
            case "choice":
                choices = msgspec.json.decode(grammar.text, type=list[str])
                return self._compiler.compile_grammar("root ::= " + " | ".join(msgspec.json.encode(choice).decode() for choice in choices))
            case "ebnf":
                return self._compiler.compile_grammar(grammar.text)
            case "structural_tag":
                writer = xgrammar_rules.TagWriter(self._table.splitter, partial(_json_form, grammar.whitespace))
                form = writer.write(structural.decode(grammar.text))
                return self._compiler.compile_structural_tag(msgspec.json.encode({"type": "structural_tag", "format": form}).decode())
        raise GrammarError(f"there is no kind of grammar {grammar.kind[:40]!r}.")


def _json_form(whitespace: str, schema: dict[str, Any]) -> xgrammar_rules.Form:
    """JSON within a structural tag, with the blanks that it has alone."""
    form = xgrammar_rules.json_form(schema)
    if whitespace == "bounded":
        return {**form, "max_whitespace_cnt": _MAX_BLANKS}
    if whitespace == "none":  # tags have no words for that
        text = msgspec.json.encode(schema).decode()
        return {"type": "grammar", "grammar": str(xgrammar.Grammar.from_json_schema(text, strict_mode=False, **_BLANKS["none"]))}
    return form


class XgrammarCompiled:
    def __init__(self, compiled: xgrammar.CompiledGrammar, eos_ids: frozenset[int], size: int) -> None:
        self._compiled = compiled
        self._eos_ids = eos_ids
        self._size = size

    def serialized(self) -> bytes:
        return self._compiled.serialize_json().encode()

    def matcher(self, stop_ids: Sequence[int]) -> XgrammarMatcher:
        stops = [stop for stop in stop_ids if 0 <= stop < self._size]
        # Without any it would end by itself; an end that no request has keeps it from that.
        matcher = xgrammar.GrammarMatcher(self._compiled, override_stop_tokens=stops or sorted(self._eos_ids) or None)
        return XgrammarMatcher(matcher, self._size)


class XgrammarMatcher:
    def __init__(self, matcher: xgrammar.GrammarMatcher, size: int) -> None:
        self._matcher = matcher
        self._size = size
        self._accepted = 0

    @property
    def library(self) -> None:
        return None

    def fill(self, words: Words, *, computed: bool = False) -> None:
        assert not computed, "it is computed here"
        try:
            if self._matcher.is_terminated():
                words[:] = 0
            else:
                self._matcher.fill_next_token_bitmask(torch.from_numpy(words.view("int32")).unsqueeze(0), 0)
        except RuntimeError as error:
            raise GrammarError(_shown(error)) from None
        if rest := self._size % 32:  # it admits what is no token
            words[-1] &= np.uint32((1 << rest) - 1)
        if not words.any():
            raise GrammarError("no token of the vocabulary can come next in this grammar.")

    def accept(self, token_id: int) -> bool:
        try:
            accepted = not self._matcher.is_terminated() and bool(self._matcher.accept_token(token_id))
        except (RuntimeError, ValueError) as error:
            raise GrammarError(_shown(error)) from None
        self._accepted += accepted
        return accepted

    def rollback(self, tokens: int) -> None:
        if tokens > self._accepted:
            raise GrammarError(f"{tokens} tokens cannot be taken back: there were {self._accepted}.")
        if tokens:
            self._matcher.rollback(tokens)
            self._accepted -= tokens

    @property
    def is_completed(self) -> bool:
        return bool(self._matcher.is_completed())

    @property
    def is_terminated(self) -> bool:
        return bool(self._matcher.is_terminated())

    def copy(self) -> XgrammarMatcher:
        other = XgrammarMatcher(self._matcher.fork(), self._size)
        other._accepted = self._accepted
        return other


def _shown(error: Exception, line_before: int | None = None) -> str:
    if "bad_alloc" in str(error):
        return "it takes too much memory."
    return in_clients_words(str(error), line_before=line_before) or TOO_COMPLEX

"""The vocabulary in a GGUF file as tokenizer.json.

Only byte-level BPE, and of it only kinds whose splitting rule is known: a guessed one would give other tokens than those that
the model was trained with, which nobody would notice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from banyan_runtime.errors import ModelError
from banyan_runtime.hub.files import shown
from banyan_runtime.hub.gguf.header import Fields

_CONTROL: Final = 3
_USER_DEFINED: Final = 4
_UNUSED: Final = 5
"""Types of tokens. Unused ones fill the vocabulary up to the rows of the embedding."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """How a family cuts text before BPE. `digits`: at most so many in one piece; None: as GPT-2's rule has it, after each digit
    stands alone."""

    digits: int | None = None
    alone: bool = False  # each digit is split off first
    composed: bool = False  # text is brought into the form NFC
    whole: bool = False  # a piece that is a token as it stands is not merged anew
    begins: bool = False  # with the BOS token, where the file does not say


_GPT2, _SMOLLM = _Kind(), _Kind(alone=True)
_LLAMA3, _QWEN2 = _Kind(digits=3, whole=True, begins=True), _Kind(digits=1, composed=True)
_KINDS: Final = {
    "gpt-2": _GPT2, "smollm": _SMOLLM, "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}  # fmt: skip
"""By `tokenizer.ggml.pre`."""
_REMEDY: Final = (
    "put the model's tokenizer.json and tokenizer_config.json beside it and name their folder, or name another with --tokenizer-path"
)


def tokenizer(fields: Fields) -> str:
    """tokenizer.json. Raises ModelError for a vocabulary of another kind, or one that is damaged."""
    model, pre = fields.text("tokenizer.ggml.model"), fields.text("tokenizer.ggml.pre", "default")
    if model != "gpt2" or pre not in _KINDS:
        raise ModelError(
            f"{fields.where}: tokenizer.ggml.model is {shown(model)} and tokenizer.ggml.pre {shown(pre)}; supported is gpt2 with "
            f"{', '.join(_KINDS)}; {_REMEDY}"
        )
    kind = _KINDS[pre]
    tokens, types = _tokens(fields)
    vocabulary = {token: number for number, token in enumerate(tokens) if types[number] != _UNUSED}
    if len(vocabulary) < len(tokens) - types.count(_UNUSED):
        raise ModelError(f"{fields.where}: 'tokenizer.ggml.tokens' holds a token twice; fetch the file again")
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in fields.texts("tokenizer.ggml.merges"))]
    try:
        made = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=kind.whole))
    except Exception as error:  # a merge of tokens that there are not
        raise ModelError(f"{fields.where}: 'tokenizer.ggml.merges' cannot be used ({error}); fetch the file again") from error
    if kind.composed:
        made.normalizer = normalizers.NFC()
    made.pre_tokenizer = _splitter(kind)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _of(tokens, types, _CONTROL)])
    made.add_tokens([AddedToken(token, special=False, normalized=False) for token in _of(tokens, types, _USER_DEFINED)])
    if (around := _around(fields, kind, tokens)) is not None:
        made.post_processor = around
    return made.to_str()


def _tokens(fields: Fields) -> tuple[list[str], list[int]]:
    tokens, types = fields.texts("tokenizer.ggml.tokens"), fields.numbers("tokenizer.ggml.token_type")
    if len(tokens) != len(types):
        raise ModelError(
            f"{fields.where}: 'tokenizer.ggml.token_type' has {len(types)} entries for {len(tokens)} tokens; fetch the file again"
        )
    return tokens, types


def _of(tokens: list[str], types: list[int], wanted: int) -> list[str]:
    return [token for token, kind in zip(tokens, types, strict=True) if kind == wanted]


def _splitter(kind: _Kind) -> pre_tokenizers.PreTokenizer:
    """Text into pieces that BPE does not reach across, written in the characters that stand for bytes."""
    if kind.digits is None:
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain]) if kind.alone else plain
    numbers = r"\p{N}" if kind.digits == 1 else rf"\p{{N}}{{1,{kind.digits}}}"
    pieces = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",  # English contractions
        r"[^\r\n\p{L}\p{N}]?\p{L}+",  # a word, with one character before it
        numbers,
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",  # punctuation, with the line breaks behind it
        r"\s*[\r\n]+",
        r"\s+(?!\S)",  # blanks, but for the one that belongs to a word
        r"\s+",
    )
    split = pre_tokenizers.Split(Regex("|".join(pieces)), behavior="isolated", invert=False)
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _around(fields: Fields, kind: _Kind, tokens: list[str]) -> processors.PostProcessor | None:
    """What is put around a text: the tokens that begin and end it, where the file wants them."""
    wanted = {
        "bos": fields.truth("tokenizer.ggml.add_bos_token", default=kind.begins),
        "eos": fields.truth("tokenizer.ggml.add_eos_token", default=False),
    }
    ids = {name: fields.index(f"tokenizer.ggml.{name}_token_id", len(tokens)) for name, add in wanted.items() if add}
    found = {name: number for name, number in ids.items() if number is not None}
    if not found:
        return None

    first, last = ([tokens[found[name]]] if name in found else [] for name in ("bos", "eos"))
    try:
        return processors.TemplateProcessing(
            single=[*first, "$A", *last],
            pair=[*first, "$A:0", "$B:1", *last],
            special_tokens=[(tokens[number], number) for number in found.values()],
        )
    except Exception as error:  # a token that reads as something else there
        raise ModelError(f"{fields.where}: a text cannot be put between {shown(first)} and {shown(last)} ({error})") from error

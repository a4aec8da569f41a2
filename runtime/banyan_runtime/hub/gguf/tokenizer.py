"""The vocabulary in a GGUF file as tokenizer.json.

Byte-level BPE, of kinds whose splitting rule is known, and SentencePiece's BPE with scores. A guessed rule would give other tokens than
those that the model was trained with, and no error would show it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from banyan_runtime.errors import ModelError
from banyan_runtime.hub.files import shown
from banyan_runtime.hub.gguf.header import Fields

_UNKNOWN: Final = 2
_CONTROL: Final = 3
_USER_DEFINED: Final = 4
_UNUSED: Final = 5
"""Types of tokens. Unused ones fill the vocabulary up to the rows of the embedding."""
_BLANK: Final = "▁"  # stands for a blank in SentencePiece's vocabularies


@dataclass(frozen=True, slots=True)
class _Kind:
    """How a family cuts text before BPE. `splits`: patterns, one applied after the other; empty: GPT-2's rule."""

    splits: tuple[str, ...] = ()
    alone: bool = False  # each digit is split off first
    composed: bool = False  # text is brought into the form NFC
    whole: bool = False  # a piece that is a token as it stands is not merged anew
    begins: bool = False  # with the BOS token, where the file does not say


_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"  # but for the one that belongs to a word
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words(digits: str, punctuation: str = r" ?[^\s\p{L}\p{N}]+[\r\n]*") -> tuple[str, ...]:
    """Contractions, words with one character before them, numbers, punctuation with the line breaks behind it, and blanks."""
    return ("|".join((_CONTRACTIONS, r"[^\r\n\p{L}\p{N}]?\p{L}+", digits, punctuation, _BLANKS)),)


def _cased(ending: str, digits: str) -> tuple[str, ...]:
    """Words that are cut where small letters end."""
    first, punctuation = r"[^\r\n\p{L}\p{N}]?", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
    words = (f"{first}{_UPPER}*{_LOWER}+{ending}", f"{first}{_UPPER}+{_LOWER}*{ending}")
    return ("|".join((*words, digits, punctuation, _BLANKS)),)


_THREE: Final = r"\p{N}{1,3}"
_GPT2, _DIGITS_ALONE = _Kind(), _Kind(alone=True)
_LLAMA3, _QWEN2 = _Kind(_words(_THREE), whole=True, begins=True), _Kind(_words(r"\p{N}"), composed=True)
_DEEPSEEK3: Final = _Kind((
    _THREE,
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _BLANKS,
))  # fmt: skip
_KINDS: Final = {
    "gpt-2": _GPT2, "smollm": _DIGITS_ALONE, "starcoder": _DIGITS_ALONE, "refact": _DIGITS_ALONE,
    "command-r": _Kind(alone=True, composed=True),
    "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3,
    "glm4": _Kind(_words(_THREE), whole=True), "chatglm-bpe": _Kind(_words(_THREE)), "dbrx": _Kind(_words(_THREE)),
    "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2, "deepseek-v3": _DEEPSEEK3, "hunyuan-dense": _DEEPSEEK3,
    "tekken": _Kind(_cased("", r"\p{N}"), whole=True), "gpt-4o": _Kind(_cased(f"{_CONTRACTIONS}?", _THREE)),
    "seed-coder": _Kind(_words(r"\p{N}", r" ?[^\s\p{L}\p{N}\r\n]+")),
}  # fmt: skip
"""By `tokenizer.ggml.pre`."""
_REMEDY: Final = (
    "put the model's tokenizer.json and tokenizer_config.json beside it and name their folder, or name another with --tokenizer-path"
)


def tokenizer(fields: Fields) -> str:
    """tokenizer.json. Raises ModelError for a vocabulary of another kind, or one that is damaged."""
    model, pre = fields.text("tokenizer.ggml.model"), fields.text("tokenizer.ggml.pre", "default")
    if model in ("llama", "gemma4"):
        return _sentencepiece(fields, merged=model == "gemma4")
    if model == "gpt2" and pre in _KINDS:
        return _byte_level(fields, _KINDS[pre])
    raise ModelError(
        f"{fields.where}: tokenizer.ggml.model is {shown(model)} and tokenizer.ggml.pre {shown(pre)}; supported are llama, gemma4, and "
        f"gpt2 with {', '.join(_KINDS)}; {_REMEDY}"
    )


def _byte_level(fields: Fields, kind: _Kind) -> str:
    tokens, types = _tokens(fields)
    made = _bpe(fields, _vocabulary(fields, tokens, types), _merges(fields), ignore_merges=kind.whole)
    if kind.composed:
        made.normalizer = normalizers.NFC()
    made.pre_tokenizer = _splitter(kind)
    made.decoder = decoders.ByteLevel()
    return _whole(fields, made, tokens, types, begins=kind.begins)


def _sentencepiece(fields: Fields, *, merged: bool) -> str:
    """BPE over characters, with bytes for those that are no tokens. Merges follow from the tokens' scores, if they are not there."""
    tokens, types = _tokens(fields)
    vocabulary = _vocabulary(fields, tokens, types)
    if merged:
        merges = _merges(fields)
    else:
        merged_ones = {token: number for token, number in vocabulary.items() if types[number] != _CONTROL}
        merges = _by_score(merged_ones, _scores(fields, len(tokens)))
    unknown = next(iter(_of(tokens, types, _UNKNOWN)), None)
    made = _bpe(fields, vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    prefix = not merged and fields.truth("tokenizer.ggml.add_space_prefix", default=True)
    blanks = normalizers.Replace(" ", _BLANK)
    made.normalizer = normalizers.Sequence([normalizers.Prepend(_BLANK), blanks]) if prefix else blanks
    parts = [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefix else parts)
    return _whole(fields, made, tokens, types, begins=True)


def _bpe(fields: Fields, vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: object) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, **options))
    except Exception as error:  # a merge of tokens that there are not
        raise ModelError(f"{fields.where}: 'tokenizer.ggml.merges' cannot be used ({error}); fetch the file again") from error


def _whole(fields: Fields, made: tokenizers.Tokenizer, tokens: list[str], types: list[int], *, begins: bool) -> str:
    """tokenizer.json, with the tokens beside the vocabulary, and those around a text."""
    special = [*_of(tokens, types, _UNKNOWN), *_of(tokens, types, _CONTROL)]
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    made.add_tokens([AddedToken(token, special=False, normalized=False) for token in _of(tokens, types, _USER_DEFINED)])
    if (around := _around(fields, begins, tokens)) is not None:
        made.post_processor = around
    return made.to_str()


def _vocabulary(fields: Fields, tokens: list[str], types: list[int]) -> dict[str, int]:
    vocabulary = {token: number for number, token in enumerate(tokens) if types[number] != _UNUSED}
    if len(vocabulary) < len(tokens) - types.count(_UNUSED):
        raise ModelError(f"{fields.where}: 'tokenizer.ggml.tokens' holds a token twice; fetch the file again")
    return vocabulary


def _merges(fields: Fields) -> list[tuple[str, str]]:
    return [(left, right) for left, _, right in (merge.partition(" ") for merge in fields.texts("tokenizer.ggml.merges"))]


def _scores(fields: Fields, count: int) -> list[float]:
    scores = fields.floats("tokenizer.ggml.scores")
    if len(scores) != count:
        raise ModelError(f"{fields.where}: 'tokenizer.ggml.scores' has {len(scores)} entries for {count} tokens; fetch the file again")
    return scores


def _by_score(vocabulary: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every pair of tokens that makes a token, the best result first; of pairs with one result, that of the first tokens."""
    found: list[tuple[float, int, int, str, str]] = []
    for token, number in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                found.append((-scores[number], vocabulary[left], vocabulary[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


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
    if not kind.splits:
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain]) if kind.alone else plain
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False) for pattern in kind.splits]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _around(fields: Fields, begins: bool, tokens: list[str]) -> processors.PostProcessor | None:
    """What is put around a text: the tokens that begin and end it, where the file wants them."""
    wanted = {
        "bos": fields.truth("tokenizer.ggml.add_bos_token", default=begins),
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

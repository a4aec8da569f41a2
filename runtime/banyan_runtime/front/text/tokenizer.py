"""A model's tokenizer: loaded by transformers, which knows every family's files, and used through the `tokenizers` library,
which is fast and thread-safe.

transformers would import torch where it finds it. The front must not: `serve.py` hides torch before anything is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import tokenizers

from banyan_runtime.errors import ModelError
from banyan_runtime.front.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from banyan_runtime.front.text.vocabulary import token_bytes

_FILES: Final = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json")  # any of these makes a tokenizer
_NAMED: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Encodes text and decodes ids. Safe to use from several threads."""

    def __init__(self, backend: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.settings = settings  # tokenizer_config.json as it is
        self.named: dict[str, str] = {name: text for name in _NAMED if (text := _token_text(settings.get(name))) is not None}
        beside = backend.get_added_tokens_decoder()
        self.added: Mapping[str, int] = {token.content: token_id for token_id, token in beside.items()}  # beside the vocabulary proper
        self.special_ids = frozenset(token_id for token_id, token in beside.items() if token.special)
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.size = 1 + max(vocabulary.values(), default=-1)  # ids may have gaps: what counts is the highest one
        decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else None
        self._table = token_bytes(backend, decoder, vocabulary, self.added)

    @staticmethod
    def load(folder: Path) -> Tokenizer:
        """Read the tokenizer in `folder`. Raises ModelError when it is missing or broken."""
        if not any((folder / name).is_file() for name in _FILES):  # transformers would make an empty one out of nothing
            raise ModelError(
                f"{folder}: holds no tokenizer (tokenizer.json); put it there, name another folder with --tokenizer-path, or serve "
                "token ids only with --skip-tokenizer-init"
            )
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        settings = read_json(folder / "tokenizer_config.json")
        try:
            loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        except Exception as error:  # whatever a file that is missing or broken makes the libraries raise
            raise ModelError(
                f"{folder}: the tokenizer cannot be loaded ({type(error).__name__}: {error}). A model folder needs tokenizer.json and "
                "tokenizer_config.json; --skip-tokenizer-init serves token ids without them"
            ) from error
        if not isinstance(loaded, PreTrainedTokenizerFast):
            raise ModelError(
                f"{folder}: {type(loaded).__name__} has no fast form (tokenizer.json), which Banyan needs; "
                "convert it, or serve token ids only with --skip-tokenizer-init"
            )
        return Tokenizer(loaded.backend_tokenizer, settings)

    @property
    def has_bytes(self) -> bool:
        """Whether the bytes of each token are known (all but unusual vocabularies)."""
        return self._table is not None

    @property
    def eos_id(self) -> int | None:
        text = self.named.get("eos_token")
        return None if text is None else self._backend.token_to_id(text)

    def token_id(self, text: str) -> int | None:
        """The id of the token that is written exactly so."""
        return self._backend.token_to_id(text)

    def token_text(self, token_id: int) -> str:
        """One token on its own, fragments of characters as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, which may be a part of a character; those of its text where the vocabulary has no bytes."""
        if self._table is not None:
            return self._table[token_id] if 0 <= token_id < len(self._table) else b""
        return self._backend.decode([token_id], skip_special_tokens=False).encode()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`. Special tokens written in the text become their ids; `add_special_tokens` adds BOS and the like.

        What is added is tokenizer.json's own business: `add_bos_token` of tokenizer_config.json has no say beside it, as in
        transformers.
        """
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of a whole sequence; equal to what `detokenizer` gives piece by piece."""
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return detokenizer.feed(ids) + detokenizer.finish()

    def detokenizer(self, *, skip_special_tokens: bool, keep: frozenset[int] = frozenset()) -> Detokenizer:
        """A fresh detokenizer. The special tokens in `keep` are written in any case: a parser needs them."""
        skip = self.special_ids - keep if skip_special_tokens else frozenset()
        if self._table is not None:
            return ByteDetokenizer(self._table, skip)
        return WindowDetokenizer(lambda ids: self._backend.decode(list(ids), skip_special_tokens=False), skip)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the model; {} where there is no such file. Raises ModelError when it is no JSON object."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return value


def _token_text(value: Any) -> str | None:
    """tokenizer_config.json writes a token as its text or as an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None

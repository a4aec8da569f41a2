"""A model's tokenizer: loaded by transformers, which knows every family's files, and used through the `tokenizers` library,
which is fast and thread-safe.

transformers would import torch where it finds it. The front must not: `serve.py` hides torch before anything is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import tokenizers

from banyan_runtime.errors import ModelError
from banyan_runtime.front.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from banyan_runtime.front.text.vocabulary import token_bytes
from banyan_runtime.hub.files import TOKENIZERS, read_bytes, read_object_if_any, read_text, shown

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_BESIDE: Final = ("merges.txt", "added_tokens.json", "special_tokens_map.json", "tokenizer_config.json", "chat_template.jinja")
_POINTER_BYTES: Final = 200
_LARGEST_FILE: Final = 128 << 20  # the largest known, of a vocabulary of 262,144 tokens, has 35 MB; reading takes ten times that
_LARGEST_ID: Final = (1 << 22) - 1  # a table has a row for every id, used or not; the largest known vocabulary has 262,208
_PROBES: Final = ("Hello world", "a 1 été, 日本")
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
        if (highest := max(vocabulary.values(), default=-1)) > _LARGEST_ID:
            raise ModelError(f"tokenizer.json: a token has the id {highest}; at most {_LARGEST_ID} is supported")
        self.size = 1 + highest  # ids may have gaps: what counts is the highest one
        decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else None
        self._table = token_bytes(backend, decoder, vocabulary, self.added)

    @property
    def whole(self) -> bytes | None:
        """The tokenizer as `restored` takes it; None for one with parts in Python."""
        try:
            return self._backend.to_str().encode()
        except BaseException as error:  # whatever word the library has for it
            if not _is_failure(error):
                raise
            return None

    @staticmethod
    def restored(folder: Path, whole: bytes) -> Tokenizer:
        """The tokenizer in `folder` that another process has loaded, at a fraction of the cost: without transformers."""
        try:
            backend = tokenizers.Tokenizer.from_str(whole.decode())
        except BaseException as error:  # it does not read what it has written
            if not _is_failure(error):
                raise
            return Tokenizer.load(folder)
        return Tokenizer(backend, read_object_if_any(folder / "tokenizer_config.json"))

    @staticmethod
    def load(folder: Path) -> Tokenizer:
        """Read the tokenizer in `folder`. Raises ModelError when it is missing or broken."""
        if not any((folder / name).is_file() for name in TOKENIZERS):  # transformers would make an empty one out of nothing
            raise ModelError(
                f"{folder}: holds no tokenizer (tokenizer.json); put it there, name another folder with --tokenizer-path, or serve "
                "token ids only with --skip-tokenizer-init"
            )
        for name in (*TOKENIZERS, *_BESIDE):
            file = folder / name
            if file.is_file() and (size := file.stat().st_size) > _LARGEST_FILE:
                raise ModelError(f"{file}: has {size} bytes; at most {_LARGEST_FILE} are read, no tokenizer needs more")
            if file.is_file() and size <= _POINTER_BYTES:
                read_bytes(file, size)  # refuses a pointer of Git LFS, which libraries would say other things of
        settings = read_object_if_any(folder / "tokenizer_config.json")
        _check_settings(settings, folder / "tokenizer_config.json")
        _check_settings(read_object_if_any(folder / "special_tokens_map.json"), folder / "special_tokens_map.json")
        if (folder / "chat_template.jinja").is_file():  # transformers reads it too
            read_text(folder / "chat_template.jinja")
        declared = _declared(folder)
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        try:
            loaded = AutoTokenizer.from_pretrained(str(folder), config=declared, local_files_only=True, trust_remote_code=False)
        except BaseException as error:  # whatever a file that is missing or broken makes the libraries raise
            if not _is_failure(error):
                raise
            raise ModelError(
                f"{_culprit(folder)}: the tokenizer cannot be loaded ({_one_line(error)}). A model folder needs tokenizer.json and "
                "tokenizer_config.json; --skip-tokenizer-init serves token ids without them"
            ) from error
        if not isinstance(loaded, PreTrainedTokenizerFast):
            raise ModelError(
                f"{folder}: {type(loaded).__name__} has no fast form (tokenizer.json), which Banyan needs; "
                "convert it, or serve token ids only with --skip-tokenizer-init"
            )
        _compare(folder, loaded.backend_tokenizer)
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


def _declared(folder: Path) -> PretrainedConfig:
    """What tells transformers the kind of tokenizer: the model's type, and nothing else of config.json. The whole of it would
    be judged by transformers' rules, and a key that nobody needs here would look like a broken tokenizer."""
    from transformers import AutoConfig, PretrainedConfig

    file = folder / "config.json"
    config = read_object_if_any(file)
    for key in ("model_type", "tokenizer_class", "transformers_version"):  # transformers looks for the latter itself
        if not isinstance(config.get(key), str | None):
            raise ModelError(f"{file}: '{key}' is {shown(config[key])}, not text")
    try:
        declared = AutoConfig.for_model(config.get("model_type") or "")
    except Exception:  # a type that transformers does not know, or cannot make of nothing: tokenizer_config.json decides alone
        declared = PretrainedConfig()
    if config.get("tokenizer_class"):
        declared.tokenizer_class = config["tokenizer_class"]
    return declared


def _compare(folder: Path, made: tokenizers.Tokenizer) -> None:
    """Raises ModelError for a tokenizer that was made of SentencePiece's file and gives other ids than SentencePiece: the file alone does
    not tell transformers all rules, which come with the class that tokenizer_config.json names."""
    file = folder / "tokenizer.model"
    if (folder / "tokenizer.json").is_file() or not file.is_file():
        return
    from sentencepiece import SentencePieceProcessor

    try:
        own = SentencePieceProcessor(model_file=str(file))
    except (OSError, RuntimeError):  # tiktoken's file has the same name
        return
    if any(own.encode(text) != made.encode(text, add_special_tokens=False).ids for text in _PROBES):
        raise ModelError(
            f"{file}: gives other tokens than SentencePiece, since tokenizer_config.json does not name the model's tokenizer_class; set it "
            "there (LlamaTokenizer, GemmaTokenizer), or put tokenizer.json beside it"
        )


def _is_failure(error: BaseException) -> bool:
    """Whether something failed, as opposed to somebody asking to stop. A panic in Rust is no Exception."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _culprit(folder: Path) -> Path:
    """The file to blame when a tokenizer cannot be loaded: tokenizer.json if it is broken by itself, else the folder."""
    file = folder / "tokenizer.json"
    try:
        if file.is_file():
            tokenizers.Tokenizer.from_file(str(file))
    except BaseException as error:
        if not _is_failure(error):
            raise
        return file
    return folder


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_SHOWN_CHARACTERS]}"


def _check_settings(settings: Mapping[str, Any], file: Path) -> None:
    """Raises ModelError for a key of tokenizer_config.json or special_tokens_map.json that is of the wrong type."""
    for key, (fits, form) in _FORMS.items():
        if (value := settings.get(key)) is not None and not fits(value):
            raise ModelError(f"{file}: '{key}' is {shown(value)}, not {form}")


def _is_token(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and isinstance(value.get("content"), str))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_template(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list)
        and all(
            isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str) for entry in value
        )
    )


def _are_tokens(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_token, value))


def _are_tokens_by_id(value: Any) -> bool:
    return isinstance(value, dict) and all(key.isdecimal() and int(key[:10]) <= _LARGEST_ID and _is_token(value[key]) for key in value)


_FORMS: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    **dict.fromkeys(_NAMED, (_is_token, "a token's text or an object with its 'content'")),
    "additional_special_tokens": (_are_tokens, "a list of tokens"),
    "added_tokens_decoder": (_are_tokens_by_id, f"an object of tokens by id, of at most {_LARGEST_ID}"),
    "chat_template": (_is_template, "text or a list of objects with 'name' and 'template'"),
    "tokenizer_class": (_is_text, "text"),
}
_SHOWN_CHARACTERS: Final = 300  # of a library's own words


def _token_text(value: Any) -> str | None:
    """tokenizer_config.json writes a token as its text or as an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None

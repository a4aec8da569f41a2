"""JSON files of a model, read with bounds: whoever made the model is not trusted, and what is wrong names the file and the key.

A file costs at most a small multiple of its bound before it is refused, whatever it holds.
"""

from __future__ import annotations

import json
import reprlib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from banyan_runtime.errors import AccessError, ModelError

_TEXT: Final = ("text_config", "llm_config", "language_config")
JSON_BYTES: Final = 8 << 20  # tokenizer_config.json of a vocabulary with 6,000 added tokens has 1.2 MB
INDEX_BYTES: Final = 32 << 20  # the index of a checkpoint with 90,000 tensors has 9 MB
TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "tekken.json", "vocab.json")  # any of these makes a tokenizer
_VALUES: Final = 500_000  # of one file: a value takes two bytes there and 200 in memory; 14,000 tensors make 200,000

_POINTER: Final = b"version https://git-lfs"

_repr = reprlib.Repr()
_repr.maxlevel, _repr.maxdict, _repr.maxlist, _repr.maxstring, _repr.maxother = 2, 3, 4, 80, 80


def text_key(config: Mapping[str, Any]) -> str | None:
    """The key of the text decoder's settings in the config.json of a model that also reads images or sound; None: they are at the top."""
    return next((key for key in _TEXT if isinstance(config.get(key), dict)), None)


def read_bytes(path: Path, most: int) -> bytes:
    """The contents of a regular file of at most `most` bytes. Raises ModelError, AccessError, FileNotFoundError."""
    try:
        if path.exists() and not path.is_file():  # opening a pipe would wait for ever
            raise ModelError(f"{path}: is no regular file; fetch the model again")
        with path.open("rb") as file:
            content = file.read(most + 1)
    except PermissionError:
        raise AccessError(f"{path}: may not be read; give this user read access (fsGroup, or chmod a+rX)") from None
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror}); fetch the model again") from error
    refuse_pointer(path, content)
    if len(content) > most:
        raise ModelError(f"{path}: is larger than {most >> 20} MiB, which no file of this kind is; fetch the model again")
    return content


def refuse_pointer(path: Path, content: bytes) -> None:
    """Raises ModelError for a file that is what Git LFS leaves in the place of one that was not fetched. `content`: 8 bytes or more."""
    if len(content) >= 8 and content.startswith(_POINTER[: len(content)]):
        raise ModelError(f"{path}: is a pointer of Git LFS and not the file itself; run 'git lfs pull' there, or fetch the model otherwise")


def read_text(path: Path, most: int = JSON_BYTES) -> str:
    """The contents of a file as UTF-8 text. Raises ModelError, AccessError, FileNotFoundError."""
    try:
        return read_bytes(path, most).decode()
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: is not UTF-8 text ({error.reason} at byte {error.start}); fetch the model again") from None


def read_object(path: Path, most: int = JSON_BYTES) -> dict[str, Any]:
    """The JSON object that a file of at most `most` bytes holds. Raises ModelError, AccessError, FileNotFoundError."""
    return parse_object(read_bytes(path, most), str(path))


def read_object_if_any(path: Path) -> dict[str, Any]:
    """As `read_object`, and {} where there is no such file."""
    try:
        return read_object(path)
    except FileNotFoundError:
        return {}


def parse_object(content: bytes, where: str) -> dict[str, Any]:
    """The JSON object in `content`, in which no object may have a key twice. Raises ModelError that begins with `where`.

    NaN and Infinity are taken, as Python's and transformers' readers do: who reads a number judges it.
    """
    if content.count(b",") + content.count(b":") + content.count(b"[") > _VALUES:
        raise ModelError(f"{where}: holds more than {_VALUES:,} values, which no file of this kind does; fetch the model again")
    try:
        value = json.loads(content.decode(), object_pairs_hook=_distinct)
    except RecursionError:
        raise ModelError(f"{where}: is nested too deeply; fetch the model again") from None
    except ValueError as error:  # also what is not UTF-8, and integers of thousands of digits
        raise ModelError(f"{where}: cannot be read as JSON ({error}); fetch the model again") from None
    if not isinstance(value, dict):
        raise ModelError(f"{where}: is {type(value).__name__}, not a JSON object; fetch the model again")
    return value


def shown(value: object) -> str:
    """A value from a file as errors show it: on one line, and not too much of it."""
    return _repr.repr(value)


def token_ids(config: Mapping[str, Any], key: str, where: str) -> frozenset[int]:
    """The token ids that a key names: none, one, or a list. Raises ModelError that begins with `where`."""
    value = config.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 1 << 31:
            raise ModelError(f"{where}: '{key}' is {shown(value)}, not a token id or a list of them")
    return frozenset(ids)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {shown(twice)} is there twice")
    return value

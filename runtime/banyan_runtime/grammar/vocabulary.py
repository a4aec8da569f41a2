"""The vocabulary that grammars are compiled for: read from tokenizer.json, without transformers and torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from banyan_runtime.errors import ModelError
from banyan_runtime.grammar.errors import GrammarBusy, GrammarError
from banyan_runtime.hub.files import read_object_if_any

_LARGEST_FILE: Final = 128 << 20  # the largest known, of a vocabulary of 262,144 tokens, has 35 MB
_BLANKS: Final = ("Ċ", "ĊĊ", "\n", "\n\n", "<0x0A>")  # in a byte-level vocabulary, and in others


@dataclass(frozen=True)
class Vocabulary:
    tokenizer: str = field(repr=False)  # tokenizer.json, with the tokens that only tokenizer_config.json names
    size: int  # rows of the model's head, which may be more than there are tokens
    tokens: int  # ids there are, gaps included
    eos_ids: tuple[int, ...]  # end any output; never part of one
    added: Mapping[str, int] = field(repr=False)  # tokens beside the vocabulary proper, such as <tool_call>
    blanks: frozenset[int] = frozenset()  # an empty line, and the end of one

    @staticmethod
    def load(folder: Path, size: int, eos_ids: Iterable[int]) -> Vocabulary:
        """Of the tokenizer in `folder`. `size` 0: as many as it has tokens. Raises GrammarError for one that grammars cannot be
        compiled for."""
        file = folder / "tokenizer.json"
        try:
            if not file.is_file():
                raise GrammarError("this model has no tokenizer.json, without which outputs cannot be held to a grammar.")
            if file.stat().st_size > _LARGEST_FILE:
                raise GrammarError(f"tokenizer.json is larger than {_LARGEST_FILE} bytes.")
            data = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
            settings = read_object_if_any(folder / "tokenizer_config.json")
        except OSError as error:  # too many open files, say
            raise GrammarBusy(f"this model's tokenizer cannot be read: {error}") from None
        except (msgspec.DecodeError, RecursionError, ModelError) as error:
            raise GrammarError(f"this model's tokenizer cannot be read: {error}") from None
        listed = data.get("added_tokens")
        entries = [entry for entry in listed if _is_token(entry)] if isinstance(listed, list) else []
        known = {entry["id"] for entry in entries}
        declared = settings.get("added_tokens_decoder")
        for key, entry in declared.items() if isinstance(declared, dict) else ():
            if key.isdecimal() and isinstance(entry, dict) and int(key[:10]) not in known and isinstance(entry.get("content"), str):
                flags = {name: bool(entry.get(name)) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
                entries.append({"id": int(key[:10]), "content": entry["content"], **flags})
        if len(entries) > len(known):
            data["added_tokens"] = sorted(entries, key=lambda entry: entry["id"])
        data["truncation"] = data["padding"] = None
        added = {entry["content"]: entry["id"] for entry in entries}
        model = data.get("model")
        texts = model.get("vocab") if isinstance(model, dict) else None
        every = {**texts, **added} if isinstance(texts, dict) else added
        highest = max((token_id for token_id in every.values() if isinstance(token_id, int)), default=-1)
        tokens = 1 + max(highest, len(texts) - 1 if isinstance(texts, list) else -1)
        size = size or tokens
        return Vocabulary(
            msgspec.json.encode(data).decode(),
            size,
            tokens,
            tuple(sorted({token_id for token_id in eos_ids if 0 <= token_id < size})),
            added,
            frozenset(token_id for text in _BLANKS if isinstance(token_id := every.get(text), int) and token_id < size),
        )


def _is_token(entry: object) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("id"), int) and isinstance(entry.get("content"), str)

"""Tokenizers of folders without tokenizer.json: SentencePiece's file, tiktoken's, and Mistral's tekken.json."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any, Final

import pytest

from banyan_runtime.errors import ModelError
from banyan_runtime.front.text.tokenizer import Tokenizer

TEXT: Final = "The dog and the other dog, in 1999: été 日本 \n  end"
TOKENS: Final = [*(bytes([byte]) for byte in range(256)), b"th", b"the", b" the", b" d", b"og", b" dog"]
TEKKEN: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def write(folder: Path, **files: Any) -> None:
    folder.mkdir(exist_ok=True)
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))


def test_a_sentencepiece_file_gives_its_own_ids_or_is_refused(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    (tmp_path / "text").write_text(f"{TEXT} the lazy dogs sleep\n" * 200)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(tmp_path / "tokenizer"), vocab_size=320, model_type="bpe", byte_fallback=True,
        hard_vocab_limit=False, normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
    )  # fmt: skip
    write(tmp_path, config={"model_type": "llama"}, tokenizer_config={"tokenizer_class": "LlamaTokenizer"})
    found, own = Tokenizer.load(tmp_path), sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    ids = found.encode(TEXT, add_special_tokens=False)
    assert ids == own.encode(TEXT)
    assert found.decode(ids, skip_special_tokens=False) == f" {TEXT}"  # as a text that goes on behind a prompt
    assert found.has_bytes
    write(tmp_path, tokenizer_config={"tokenizer_class": "GemmaTokenizer"})  # which cuts texts by other rules
    with pytest.raises(ModelError, match=r"tokenizer\.model: .*tokenizer_class"):
        Tokenizer.load(tmp_path)


def test_a_tiktoken_file_gives_the_ranks_of_its_tokens(tmp_path: Path) -> None:
    pytest.importorskip("tiktoken")
    lines = (base64.b64encode(token) + f" {rank}\n".encode() for rank, token in enumerate(TOKENS))
    (tmp_path / "tokenizer.model").write_bytes(b"".join(lines))
    write(tmp_path, config={"model_type": "llama"}, tokenizer_config={"tokenizer_class": "PreTrainedTokenizerFast"})
    found = Tokenizer.load(tmp_path)
    assert found.encode("the dog", add_special_tokens=False) == [TOKENS.index(b"the"), TOKENS.index(b" dog")]
    assert found.decode(found.encode(TEXT, add_special_tokens=False), skip_special_tokens=False) == TEXT


def test_a_tekken_file_counts_its_special_tokens_first(tmp_path: Path) -> None:
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    counts = {"num_vocab_tokens": len(TOKENS), "default_vocab_size": len(TOKENS) + 5, "default_num_special_tokens": 5}
    tekken = {
        "config": {"pattern": TEKKEN, "version": "v7", **counts},
        "vocab": [{"rank": rank, "token_bytes": base64.b64encode(token).decode()} for rank, token in enumerate(TOKENS)],
        "special_tokens": [{"rank": rank, "token_str": token, "is_control": True} for rank, token in enumerate(special)],
    }
    write(tmp_path, config={"model_type": "mistral"}, tekken=tekken)
    found = Tokenizer.load(tmp_path)
    assert found.encode("the dog", add_special_tokens=False) == [5 + TOKENS.index(b"the"), 5 + TOKENS.index(b" dog")]
    assert found.decode(found.encode(TEXT, add_special_tokens=False), skip_special_tokens=False) == TEXT
    assert found.special_ids == set(range(5))

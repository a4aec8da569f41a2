"""Cutting a text in every way that a stream may cut it, and small tokenizers made on the spot."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import models as kinds

from banyan_runtime import wire
from banyan_runtime.front.text.tokenizer import Tokenizer as OurTokenizer

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def splits(text: str, shuffled: int = 40) -> Iterator[list[str]]:
    """The text in one delta, in single characters, in every two deltas, and in random deltas."""
    yield [text]
    yield list(text)
    yield from ([text[:at], text[at:]] for at in range(1, len(text)))
    dice = random.Random(len(text))
    for _ in range(shuffled):
        cuts = sorted(dice.randrange(len(text) + 1) for _ in range(dice.randrange(1, 6)))
        yield [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def engine_info(**changes: Any) -> wire.EngineInfo:
    """What an engine with room for 2,048 tokens says of itself."""
    facts: dict[str, Any] = {
        "architecture": "LlamaForCausalLM",
        "model_type": "llama",
        "dtype": "float32",
        "device": "cpu",
        "attention_backend": "torch_native",
        "vocab_size": 100,
        "context_len": 2048,
        "max_model_len": 2048,
        "page_size": 1,
        "max_total_tokens": 8192,
        "max_req_input_len": 2042,
        "max_running_requests": 4,
        "weights_bytes": 0,
        "kv_bytes": 0,
    }
    return wire.EngineInfo(**{**facts, **changes})


@functools.cache
def ours(folder: Path) -> OurTokenizer:
    return OurTokenizer.load(folder)


@functools.cache
def reference(folder: Path) -> Any:
    """The same tokenizer as transformers reads it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def byte_level(folder: Path, *, added: tuple[str, ...] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), **settings: object) -> Path:
    """Write a byte-level tokenizer whose ids 0, 1 … are `added`, followed by the 256 bytes."""
    tokenizer = Tokenizer(kinds.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + len(added),
        special_tokens=[AddedToken(text, special=True) for text in added],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello"], trainer)
    return _write(folder, tokenizer, {"eos_token": "<|im_end|>", "chat_template": CHATML, **settings})


def byte_fallback(folder: Path) -> Path:
    """Write a SentencePiece-like tokenizer: `▁` for a space, `<0xNN>` for bytes that no delta covers."""
    deltas = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "c", "你", "▁a"]
    vocabulary = {delta: index for index, delta in enumerate(deltas)}
    tokenizer = Tokenizer(kinds.BPE(vocab=vocabulary, merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _write(folder, tokenizer, {"eos_token": "</s>", "bos_token": "<s>"})


def word_pieces(folder: Path) -> Path:
    """Write a WordPiece tokenizer: its decoder has rules of its own, so no token has bytes."""
    words = ["[UNK]", "play", "##ing", "##ed", "chess", "and", "!"]
    tokenizer = Tokenizer(kinds.WordPiece(vocab={word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return _write(folder, tokenizer, {})


def _write(folder: Path, tokenizer: Tokenizer, settings: dict[str, object]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder

"""Prompts that are filled in between a beginning and an end (`suffix`), in the markers that a model was trained with."""

from __future__ import annotations

from typing import Final

from banyan_runtime.front.errors import invalid, unsupported
from banyan_runtime.front.text.tokenizer import Tokenizer

_MARKERS: Final = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
)
"""What stands before the beginning, before the end, and where the model goes on."""


def infill(tokenizer: Tokenizer, prompt: str | list[int], suffix: str) -> str:
    """Raises ApiError for models that do not know how, and prompts that are no text."""
    if not isinstance(prompt, str):
        raise invalid("suffix", "suffix needs a prompt that is text.")
    for before, behind, middle in _MARKERS:
        if before in tokenizer.added and behind in tokenizer.added and middle in tokenizer.added:
            return f"{before}{prompt}{behind}{suffix}{middle}"
    raise unsupported("suffix", "this model has no tokens for text to be filled in")

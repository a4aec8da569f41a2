"""Vocabularies."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.grammar.walks import Language


@pytest.fixture(scope="session")
def tiny(tiny_chat: Path) -> Language:
    """The tokenizer of the repository's model, whose head has more rows than there are tokens."""
    return Language.load(tiny_chat, padding=100)


@pytest.fixture(scope="session")
def smol(smollm2: Path) -> Language:
    return Language.load(smollm2)


@pytest.fixture(scope="session")
def qwen3(qwen3_tokenizer: Path) -> Language:
    return Language.load(qwen3_tokenizer, eos="<|im_end|>", padding=267)

"""Tokenizers of the three kinds, made on the spot."""

from __future__ import annotations

import pytest

from banyan_runtime.front.text.tokenizer import Tokenizer
from tests.front import support


@pytest.fixture(scope="session")
def bytes_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(support.byte_level(tmp_path_factory.mktemp("byte-level")))


@pytest.fixture(scope="session")
def pieces_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(support.byte_fallback(tmp_path_factory.mktemp("byte-fallback")))


@pytest.fixture(scope="session")
def words_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(support.word_pieces(tmp_path_factory.mktemp("word-delta")))

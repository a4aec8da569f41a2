"""Tokenizers of the three kinds, made on the spot, and what plans requests for the small model of the repository."""

from __future__ import annotations

from pathlib import Path

import pytest

from banyan_runtime.front.prepare.planner import Planner
from banyan_runtime.front.text.tokenizer import Tokenizer
from tests.unit.front import support
from tests.unit.front.planning import planner_of


@pytest.fixture(scope="session")
def bytes_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(support.byte_level(tmp_path_factory.mktemp("byte-level")))


@pytest.fixture(scope="session")
def pieces_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(support.byte_fallback(tmp_path_factory.mktemp("byte-fallback")))


@pytest.fixture(scope="session")
def words_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(support.word_pieces(tmp_path_factory.mktemp("word-delta")))


@pytest.fixture(scope="module")
def planner(tiny_chat: Path) -> Planner:
    return planner_of(tiny_chat)

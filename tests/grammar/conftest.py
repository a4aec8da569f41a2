"""Lets the tests of grammars import what they share, and vocabularies. Appended, so that nothing here comes before an installed package."""

import sys
from pathlib import Path

ROOT = str(Path(__file__).parents[2])
if ROOT not in sys.path:
    sys.path.append(ROOT)

import pytest  # noqa: E402

from banyan_runtime.grammar.backends.llguidance import LlguidanceBackend  # noqa: E402
from tests.grammar.walks import Language  # noqa: E402


@pytest.fixture(scope="session")
def tiny(tiny_chat: Path) -> Language:
    """The tokenizer of the repository's model, whose head has more rows than there are tokens."""
    return Language.load(tiny_chat, LlguidanceBackend, padding=100)


@pytest.fixture(scope="session")
def smol(smollm2: Path) -> Language:
    return Language.load(smollm2, LlguidanceBackend)


@pytest.fixture(scope="session")
def qwen3(qwen3_tokenizer: Path) -> Language:
    return Language.load(qwen3_tokenizer, LlguidanceBackend, eos="<|im_end|>", padding=267)

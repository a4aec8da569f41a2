"""The grammars of an engine process: compiled beside its loop, for the vocabulary of its model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from banyan_runtime.config import ServerConfig
from banyan_runtime.grammar.pool import GrammarPool
from banyan_runtime.grammar.vocabulary import Vocabulary
from banyan_runtime.hub.files import read_object_if_any, token_ids
from banyan_runtime.model.host import cores
from banyan_runtime.server.clients import Wake
from banyan_runtime.step import RunnerInfo

if TYPE_CHECKING:
    from banyan_runtime.grammar.llguidance import LlguidanceBackend

log = logging.getLogger("banyan")


def grammars_of(config: ServerConfig, model_dir: Path, tokenizer_dir: Path, known: RunnerInfo, wake: Wake) -> GrammarPool | None:
    """None: outputs cannot be held to grammars here."""
    if config.grammar_backend == "none" or config.skip_tokenizer_init:
        return None
    if config.grammar_backend == "xgrammar":
        log.info("Grammars are computed by llguidance: --grammar-backend xgrammar changes nothing.")
    files = (model_dir / "generation_config.json", model_dir / "config.json")
    ends = [token_ids(read_object_if_any(file), "eos_token_id", str(file)) for file in files]  # here: a bad file ends the start

    def vocabulary() -> Vocabulary:
        return Vocabulary.load(tokenizer_dir, known.vocab_size, frozenset().union(*ends))

    def open_backend(vocabulary: Vocabulary) -> LlguidanceBackend:
        from banyan_runtime.grammar.llguidance import LlguidanceBackend  # 0.2 s, on a thread of the pool

        return LlguidanceBackend(vocabulary)

    idle = 1 if known.device.startswith("cpu") else cores()  # on the CPU the model has them, and a step takes much longer
    return GrammarPool(vocabulary, open_backend, wake.wake, cores=idle)

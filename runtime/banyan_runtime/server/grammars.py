"""The grammars of an engine process: compiled beside its loop, for the vocabulary of its model."""

from __future__ import annotations

import contextlib
import os
import select
from pathlib import Path

from banyan_runtime.config import ServerConfig
from banyan_runtime.grammar.pool import GrammarPool
from banyan_runtime.grammar.registry import open_backend
from banyan_runtime.grammar.vocabulary import Vocabulary
from banyan_runtime.hub.files import read_object_if_any, token_ids
from banyan_runtime.link import Link
from banyan_runtime.model.host import cores
from banyan_runtime.step import RunnerInfo


class Wake:
    """What a loop without work waits for: a message on its link, room for one that is unsent, or a call of `wake` from any thread."""

    def __init__(self, link: Link) -> None:
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._link = link
        self._poll = select.poll()
        self._poll.register(self._event, select.POLLIN)

    def wake(self) -> None:
        os.eventfd_write(self._event, 1)

    def wait(self) -> None:
        if self._link.ended:  # it could be read for ever
            with contextlib.suppress(KeyError):
                self._poll.unregister(self._link)
        else:
            self._poll.register(self._link, select.POLLIN | (select.POLLOUT if self._link.unsent else 0))
        self._poll.poll()
        with contextlib.suppress(BlockingIOError):  # it was the link
            os.eventfd_read(self._event)


def grammars_of(config: ServerConfig, model_dir: Path, tokenizer_dir: Path, known: RunnerInfo, wake: Wake) -> GrammarPool | None:
    """None: outputs cannot be held to grammars here."""
    if config.grammar_backend == "none" or config.skip_tokenizer_init:
        return None

    files = (model_dir / "generation_config.json", model_dir / "config.json")
    ends = [token_ids(read_object_if_any(file), "eos_token_id", str(file)) for file in files]  # here: a bad file ends the start

    def vocabulary() -> Vocabulary:
        return Vocabulary.load(tokenizer_dir, known.vocab_size, frozenset().union(*ends))

    idle = 1 if known.device.startswith("cpu") else cores()  # on the CPU the model has them, and a step takes much longer
    return GrammarPool(vocabulary, lambda those: open_backend(config.grammar_backend, those), wake.wake, cores=idle)

"""transformers' continuous batching, in process, from the environment that runs this."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from peers.peer import Running, Setup, module, only_bf16, paths
from peers.process import InProcess, pinned


class Transformers:
    name = "transformers"

    def get(self) -> str:
        return f"transformers {version('transformers')}, torch {version('torch')}, in process"

    def convert(self, model: Path, weights: str) -> Path:
        only_bf16(weights)
        return model

    @contextlib.contextmanager
    def start(self, model: Path, setup: Setup) -> Iterator[Running]:
        command = [*module(sys.executable, "transformers_library"), str(model), str(setup.threads)]
        with pinned(command, setup, paths(), piped=True) as process:
            running = InProcess(process)
            running.about = running.line()["about"]
            yield running

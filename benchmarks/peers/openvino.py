"""OpenVINO GenAI, in process: it has no server."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from peers import llama_cpp
from peers.peer import CACHE, Running, Setup, environment, module, only_bf16, paths
from peers.process import InProcess, pinned

VERSION: Final = "2026.4.1.0"


class OpenVino:
    name = "openvino"

    def get(self) -> str:
        self._python = environment(CACHE / f"openvino-genai-{VERSION}", ["install", f"openvino-genai=={VERSION}"])
        return f"openvino-genai {VERSION}, in process"

    def convert(self, model: Path, weights: str) -> Path:
        only_bf16(weights)
        return llama_cpp.gguf(model, "f16")  # it reads no bf16 from GGUF

    @contextlib.contextmanager
    def start(self, model: Path, setup: Setup) -> Iterator[Running]:
        cache_gb = max(2, math.ceil(setup.kv_tokens * 32e3 / 2**30))  # no model here has more than 23 KB a token
        arguments = [str(model), str(setup.threads), str(setup.streams), str(cache_gb)]
        with pinned([*module(str(self._python), "openvino_library"), *arguments], setup, paths(), piped=True) as process:
            running = InProcess(process)
            running.about = running.line()["about"]
            yield running

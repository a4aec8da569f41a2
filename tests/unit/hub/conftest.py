"""A mirror of the hub with tiny-chat on it, and fetching processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.models.mirror import Mirror, files_of, serving


@pytest.fixture
def mirror(tiny_chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    """ORG/tiny on a hub that this process, and those that it starts, are pointed to."""
    with serving(files_of(tiny_chat)) as mirror:
        for name in ("HF_TOKEN", "HF_TOKEN_PATH", "HF_HUB_OFFLINE", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "hf-home" / "token"))  # read at its import
        monkeypatch.setenv("HF_ENDPOINT", mirror.endpoint)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf-home"))
        monkeypatch.setenv("BANYAN_CACHE", str(tmp_path / "cache"))
        yield mirror


@pytest.fixture
def fetching() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `banyan-runtime models …`. What still runs is killed at the end."""
    started: list[subprocess.Popen[str]] = []

    def start(*words: str, **environment: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "banyan_runtime", "models", *words]
        variables = os.environ | {"OMP_NUM_THREADS": "1"} | environment
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()

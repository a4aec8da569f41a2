"""A mirror of the hub with tiny-chat on it, and fetching processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from banyan_runtime.hub.lease import STALE_S
from tests.support.models.mirror import Mirror, files_of, serving

FETCH = """
import functools, sys
from banyan_runtime.hub import cache, lease
cache.Lease = functools.partial(lease.Lease, beat_s=0.1, stale_s={stale_s})
from banyan_runtime.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def mirror(tiny_chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    """ORG/tiny on a hub that this process, and those that it starts, are pointed to."""
    with serving(files_of(tiny_chat)) as mirror:
        for name in ("HF_TOKEN", "HF_TOKEN_PATH", "HF_HUB_OFFLINE", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HF_ENDPOINT", mirror.endpoint)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf-home"))
        monkeypatch.setenv("BANYAN_CACHE", str(tmp_path / "cache"))
        yield mirror


@pytest.fixture
def fetching(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `banyan-runtime models …`. Its lease has quick beats and goes stale after `stale_s`. What still runs is killed at the end."""
    started: list[subprocess.Popen[str]] = []

    def start(*words: str, stale_s: float = STALE_S) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", FETCH.format(stale_s=stale_s), "models", *words]
        started.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        )
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()

"""A server whose model is an address: it fetches while it says so, serves, and mends a damaged copy at its next start."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.models.mirror import COMMIT, Mirror, files_of, serving
from tests.support.server.process import MODEL, StartServer

pytestmark = pytest.mark.long  # two servers
WEIGHTS = "model.safetensors"


@pytest.fixture
def mirror(tiny_chat: Path) -> Iterator[Mirror]:
    with serving(files_of(tiny_chat)) as mirror:
        yield mirror


def test_a_hub_model_is_fetched_served_and_mended_at_the_next_start(mirror: Mirror, tmp_path: Path, start_server: StartServer) -> None:
    environment = {"HF_ENDPOINT": mirror.endpoint, "BANYAN_CACHE": str(tmp_path), "HF_HOME": str(tmp_path / "hf")}
    address: Any = "hf://org/tiny"
    mirror.stop_at[WEIGHTS] = len(mirror.files[WEIGHTS]) * 3 // 4
    server = start_server("--revision", "v1", model=address, environment=environment)

    def percent() -> int:
        state = server.get("/readyz").json()
        return int(state["percent"]) if state["state"] == "downloading" else 0

    seen = server.eventually(percent, "a percent in /readyz")
    assert 0 < seen < 100
    assert 0 < server.metric("banyan_download_bytes") < server.metric("banyan_download_size_bytes")
    mirror.go.set()
    server.ready()
    answer = server.post("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3})
    assert answer.status_code == 200
    server.stop()

    weights = tmp_path / "models" / "hf" / "models--org--tiny" / "snapshots" / COMMIT / WEIGHTS
    os.truncate(weights, 1000)
    mirror.asked.clear()
    again = start_server("--revision", "v1", model=address, environment=environment).ready()
    assert any(WEIGHTS in line and "fetching" in line for line in again.lines)
    assert weights.read_bytes() == mirror.files[WEIGHTS]
    assert not mirror.sent("tokenizer.json")
    again.stop()

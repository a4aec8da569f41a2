"""A scripted server, input files, and one call that runs a batch as the command does."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from banyan_runtime.batch.cli import main
from tests.support.server.scripted import ScriptedServer, scripted_server  # noqa: F401


@dataclass
class Results:
    """What a run left: its exit code, its two files by custom_id, its manifest and its last words."""

    exit_code: int
    folder: Path
    words: dict[str, Any]
    output: list[dict[str, Any]] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)

    @property
    def manifest(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "manifest.json").read_text()))

    def error(self, custom_id: str) -> dict[str, Any]:
        return next(line for line in self.errors if line["custom_id"] == custom_id)


@pytest.fixture
def run(server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Results]:
    """Run a batch over `lines` (text lines, or the raw bytes of the file) against the scripted server."""
    words = tmp_path / "last-words"
    monkeypatch.setenv("BANYAN_TERMINATION_LOG", str(words))
    monkeypatch.delenv("BANYAN_RUN_ID", raising=False)

    def start(lines: list[str] | bytes, *arguments: str, name: str = "in.jsonl") -> Results:
        source = tmp_path / name
        source.write_bytes(lines if isinstance(lines, bytes) else "".join(text + "\n" for text in lines).encode())
        folder = tmp_path / "out"
        words.unlink(missing_ok=True)
        where = [] if "--server" in arguments or "--model-path" in arguments else ["--server", server.url]
        quick = ["--max-backoff", "0.01", "--server-timeout", "5"]
        code = main(["--input", os.fspath(source), "--output", os.fspath(folder), *where, *quick, *arguments])
        results = Results(code, folder, json.loads(words.read_text()))
        for kind in ("output", "errors"):
            if (path := folder / f"{kind}.jsonl").exists():
                getattr(results, kind).extend(json.loads(text) for text in path.read_text().splitlines())
        return results

    return start

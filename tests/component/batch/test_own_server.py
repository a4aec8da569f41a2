"""`--model-path`: a batch that brings its own server, a real one with the small trained model."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from banyan_runtime.batch.server import _sweep

SEEDS_LINES = """\
{"custom_id": "request-1", "method": "POST", "url": "/chat/completions", "body": {"model": "qwen/qwen2.5-0.5b-instruct", \
"messages": [{"role": "user", "content": "Tell me a joke about programming"}], "max_tokens": 50}}
{"custom_id": "request-2", "method": "POST", "url": "/chat/completions", "body": {"model": "qwen/qwen2.5-0.5b-instruct", \
"messages": [{"role": "user", "content": "What is Python?"}], "max_tokens": 50}}
"""
LONG_BODY = {"prompt": "a", "max_tokens": 400, "ignore_eos": True}
LONG_LINES = "".join(
    json.dumps({"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": LONG_BODY}) + "\n" for i in range(2000)
)


class OwnBatch:
    """A batch over a model under a path of its own, by which its processes are known."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.model = folder / "model"
        self.model.symlink_to(model)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, lines: str, *arguments: str) -> subprocess.Popen[bytes]:
        source = self.folder / "in.jsonl"
        source.write_text(lines)
        command = [sys.executable, "-m", "banyan_runtime", "batch", "--input", str(source), "--output", str(self.folder / "out")]
        environment = os.environ | {"BANYAN_TERMINATION_LOG": str(self.folder / "words"), "OMP_NUM_THREADS": "1"}
        log = (self.folder / "log").open("wb")
        self.process = subprocess.Popen(
            [*command, "--model-path", str(self.model), *arguments], env=environment, stderr=log, cwd=self.folder
        )
        log.close()
        return self.process

    @property
    def words(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "words").read_text()))

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def servers(self) -> list[psutil.Process]:
        """The server's processes: all that work in our folder but the batch itself."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.cwd() == str(self.folder) and (self.process is None or process.pid != self.process.pid):
                    found.append(process)
        return found

    def eventually(self, seen: Callable[[], object], limit_s: float = 90.0) -> None:
        deadline = time.monotonic() + limit_s
        while not seen():
            assert time.monotonic() < deadline, self.log
            time.sleep(0.05)


@pytest.fixture
def batch(tmp_path: Path, tiny_chat: Path) -> Iterator[OwnBatch]:
    own = OwnBatch(tmp_path, tiny_chat)
    yield own
    if own.process is not None:
        own.process.kill()
        own.process.wait()
    for process in own.servers():
        process.kill()


def test_the_seeds_lines_are_answered_by_a_server_started_for_them(batch: OwnBatch) -> None:
    process = batch.start(SEEDS_LINES)
    assert process.wait(120) == 0, batch.log
    output = [json.loads(text) for text in (batch.folder / "out" / "output.jsonl").read_text().splitlines()]
    assert [entry["custom_id"] for entry in output] == ["request-1", "request-2"]
    for entry in output:
        assert entry["response"]["status_code"] == 200
        assert entry["response"]["request_id"]
        assert entry["response"]["body"]["choices"][0]["message"]["content"]
        assert 0 < entry["response"]["body"]["usage"]["completion_tokens"] <= 50
    assert batch.words["requestCounts"] == {"total": 2, "completed": 2, "failed": 0}
    assert batch.words["usage"]["completionTokens"] == sum(entry["response"]["body"]["usage"]["completion_tokens"] for entry in output)
    assert "server state=" in batch.log
    assert batch.servers() == []


@pytest.mark.long
def test_embeddings_need_no_option_of_the_server_started_for_them(batch: OwnBatch) -> None:
    line = {"custom_id": "one", "method": "POST", "url": "/v1/embeddings", "body": {"input": "Hello there"}}
    assert batch.start(json.dumps(line) + "\n", "--endpoint", "/v1/embeddings").wait(120) == 0, batch.log
    (entry,) = [json.loads(text) for text in (batch.folder / "out" / "output.jsonl").read_text().splitlines()]
    assert len(entry["response"]["body"]["data"][0]["embedding"]) == 128
    assert batch.words["usage"]["promptTokens"] == entry["response"]["body"]["usage"]["prompt_tokens"] > 0


@pytest.mark.long
def test_a_model_that_cannot_be_served_is_explained_in_the_servers_words(batch: OwnBatch) -> None:
    batch.model.unlink()
    batch.model.mkdir()
    assert batch.start(SEEDS_LINES).wait(60) == 65, batch.log
    assert batch.words["code"] == "server_failed"
    assert "config.json" in batch.words["message"]
    assert batch.servers() == []


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_server_ends_with_the_batch_however_that_ends(batch: OwnBatch, number: signal.Signals) -> None:
    process = batch.start(LONG_LINES, "--endpoint", "/v1/completions", "--", "--max-running-requests", "4")
    batch.eventually(lambda: "phase=running" in batch.log)
    assert len(batch.servers()) >= 2, "front and engine"
    process.send_signal(number)
    assert process.wait(30) == (143 if number is signal.SIGTERM else -9)
    batch.eventually(lambda: batch.servers() == [], limit_s=20 if number is signal.SIGKILL else 1)
    assert not (batch.folder / "out" / "manifest.json").exists()


def test_folders_of_runs_that_were_killed_outright_are_removed(tmp_path: Path) -> None:
    """By the next one; not those of runs that live, or have just begun, or are somebody else's."""

    def folder(name: str, age_s: float) -> Path:
        made = tmp_path / name
        made.mkdir()
        (made / "log").write_text("words")
        (held := made / "held").touch()
        os.utime(held, times=(time.time() - age_s,) * 2)
        return made

    killed, alive, young, others = folder("banyan-batch-a", 99), folder("banyan-batch-b", 99), folder("banyan-batch-c", 9), folder("x", 99)
    for name, make in {"banyan-batch-d": os.mkfifo, "banyan-batch-e": lambda path: path.symlink_to(killed / "log")}.items():
        (tmp_path / name).mkdir()
        make(tmp_path / name / "held")  # anybody may have done that
    with (alive / "held").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        _sweep(tmp_path)
    assert [one.exists() for one in (killed, alive, young, others)] == [False, True, True, True]
    assert (tmp_path / "banyan-batch-d").exists()
    assert (tmp_path / "banyan-batch-e").exists()


@pytest.mark.long
def test_a_server_that_dies_ends_the_run(batch: OwnBatch) -> None:
    process = batch.start(LONG_LINES, "--endpoint", "/v1/completions", "--", "--max-running-requests", "4")
    batch.eventually(lambda: "phase=running" in batch.log)
    for server in batch.servers():
        with contextlib.suppress(psutil.NoSuchProcess):  # the engine follows its front at once
            server.kill()
    assert process.wait(30) == 69, batch.log
    assert batch.words["code"] == "server_failed"
    assert "SIGKILL" in batch.words["message"]
    assert not (batch.folder / "out" / "manifest.json").exists()

from __future__ import annotations

from pathlib import Path

import pytest

from banyan_runtime.config import ServerConfig
from banyan_runtime.model import host
from banyan_runtime.server.api_processes import count

GIB = 1 << 30


@pytest.mark.parametrize(
    ("processors", "memory", "processes"),
    [(1, 8, 1), (7, 64, 1), (8, 64, 2), (12, 64, 3), (16, 128, 4), (192, 2048, 4), (192, 8, 2), (64, 1, 1)],
)
def test_their_number_goes_by_what_the_machine_has_beside_a_gpu(processors: int, memory: int, processes: int) -> None:
    assert count.by_itself(processors, memory * GIB) == processes


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine of 64 processors; the path of its GPU's driver, which is not there yet."""
    monkeypatch.setattr(host, "processors", lambda: 64)
    monkeypatch.setattr(host, "memory_limit", lambda: 256 * GIB)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    driver = tmp_path / "nvidiactl"
    monkeypatch.setattr(count, "_DRIVERS", (str(driver),))
    return driver


def test_one_process_answers_for_a_model_on_the_cpu(large: Path) -> None:
    assert count.wanted(ServerConfig(model_path="m")) == 1
    large.touch()
    assert count.wanted(ServerConfig(model_path="m", device="cpu")) == 1


def test_several_answer_for_one_on_a_gpu(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert count.wanted(ServerConfig(model_path="m", device="cuda")) == 4
    large.touch()
    assert count.wanted(ServerConfig(model_path="m")) == 4
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert count.wanted(ServerConfig(model_path="m")) == 1


def test_what_is_asked_for_counts(large: Path) -> None:
    large.touch()
    assert count.wanted(ServerConfig(model_path="m", tokenizer_worker_num=1)) == 1
    assert count.wanted(ServerConfig(model_path="m", device="cpu", tokenizer_worker_num=3)) == 3


def test_threads_of_a_library_say_nothing_of_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    found = host.processors()
    monkeypatch.setenv("OMP_NUM_THREADS", "123")
    assert (host.cores(), host.processors()) == (123, found)

"""The engine process alone, with a test in the place of the front."""

from __future__ import annotations

import functools
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from banyan_runtime import arguments, wire
from banyan_runtime.link import Link
from banyan_runtime.server.engine_process import Boot


@dataclass
class Bench:
    """A front of a few lines."""

    listening: socket.socket
    process: subprocess.Popen[bytes]
    heard: deque[bytes] = field(default_factory=deque)

    @functools.cached_property
    def link(self) -> Link:
        return Link(self.listening.accept()[0])

    def receive(self, limit_s: float = 60.0) -> wire.EngineMessage:
        while not self.heard:
            assert select.select([self.link], [], [], limit_s)[0], "the engine says nothing"
            self.heard += self.link.receive()
            assert not self.link.ended, "the engine is gone"
        return wire.decode_engine(self.heard.popleft())

    def until(self, kind: type[wire.EngineMessage]) -> list[wire.EngineMessage]:
        """Everything up to the first message of this kind."""
        messages = [self.receive()]
        while not isinstance(messages[-1], kind):
            messages.append(self.receive())
        return messages

    def send(self, message: wire.FrontMessage) -> None:
        self.link.send(wire.encode(message))


StartEngine = Callable[..., Bench]


@pytest.fixture
def start_engine(tmp_path: Path, tiny_chat: Path) -> Iterator[StartEngine]:
    benches: list[Bench] = []

    def start(*flags: str, model: Path = tiny_chat) -> Bench:
        folder = tmp_path / "private"
        folder.mkdir()
        address = f"{folder}/engine"
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(address)
        listening.listen(1)
        listening.settimeout(60)
        process = subprocess.Popen(
            [sys.executable, "-m", "banyan_runtime.server.engine_process"],
            stdin=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert process.stdin is not None
        boot = Boot(
            arguments.parse(["--model-path", str(model), *flags]).engine_json(),
            str(model),
            str(model),
            address,
            str(folder / "pulse"),
            os.getpid(),
        )
        process.stdin.write(msgspec.json.encode(boot) + b"\n")
        process.stdin.flush()
        benches.append(Bench(listening, process))
        return benches[-1]

    yield start
    for bench in benches:
        bench.process.kill()
        bench.process.communicate()
        bench.listening.close()


def test_it_loads_answers_and_leaves_when_told(start_engine: StartEngine) -> None:
    engine = start_engine()
    *phases, ready, _ = engine.until(wire.Stats)
    assert all(isinstance(phase, wire.StartupProgress) for phase in phases)
    assert isinstance(ready, wire.Ready)
    assert ready.info.architecture == "Qwen3ForCausalLM"
    assert ready.info.context_len == 2048

    engine.process.send_signal(signal.SIGTERM)  # both reach a whole process group; only the front decides
    engine.process.send_signal(signal.SIGINT)
    sampling = wire.Sampling(max_new_tokens=5, temperature=0.0)
    engine.send(wire.Submit(7, wire.pack_ids([1, 2, 3]), sampling))
    steps: list[wire.StepOutput] = []
    while not (steps and steps[-1].finished):
        steps += [message for message in engine.until(wire.StepOutput) if isinstance(message, wire.StepOutput)]
    assert {tuple(step.ids) for step in steps} == {(7,)}
    assert sum(sum(step.counts or [1]) for step in steps) == 5
    assert [finish.code for finish in steps[-1].finished] == [wire.FinishCode.LENGTH]

    engine.send(wire.Ping(3))
    assert engine.until(wire.Pong)[-1] == wire.Pong(3)
    engine.send(wire.Shutdown())
    assert engine.process.wait(10) == 0


@pytest.mark.long
def test_a_snapshot_carries_the_process_s_own_numbers_and_the_time_of_day(start_engine: StartEngine) -> None:
    stats = start_engine().until(wire.Stats)[-1]
    assert isinstance(stats, wire.Stats)
    assert stats.cpu_seconds > 0
    assert stats.resident_bytes > 50_000_000
    assert abs(stats.last_step_unix - time.time()) < 60


@pytest.mark.long
def test_it_is_gone_when_the_front_closes_its_pipe(start_engine: StartEngine) -> None:
    engine = start_engine()
    engine.until(wire.Ready)
    assert engine.process.stdin is not None
    engine.process.stdin.close()
    assert engine.process.wait(2) == 0
    engine.process.stdin = None


@pytest.mark.long
def test_when_the_front_is_gone_before_it_heard_of_the_engine_nothing_stays_on_disk(start_engine: StartEngine, tmp_path: Path) -> None:
    engine = start_engine()
    (tmp_path / "private" / "pulse").touch()
    assert (tmp_path / "private" / "engine").is_socket()
    assert engine.process.stdin is not None
    engine.process.stdin.close()
    assert engine.process.wait(30) == 0  # it imports what it needs first
    engine.process.stdin = None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_bad_model_files_are_a_fatal_message_with_the_exit_code(start_engine: StartEngine, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchModel"], "model_type": "none"}')
    engine = start_engine(model=tmp_path)
    fatal = engine.until(wire.Fatal)[-1]
    assert isinstance(fatal, wire.Fatal)
    assert fatal.exit_code == 65
    assert "NoSuchModel" in fatal.message
    assert engine.process.wait(10) == 65


def test_a_bug_is_told_with_its_trace_in_the_log_and_exit_code_70(start_engine: StartEngine) -> None:
    engine = start_engine()
    engine.until(wire.Ready)
    engine.link.send(b"\xc1 this is no message")
    fatal = engine.until(wire.Fatal)[-1]
    assert isinstance(fatal, wire.Fatal)
    assert fatal.exit_code == 70
    assert engine.process.wait(10) == 70
    _, log = engine.process.communicate()
    assert b"Traceback (most recent call last)" in log

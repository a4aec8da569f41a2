"""Processes that compile grammars, and what is said where one ends, does not answer, or cannot go on."""

from __future__ import annotations

import dataclasses
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from banyan_runtime.grammar import isolated
from banyan_runtime.grammar.compiler import Answer, answer_to, frame
from banyan_runtime.grammar.errors import GrammarBusy, GrammarError
from banyan_runtime.grammar.isolated import IsolatedCompiler
from banyan_runtime.wire import Grammar
from tests.unit.grammar.walks import Language

A: Grammar = Grammar("regex", "a")
STUCK_S = 20.0
CHILD = """
import os, resource, struct, sys, time
def read():
    sys.stdin.buffer.read(struct.unpack("<I", sys.stdin.buffer.read(4))[0])
def tell(content):
    sys.stdout.buffer.write(content)
    sys.stdout.buffer.flush()
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
open(sys.argv[1], "a").write("started ")
read()
tell(bytes.fromhex(sys.argv[2]))
while True:
    read()
    {then}
"""


@pytest.fixture
def starts(tmp_path: Path) -> Path:
    return tmp_path / "starts"


@pytest.fixture(autouse=True)
def born() -> Iterator[Callable[[], set[psutil.Process]]]:
    """The processes of this test."""
    before = set(psutil.Process().children())
    yield lambda: set(psutil.Process().children()) - before
    for child in set(psutil.Process().children()) - before:
        child.kill()
        child.wait()


def children(monkeypatch: pytest.MonkeyPatch, starts: Path, then: str) -> None:
    """Processes that do `then` with each grammar."""
    command = (sys.executable, "-S", "-c", CHILD.replace("{then}", then), str(starts), frame(Answer()).hex())
    monkeypatch.setattr(isolated, "COMMAND", command)


def within(seconds: float, work: Any) -> BaseException | None:
    """What `work` raises, on a thread that may be stuck for ever."""
    raised: list[BaseException | None] = []

    def run() -> None:
        try:
            work()
            raised.append(None)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert raised, "it is stuck"
    return raised[0]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_is_ended_from_outside_says_nothing_against_its_grammar(
    tiny: Language, monkeypatch: pytest.MonkeyPatch, starts: Path, number: signal.Signals
) -> None:
    children(monkeypatch, starts, f"os.kill(os.getpid(), {number})")
    compiler = IsolatedCompiler(tiny.vocabulary)
    with pytest.raises(GrammarBusy):
        compiler.compiled(A)
    assert starts.read_text().split() == ["started"] * 2


@pytest.mark.parametrize("then", [f"os.kill(os.getpid(), {signal.SIGSEGV})", f"os.kill(os.getpid(), {signal.SIGABRT})", "sys.exit(1)"])
def test_a_grammar_that_its_process_does_not_survive_is_to_blame_and_not_tried_again(
    tiny: Language, monkeypatch: pytest.MonkeyPatch, starts: Path, then: str
) -> None:
    children(monkeypatch, starts, then)
    compiler = IsolatedCompiler(tiny.vocabulary)
    with pytest.raises(GrammarError) as failed:
        compiler.compiled(A)
    assert not isinstance(failed.value, GrammarBusy)
    assert starts.read_text().split() == ["started"]


def test_all_tries_together_have_one_patience(tiny: Language, monkeypatch: pytest.MonkeyPatch, starts: Path) -> None:
    children(monkeypatch, starts, f"time.sleep(0.05); os.kill(os.getpid(), {signal.SIGKILL})")
    monkeypatch.setattr(isolated, "TRIES", 30)
    compiler = IsolatedCompiler(tiny.vocabulary, patience_s=0.5)
    with pytest.raises(GrammarBusy):
        compiler.compiled(A)
    assert 1 <= len(starts.read_text().split()) <= 11


def test_a_process_that_does_not_read_holds_nobody(
    tiny: Language, monkeypatch: pytest.MonkeyPatch, born: Callable[[], set[psutil.Process]]
) -> None:
    monkeypatch.setattr(isolated, "COMMAND", ("sleep", "1000"))
    monkeypatch.setattr(isolated, "START_S", 0.2)
    large = dataclasses.replace(tiny.vocabulary, tokenizer="x" * 1_000_000)  # more than a pipe takes
    assert isinstance(within(STUCK_S, lambda: IsolatedCompiler(large)), GrammarBusy)
    assert not born()


def test_megabytes_arrive_whole(tiny: Language, monkeypatch: pytest.MonkeyPatch, starts: Path) -> None:
    children(monkeypatch, starts, "tell(bytes.fromhex(sys.argv[2]))")
    large = dataclasses.replace(tiny.vocabulary, tokenizer="x" * 5_000_000)
    assert IsolatedCompiler(large).compiled(A) == b""


def test_a_server_with_thousands_of_connections_compiles_too(tiny: Language, monkeypatch: pytest.MonkeyPatch, starts: Path) -> None:
    children(monkeypatch, starts, "tell(bytes.fromhex(sys.argv[2]))")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard >= 4096 or hard == resource.RLIM_INFINITY
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
        for _ in range(1100):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        assert IsolatedCompiler(tiny.vocabulary).compiled(A) == b""


def test_a_process_whose_answer_makes_no_sense_is_ended(
    tiny: Language, monkeypatch: pytest.MonkeyPatch, starts: Path, born: Callable[[], set[psutil.Process]]
) -> None:
    children(monkeypatch, starts, r'tell(b"\1\0\0\0\xc1")')
    compiler = IsolatedCompiler(tiny.vocabulary)
    with pytest.raises(Exception, match=r"(?i)malformed|invalid"):
        compiler.compiled(A)
    assert not born()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("[12:00:00] /project/cpp/json.cc:1: std::bad_alloc"), "it takes too much memory."),
        (MemoryError(), "it takes too much memory."),
        (ZeroDivisionError(), "the compiler failed."),
        (GrammarError("it is wrong."), "it is wrong."),
    ],
)
def test_whatever_goes_wrong_with_a_grammar_is_an_answer(tiny: Language, error: Exception, said: str) -> None:
    class Heavy:
        def compile(self, grammar: Grammar) -> Heavy:
            return self

        def matcher(self, stop_ids: object) -> Any:
            return tiny.matcher(A)

        def serialized(self) -> bytes:
            raise error

    assert answer_to(A, Heavy(), tiny.vocabulary.size) == Answer(error=said)  # type: ignore[arg-type]

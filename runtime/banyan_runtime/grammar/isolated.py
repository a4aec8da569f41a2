"""Compiling in other processes (`compiler.py`), which are ended where they take too long."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import select
import signal
import subprocess
import sys
import time
from typing import Final

import msgspec

from banyan_runtime.grammar.compiler import HEAD, Answer, Boot, frame
from banyan_runtime.grammar.errors import GrammarBusy, GrammarError
from banyan_runtime.grammar.limits import COMPILE_CPU_S
from banyan_runtime.grammar.vocabulary import Vocabulary
from banyan_runtime.wire import Grammar

log = logging.getLogger("banyan")

COMMAND: Final = (sys.executable, "-m", "banyan_runtime.grammar.compiler")
PATIENCE_S: Final = 15.0  # of the clock for each grammar, all tries together: a process may not get to compute
START_S: Final = 60.0  # until one has loaded its libraries
TRIES: Final = 2  # a process may be ended for reasons that have nothing to do with its grammar
_OWN_FAULT: Final = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)  # others come from outside
_PIECE: Final = 1 << 20


class _Ended(Exception):
    """The process is no more, for reasons from outside."""


class _Crashed(Exception):
    """The process is no more, by its own doing."""


class _Child:
    def __init__(self, vocabulary: Vocabulary, cpu_s: int) -> None:
        """Raises GrammarError for a vocabulary that cannot be used, GrammarBusy where no process can be started."""
        self._cpu_s = cpu_s
        try:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self._process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=environment)
        except OSError as error:
            log.error("a process that compiles grammars could not be started: %s", error)
            raise GrammarBusy("The server cannot start the process that compiles grammars.") from None
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        try:
            answer = self._asked(Boot(vocabulary, cpu_s, os.getpid()), START_S)
        except (_Ended, _Crashed):
            raise GrammarBusy("The process that compiles grammars has ended.") from None
        if answer.error is not None:
            self.end()
            raise GrammarError(answer.error)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    def compiled(self, grammar: Grammar, patience_s: float) -> bytes:
        """Raises GrammarError; after a GrammarBusy, and after _Ended, the process is no more."""
        try:
            answer = self._asked(grammar, patience_s)
        except _Crashed:
            raise GrammarError("the process that compiles it does not survive it.") from None
        if answer.error is not None:
            raise GrammarError(answer.error)
        return answer.compiled

    def end(self) -> None:
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait()

    def _asked(self, question: object, patience_s: float) -> Answer:
        """Whatever it raises, the process is no more then."""
        until = time.monotonic() + patience_s
        try:
            self._write(frame(question), until)
            (size,) = HEAD.unpack(self._read(HEAD.size, until))
            return msgspec.msgpack.decode(self._read(size, until), type=Answer)
        except (BrokenPipeError, EOFError):
            raise self._why_ended(until) from None
        except TimeoutError:
            self.end()
            raise GrammarBusy("The server does not get on with compiling the grammar.") from None
        except BaseException:
            self.end()
            raise

    def _why_ended(self, until: float) -> Exception:
        """Its pipe is closed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.1, until - time.monotonic()))
        self.end()
        code = self._process.returncode
        if code == -signal.SIGXCPU:
            return GrammarError(f"it could not be compiled within {self._cpu_s} s.")
        log.warning("a process that compiles grammars has ended (%d)", code)
        return _Crashed() if code > 0 or -code in _OWN_FAULT else _Ended()

    def _write(self, content: bytes, until: float) -> None:
        assert self._process.stdin is not None
        pipe = self._process.stdin.fileno()
        rest = memoryview(content)
        while rest:
            _await(pipe, select.POLLOUT, until)
            with contextlib.suppress(BlockingIOError):
                rest = rest[os.write(pipe, rest[:_PIECE]) :]

    def _read(self, size: int, until: float) -> bytes:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        content = bytearray()
        while len(content) < size:
            _await(pipe, select.POLLIN, until)
            piece = os.read(pipe, min(_PIECE, size - len(content)))
            if not piece:
                raise EOFError
            content += piece
        return bytes(content)


def _await(pipe: int, event: int, until: float) -> None:
    """Until a pipe can be read or written, or is closed. Raises TimeoutError."""
    poll = select.poll()  # select() knows no descriptor beyond 1023
    poll.register(pipe, event)
    if not poll.poll(1000 * max(0.0, until - time.monotonic())):
        raise TimeoutError


class IsolatedCompiler:
    """Safe to use from several threads: there are as many processes as were ever needed at once."""

    def __init__(self, vocabulary: Vocabulary, *, cpu_s: int = COMPILE_CPU_S, patience_s: float = PATIENCE_S) -> None:
        """Starts the first process. Raises GrammarError for a vocabulary that cannot be used."""
        self._vocabulary = vocabulary
        self._cpu_s = cpu_s
        self._patience_s = patience_s
        self._idle: queue.SimpleQueue[_Child] = queue.SimpleQueue()
        self._idle.put(_Child(vocabulary, cpu_s))

    def compiled(self, grammar: Grammar) -> bytes:
        """What the process makes of a grammar. Raises GrammarError, and GrammarBusy where nothing is known against it."""
        patience_s = self._patience_s
        for _ in range(TRIES):
            child = self._child()
            begun = time.monotonic()
            try:
                compiled = child.compiled(grammar, patience_s)
            except _Ended:
                patience_s -= time.monotonic() - begun
                continue
            except GrammarError:
                if child.alive:
                    self._idle.put(child)
                raise
            self._idle.put(child)
            return compiled
        raise GrammarBusy("The process that compiles grammars was ended.")

    def _child(self) -> _Child:
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            return _Child(self._vocabulary, self._cpu_s)

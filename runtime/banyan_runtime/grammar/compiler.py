"""The process that compiles grammars for a backend whose library cannot be interrupted. Whoever started it may end it at any time; it
ends by itself with its standard input, and the kernel ends it where one grammar computes for too long.

Frames: a length, then bytes. To it: a `Boot`, then grammars. From it: an `Answer` to each.
"""

from __future__ import annotations

import math
import os
import resource
import signal
import struct
import sys
import traceback
from typing import TYPE_CHECKING, BinaryIO, Final

import msgspec

from banyan_runtime.grammar.errors import GrammarError
from banyan_runtime.grammar.trial import try_out
from banyan_runtime.grammar.vocabulary import Vocabulary
from banyan_runtime.process import die_with, limit_memory
from banyan_runtime.wire import Grammar

if TYPE_CHECKING:
    from banyan_runtime.grammar.backends.xgrammar import LocalXgrammar

HEAD: Final = struct.Struct("<I")
MEMORY_BYTES: Final = 4 << 30  # that grammars may take
MAX_ANSWER_BYTES: Final = 16 << 20  # the engine reads it in one go, while nobody gets a token


class Boot(msgspec.Struct, frozen=True):
    vocabulary: Vocabulary
    cpu_s: int  # of computing time, for each grammar
    parent: int


class Answer(msgspec.Struct, frozen=True):
    """What was compiled, or why nothing was."""

    compiled: bytes = b""
    error: str | None = None


def frame(content: object) -> bytes:
    raw = msgspec.msgpack.encode(content)
    return HEAD.pack(len(raw)) + raw


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # a Ctrl-C reaches the whole group; the engine ends us
        signal.signal(number, signal.SIG_IGN)
    with os.fdopen(os.dup(0), "rb") as source, os.fdopen(os.dup(1), "wb") as sink:
        os.dup2(2, 1)  # what a library prints is no answer
        boot = msgspec.msgpack.decode(_read(source), type=Boot)
        die_with(boot.parent)
        _, hard = resource.getrlimit(resource.RLIMIT_CORE)
        resource.setrlimit(resource.RLIMIT_CORE, (0, hard))  # a grammar that computes too long is no reason for a dump
        _serve(boot, source, sink)


def _serve(boot: Boot, source: BinaryIO, sink: BinaryIO) -> None:
    from banyan_runtime.grammar.backends.xgrammar import LocalXgrammar

    try:
        backend = LocalXgrammar(boot.vocabulary)
    except GrammarError as error:
        _tell(sink, Answer(error=str(error)))
        return
    limit_memory(MEMORY_BYTES)
    _tell(sink, Answer())
    while True:
        grammar = msgspec.msgpack.decode(_read(source), type=Grammar)
        _allow(boot.cpu_s)
        answer = answer_to(grammar, backend, boot.vocabulary.size)
        _allow(None)
        _tell(sink, answer)


def answer_to(grammar: Grammar, backend: LocalXgrammar, vocab_size: int) -> Answer:
    """Whatever goes wrong is an answer: this process is there for the next one too."""
    try:
        compiled = backend.compile(grammar)
        try_out(compiled, vocab_size)
        content = compiled.serialized()
    except GrammarError as error:
        return Answer(error=str(error))
    except Exception as error:
        if not isinstance(error, MemoryError) and "bad_alloc" not in str(error):
            traceback.print_exc()
            return Answer(error="the compiler failed.")
        return Answer(error="it takes too much memory.")
    if len(content) > MAX_ANSWER_BYTES:
        return Answer(error=f"it is too complex: compiled it has {len(content)} bytes.")
    return Answer(content)


def _allow(cpu_s: int | None) -> None:
    """Let this process compute for so long; then the kernel ends it, whatever it is at. None: as long as it wants."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = hard if cpu_s is None else math.ceil(used.ru_utime + used.ru_stime) + cpu_s
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def _read(source: BinaryIO) -> bytes:
    """The next frame. Ends this process where there will be none."""
    head = source.read(HEAD.size)
    if len(head) < HEAD.size:
        sys.exit(0)
    (size,) = HEAD.unpack(head)
    return source.read(size)


def _tell(sink: BinaryIO, answer: Answer) -> None:
    sink.write(frame(answer))
    sink.flush()


if __name__ == "__main__":
    main()

"""Grammars compiled beside the engine's loop: each once, however many requests wait for it, and for no longer than a deadline."""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from banyan_runtime.grammar.errors import GrammarBusy, GrammarError
from banyan_runtime.grammar.limits import COMPILE_CPU_S
from banyan_runtime.grammar.masks import MaskFiller
from banyan_runtime.grammar.matcher import Masks, Matcher, SideBySide
from banyan_runtime.grammar.reasoning_gate import ReasoningGate
from banyan_runtime.grammar.vocabulary import Vocabulary
from banyan_runtime.wire import Constraint, Grammar

if TYPE_CHECKING:  # the engine imports it when there is need of it
    from banyan_runtime.grammar.llguidance import LlguidanceBackend, LlguidanceCompiled

log = logging.getLogger("banyan")

THREADS: Final = 2
PATIENCE_S: Final = 30.0  # of anybody, for whatever reason the server does not get to it, or does not get on with it
LOOK_EVERY_S: Final = 0.05  # while grammars are being waited for
KEPT: Final = 256  # grammars, used last
KEPT_BYTES: Final = 8 << 20  # of their texts; what is compiled has up to a few dozen times as much
MAX_WAITING: Final = 1024  # grammars
AGAIN_S: Final = 5.0  # until a backend that could not be made is tried again


class _Work:
    """One compilation. What it has computed so far is seen from other threads."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self._now = _cpu_clock()
        self._cpu = self._now()

    @property
    def cpu_s(self) -> float:
        return self._now() - self._cpu


def _cpu_clock() -> Callable[[], float]:
    """What this thread computes, told to any thread. Where no system says, time that passes."""
    if sys.platform != "linux":
        return time.monotonic
    clock = time.pthread_getcpuclockid(threading.get_ident())
    return lambda: time.clock_gettime(clock)


class _Entry:
    """One grammar, for all that ask for it."""

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self.work: _Work | None = None  # None: it still waits for a thread
        self.result: LlguidanceCompiled | GrammarError | None = None

    @property
    def size(self) -> int:
        return len(self.grammar.text)


@dataclass(frozen=True, slots=True)
class Ticket:
    """A grammar that was asked for."""

    pool: GrammarPool
    entry: _Entry
    constraint: Constraint
    stop_ids: tuple[int, ...]
    asked: float = field(default_factory=time.monotonic)

    def ready(self) -> Matcher | GrammarError | None:
        """A fresh matcher, or why there is none; None: not yet. Never waits. For the engine's thread alone."""
        result = self.entry.result
        if result is None:
            return self.pool.late(self)
        if isinstance(result, GrammarError):
            return result
        try:
            return self.pool.matcher(result, self.constraint, self.stop_ids)
        except GrammarError as error:
            return error


class GrammarPool:
    """`open_backend` is called first, on a thread of the pool. `wake` is called from the pool's threads whenever a ticket may
    have become ready. `deadline_s` is of computing time, `patience_s` of the clock. `cores` may compute masks."""

    def __init__(
        self,
        vocabulary: Callable[[], Vocabulary],
        open_backend: Callable[[Vocabulary], LlguidanceBackend],
        wake: Callable[[], None],
        *,
        cores: int = 1,
        threads: int = THREADS,
        deadline_s: float = COMPILE_CPU_S,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._open = open_backend
        self._read_vocabulary = vocabulary
        self._wake = wake
        self._deadline_s = deadline_s
        self._patience_s = patience_s
        self._entries: OrderedDict[Grammar, _Entry] = OrderedDict()  # the one used last comes last
        self._bytes = 0
        self._work: queue.SimpleQueue[_Entry] = queue.SimpleQueue()
        self._backend: LlguidanceBackend | GrammarError | None = None
        self._again_at = 0.0
        self._vocabulary: Vocabulary | None = None
        self._waited_for: queue.SimpleQueue[Ticket] = queue.SimpleQueue()
        self._masks = MaskFiller(self._side_by_side, cores)
        self._opening = threading.Lock()
        threading.Thread(target=self._watch, name="grammar-deadlines", daemon=True).start()
        for number in range(threads):
            threading.Thread(target=self._run, name=f"grammar-{number}", daemon=True).start()

    def request(self, constraint: Constraint, stop_ids: tuple[int, ...]) -> Ticket:
        """`stop_ids`: the tokens that end the output once the grammar lets it end."""
        grammar = constraint.grammar
        entry = self._entries.get(grammar)
        if entry is not None and isinstance(entry.result, GrammarBusy):  # there may be time by now
            self._forget(entry)
            entry = None
        if entry is None:
            entry = self._begin(grammar)
        else:
            self._entries.move_to_end(grammar)
        ticket = Ticket(self, entry, constraint, stop_ids)
        if entry.result is None:
            self._waited_for.put(ticket)
        return ticket

    def _begin(self, grammar: Grammar) -> _Entry:
        entry = _Entry(grammar)
        if self._work.qsize() >= MAX_WAITING:
            entry.result = GrammarBusy("Too many grammars wait to be compiled.")
            return entry
        self._entries[grammar] = entry
        self._bytes += entry.size
        self._shrink()
        self._work.put(entry)
        return entry

    def matcher(self, compiled: LlguidanceCompiled, constraint: Constraint, stop_ids: tuple[int, ...]) -> Matcher:
        matcher = compiled.matcher(stop_ids)
        if constraint.after < 0:
            return matcher
        assert self._vocabulary is not None
        named = frozenset(self._vocabulary.added.values())
        ends = frozenset(self._vocabulary.eos_ids) | (named & frozenset(stop_ids))
        return ReasoningGate(matcher, constraint.opens, constraint.after, ends, self._vocabulary.blanks)

    def fill(self, matchers: Sequence[Matcher], masks: Masks) -> list[GrammarError | None]:
        """As `MaskFiller.fill`. For the engine's thread alone."""
        return self._masks.fill(matchers, masks)

    def _side_by_side(self, threads: int) -> SideBySide:
        assert self._backend is not None, "what is filled it has compiled"
        assert not isinstance(self._backend, GrammarError)
        return self._backend.side_by_side(threads)

    def late(self, ticket: Ticket) -> GrammarError | None:
        """Why a grammar is given up. A thread that compiles it cannot be stopped: until it is through, it fails for whoever asks.
        The grammar is to blame for what it makes a thread compute, and for nothing else."""
        work, now = ticket.entry.work, time.monotonic()
        if work is not None and now - work.began >= self._deadline_s and work.cpu_s >= self._deadline_s:
            return GrammarError(f"it could not be compiled within {self._deadline_s:g} s.")
        if now - (ticket.asked if work is None else max(ticket.asked, work.began)) < self._patience_s:
            return None
        return GrammarBusy("The server does not get to compiling the grammar.")

    def _shrink(self) -> None:
        """Forget what was used longest ago, as far as it is compiled."""
        for entry in list(self._entries.values()):
            if len(self._entries) <= KEPT and self._bytes <= KEPT_BYTES:
                return
            if entry.result is not None:
                self._forget(entry)

    def _forget(self, entry: _Entry) -> None:
        del self._entries[entry.grammar]
        self._bytes -= entry.size

    def _watch(self) -> None:
        """Wake who waits when a grammar is given up: a loop that has nothing else to do must learn of it too."""
        waiting: list[Ticket] = []
        while True:
            waiting += [self._waited_for.get()] if not waiting else []
            time.sleep(LOOK_EVERY_S)
            while not self._waited_for.empty():
                waiting.append(self._waited_for.get())
            waiting = [ticket for ticket in waiting if ticket.entry.result is None]
            still = [ticket for ticket in waiting if self.late(ticket) is None]
            if len(still) < len(waiting):
                self._wake()
            waiting = still

    def _run(self) -> None:
        self._opened()
        while True:
            entry = self._work.get()
            backend = self._opened()
            if isinstance(backend, GrammarError):
                entry.result = backend
            else:
                entry.work = _Work()  # only now: what it takes to make the backend is no grammar's fault
                entry.result = self._compiled(backend, entry.grammar)
            self._wake()

    def _compiled(self, backend: LlguidanceBackend, grammar: Grammar) -> LlguidanceCompiled | GrammarError:
        try:
            return backend.compile(grammar)
        except GrammarError as error:
            return error
        except Exception:
            log.exception("a grammar of kind %s could not be compiled", grammar.kind)
            return GrammarError("the compiler failed.")

    def _opened(self) -> LlguidanceBackend | GrammarError:
        """The backend, made once, or what is in its way."""
        with self._opening:
            if self._backend is None and time.monotonic() >= self._again_at:
                try:
                    vocabulary = self._read_vocabulary()
                    self._backend = self._open(vocabulary)
                    self._vocabulary = replace(vocabulary, tokenizer="")  # up to 35 MB that nobody needs any longer
                except GrammarBusy as error:  # it may work for the next one
                    return error
                except GrammarError as error:
                    self._backend = error
                except Exception:
                    log.exception("the grammar backend cannot be used")
                    self._again_at = time.monotonic() + AGAIN_S
            return GrammarBusy("The server's grammar backend cannot be used.") if self._backend is None else self._backend

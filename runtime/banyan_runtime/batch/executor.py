"""Carries the protocol's calls out on a store. Everything blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeVar

from banyan_runtime.batch import entries
from banyan_runtime.batch.documents import Outcome, State
from banyan_runtime.batch.protocol import (
    GONE,
    LOST,
    Assemble,
    Assembled,
    Call,
    Compare,
    Found,
    Look,
    Measure,
    Read,
    Seen,
    Steps,
    Write,
    Written,
)
from banyan_runtime.storage.local import LocalStore
from banyan_runtime.storage.open import Location
from banyan_runtime.storage.patience import Patience
from banyan_runtime.storage.store import Full, NotFound, ObjectInfo, Precondition, StoreError, Unreachable

RUN_METADATA: Final = "banyan-run"
MOST_READS: Final = 100
"""Of one object, each behind a look at it, which others may replace once in a second or so."""
T = TypeVar("T")


class Results(Protocol):
    """Makes the results of a run of its shards' states."""

    def write(self, name: str, states: Sequence[State], outcome: Outcome, if_match: str | None) -> Assembled: ...

    def compare(self, name: str, states: Sequence[State], outcome: Outcome) -> Assembled: ...


class Executor:
    """Runs procedures of the protocol on what lies below `location`. Raises the store's errors, which end the procedure.

    A full disk is waited for: what is under way here is worth more than the wait.
    """

    def __init__(self, location: Location, patience: Patience, results: Results | None = None) -> None:
        self._location = location
        self._patience = patience
        self._results = results

    def run(self, steps: Steps[T]) -> T:
        answer: Any = None
        while True:
            try:
                call = steps.send(answer)
            except StopIteration as end:
                result: T = end.value
                return result
            answer = self._carry_out(call)

    def _carry_out(self, call: Call) -> object:
        match call:
            case Read(key):
                return self._read(key)
            case Write(key, body, if_match):
                where = self._location.child(key)
                try:
                    return Written(self._put(where, body, if_match).tag)
                except Precondition:
                    return LOST
            case Measure(part):
                where = self._location.child(part.key)
                measured = entries.measure(where.store, where.key, part)
                if isinstance(where.store, LocalStore) and measured.bytes:
                    where.store.sync(where.key)  # who wrote it has perhaps not come to that
                return measured
            case Look(name):
                info = self._head(name)
                return None if info is None else Seen(info.tag, info.size, info.metadata.get(RUN_METADATA))
            case Assemble(name, states, outcome, if_match):
                return self._result(lambda results: results.write(name, states, outcome, if_match))
            case Compare(name, states, outcome):
                return self._result(lambda results: results.compare(name, states, outcome))

    def _result(self, make: Callable[[Results], Assembled]) -> object:
        results = self._results
        assert results is not None
        try:
            try:
                return make(results)
            except Full:  # the notices are for the wait alone: to make results may take long
                return self._patience.retry(self._location.uri, lambda _: make(results))
        except entries.PartGone:
            return GONE

    def _put(self, where: Location, body: bytes, if_match: str | None) -> ObjectInfo:
        def put(_: object) -> ObjectInfo:
            return where.store.put(where.key, body, if_match=if_match, if_none_match=if_match is None)

        return self._patience.retry(where.store.where, put) if isinstance(where.store, LocalStore) else put(None)

    def _read(self, key: str) -> Found | None:
        where = self._location.child(key)
        changed: StoreError | None = None
        for _ in range(MOST_READS):
            if (info := self._head(key)) is None:
                return None
            try:
                return Found(where.store.get(where.key, if_match=info.tag), info.tag)
            except (Precondition, NotFound) as error:
                changed = error  # it was replaced in between
        raise Unreachable(where.uri, "it is another each time that it is looked at", reason="it changes all the time") from changed

    def _head(self, key: str) -> ObjectInfo | None:
        where = self._location.child(key)
        try:
            return where.store.head(where.key)
        except NotFound:
            return None

"""What runs, by the ids that clients know it by: who asks for an id that is taken is refused, and /abort_request ends by id."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final, Protocol

from banyan_runtime.front.current import current
from banyan_runtime.front.turns import in_turns

REMEMBERED: Final = 65_536  # ids, of a few MB: more than are aborted while one request is read and planned


class Abortable(Protocol):
    def abort(self) -> None:
        """End it wherever it is. Never waits, never raises."""
        ...


class Claims(Protocol):
    """Which ids of clients' own run in this process, for all processes of the server to know."""

    def take(self, request_id: str) -> bool:
        """False: another process has it. Taking what is taken here already changes nothing."""
        ...

    def leave(self, request_id: str) -> None: ...


class LiveRequests:
    """The sequences that somebody waits for. Several may share an id: the choices of one request. A request of many sequences
    stands here too where the client has given it an id.

    Each belongs to who asked for it: an abort `by` somebody reaches what is theirs, by None whosever it is.

    An abort holds for every request that came before it. One that is still read, planned or submitted does not stand here yet, nor
    is its id known; so it is remembered what was aborted when.

    With several processes that answer requests each knows its own: an abort reaches all of them (`on_abort`), who asked for it is
    answered when they have heard of it (`heard`), and `claims` tells of an id that one of the others has.
    """

    def __init__(self) -> None:
        self._by_id: dict[str, dict[Abortable, str | None]] = {}  # with their owners
        self._aborted_at: dict[int, float] = {}  # hash of an id, which may be long, and of who asked: monotonic seconds
        self._all_aborted_at = -math.inf  # monotonic seconds
        self.on_abort: Callable[[Sequence[str] | None, str | None], None] = lambda ids, by: None  # told of each call; ids None: of all
        self.heard: Callable[[], Awaitable[None]] | None = None  # waits for the other processes
        self.claims: Claims | None = None
        self._claimed: set[str] = set()
        self._starting: list[str] = []  # claimed by the request that is being started

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def __len__(self) -> int:
        return sum(len(sequences) for sequences in self._by_id.values())

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """A request is started within, without a pause; where that fails, the ids it has claimed are free again."""
        self._starting = []
        try:
            yield
        except BaseException:
            for request_id in self._starting:
                self.leave(request_id)
            raise

    def claim(self, request_id: str) -> bool:
        """For a client's own id, before the sequences of its request are added; False: it is taken. It is free again when the last of
        them is removed, or when `leave` says that there will be none."""
        if request_id in self._by_id or request_id in self._claimed:
            return False
        if self.claims is not None and not self.claims.take(request_id):
            return False
        self._claimed.add(request_id)
        self._starting.append(request_id)
        return True

    def leave(self, request_id: str) -> None:
        """No sequence of this id will be added any more."""
        if request_id in self._claimed and request_id not in self._by_id:
            self._claimed.remove(request_id)
            if self.claims is not None:
                self.claims.leave(request_id)

    def add(self, request_id: str, sequence: Abortable, received: float) -> None:
        """A sequence of a request that came at `received`, in monotonic seconds; it is aborted if that was asked for since."""
        owner = current().owner
        self._by_id.setdefault(request_id, {})[sequence] = owner
        aborts = (self._aborted_at.get(hash((request_id, by)), -math.inf) for by in (owner, None))
        if max(self._all_aborted_at, *aborts) >= received:
            sequence.abort()

    def remove(self, request_id: str, sequence: Abortable) -> None:
        """Forget one sequence; no error when it is not there."""
        sequences = self._by_id.get(request_id, {})
        sequences.pop(sequence, None)
        if not sequences:
            self._by_id.pop(request_id, None)
            self.leave(request_id)

    def abort(self, request_id: str, by: str | None = None) -> None:
        """End all sequences of this id; whoever reads them sees them finish with reason abort. No error for an id that is not known, or
        another's."""
        self.abort_each([request_id], by)

    def abort_each(self, request_ids: Sequence[str], by: str | None = None) -> None:
        """As `abort`, of as many ids as take no long time: a thousand take a millisecond."""
        self.on_abort(request_ids, by)
        now = time.monotonic()
        for request_id in request_ids:
            asked = hash((request_id, by))
            self._aborted_at.pop(asked, None)
            self._aborted_at[asked] = now
            if len(self._aborted_at) > REMEMBERED:
                del self._aborted_at[next(iter(self._aborted_at))]
        in_turns(self._aborted(request_ids, by))

    def abort_all(self) -> None:
        """End all that have come by this moment."""
        self.on_abort(None, None)
        self._all_aborted_at = time.monotonic()
        in_turns(self._aborted(list(self._by_id), None))

    def _aborted(self, request_ids: Sequence[str], by: str | None) -> Iterator[None]:
        for request_id in request_ids:
            for sequence, owner in tuple(self._by_id.get(request_id, {}).items()):
                if by is None or by == owner:
                    sequence.abort()
                    yield

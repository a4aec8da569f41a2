"""What runs, by the ids that clients know it by: who asks for an id that is taken is refused, and /abort_request ends by id."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from banyan_runtime.front.turns import in_turns


class Abortable(Protocol):
    def abort(self) -> None:
        """End it wherever it is. Never waits, never raises."""
        ...


class LiveRequests:
    """The sequences that somebody waits for. Several may share an id: the choices of one request. A request of many sequences
    stands here too where the client has given it an id."""

    def __init__(self) -> None:
        self._by_id: dict[str, dict[Abortable, None]] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def __len__(self) -> int:
        return sum(len(sequences) for sequences in self._by_id.values())

    def add(self, request_id: str, sequence: Abortable) -> None:
        self._by_id.setdefault(request_id, {})[sequence] = None

    def remove(self, request_id: str, sequence: Abortable) -> None:
        """Forget one sequence; no error when it is not there."""
        sequences = self._by_id.get(request_id, {})
        sequences.pop(sequence, None)
        if not sequences:
            self._by_id.pop(request_id, None)

    def abort(self, request_id: str) -> None:
        """End all sequences of this id; whoever reads them sees them finish with reason abort. No error for an unknown id."""
        in_turns(self._aborted([request_id]))

    def abort_all(self) -> None:
        """End all that run at this moment."""
        in_turns(self._aborted(list(self._by_id)))

    def _aborted(self, request_ids: list[str]) -> Iterator[None]:
        for request_id in request_ids:
            for sequence in tuple(self._by_id.get(request_id, ())):
                sequence.abort()
                yield

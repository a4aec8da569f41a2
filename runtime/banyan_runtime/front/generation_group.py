"""The generations of one HTTP request, begun and ended together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from banyan_runtime.front.context import Context
from banyan_runtime.front.current import current
from banyan_runtime.front.deadline import passed
from banyan_runtime.front.deltas import Consumer, Delta
from banyan_runtime.front.errors import ApiError
from banyan_runtime.front.generation import Call, Generation
from banyan_runtime.front.plan import GenerateRequest
from banyan_runtime.front.turns import in_turns


class GenerationGroup:
    """The generations of one HTTP request. Whoever made it closes it; closing ends in the engine what has not ended."""

    def __init__(self, context: Context, call: Call, requests: Sequence[GenerateRequest], ids: Sequence[str], consumer: Consumer) -> None:
        """Submit all requests, known to clients by `ids`: as many at once as a turn has time for, the others in further turns.
        The consumer hears of them later, never from within this call. Raises ApiError when one of the first is refused; then
        none runs."""
        self._context = context
        self._call = call
        self._consumer, self._unheard = context.request_log.follow(requests, ids, consumer)
        current().trace.submitted(call.endpoint, requests, ids, streaming=call.streaming)
        self._generations: list[Generation] = []
        self._waiting = deque(enumerate(zip(ids, requests, strict=True)))
        self._left = len(requests)
        self._aborted = False
        self._begun = False
        try:
            in_turns(self._submitted())
        except BaseException:
            self._close(Generation.withdraw)
            raise
        self._begun = True
        if call.group_id is not None:
            context.live.add(call.group_id, self, call.received)

    def _submitted(self) -> Iterator[None]:
        while self._waiting:
            index, (request_id, request) = self._waiting.popleft()
            try:
                generation = Generation(self._context, self._call, request_id, request, self, index)
            except ApiError as error:
                if not self._begun:
                    raise
                self.refused(error)
                return
            self._generations.append(generation)
            if self._aborted:
                generation.abort()
            yield

    def abort(self) -> None:
        """End all sequences in the engine; the consumer sees them finish with reason abort."""
        self._aborted = True
        in_turns(map(Generation.abort, tuple(self._generations)))

    @property
    def may_be_refused(self) -> bool:
        return any(generation.may_be_refused for generation in self._generations)

    def expire(self) -> None:
        """Its deadline has passed: the consumer is told so, and what has not ended is ended."""
        self.failed(passed(running=any(generation.begun for generation in self._generations)))

    def close(self) -> None:
        """End what has not ended, of very many some in further turns; the consumer hears nothing more. May be called again."""
        self._close(Generation.close)

    def _close(self, end: Callable[[Generation], None]) -> None:
        self._over()
        self._unheard()
        for _, (request_id, _) in self._waiting:
            self._context.live.leave(request_id)
        self._waiting.clear()
        generations, self._generations = self._generations, []
        in_turns(map(end, generations))

    def _over(self) -> None:
        self._left = 0
        if self._call.group_id is not None:
            self._context.live.remove(self._call.group_id, self)

    # --- called by its generations ---

    def add(self, index: int, delta: Delta) -> None:
        if not self._left:
            return
        self._consumer.add(index, delta)
        if delta.finished is not None:
            self._left -= 1
            if not self._left:
                self._over()
                self._consumer.end(None)

    def failed(self, error: ApiError) -> None:
        self._end(error, Generation.close)

    def refused(self, error: ApiError) -> None:
        self._end(error, Generation.withdraw)

    def _end(self, error: ApiError, end: Callable[[Generation], None]) -> None:
        if self._left:
            self._close(end)
            self._consumer.end(error)

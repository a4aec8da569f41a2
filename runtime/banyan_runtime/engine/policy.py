"""The order in which waiting newcomers are looked at."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol

from banyan_runtime.engine.in_batch_prefix import InBatchPrefixes
from banyan_runtime.engine.memory.prefixes import ID_BYTES, PrefixTree
from banyan_runtime.engine.queue import WaitingQueue
from banyan_runtime.engine.request import Request

IN_BATCH_CHECK: Final = 32  # a request with at most so many cached tokens is compared with the others that wait
IN_BATCH_DEPRIORITIZE: Final = 32  # ... and goes last when it shares at least so many tokens with an earlier one
LPM_AT_MOST: Final = 128  # waiting requests; beyond it matching all of them each turn costs more than it brings
OVERDUE_BATCHES: Final = 256  # prefill batches that may pass a request by before it goes first


class Policy(Protocol):
    def order(self, queue: WaitingQueue, prefixes: PrefixTree, batches: int) -> Iterable[Request]:
        """The newcomers of `queue` in the order in which to admit; `batches` counts the prefill batches so far."""


class Fcfs:
    """First come, first served, the higher priority first."""

    def order(self, queue: WaitingQueue, prefixes: PrefixTree, batches: int) -> Iterable[Request]:
        return queue.newcomers()


class LongestPrefixMatch:
    """Among equal priorities the longest cached prefix first, so that what is cached is used before it is evicted.

    Of a family that shares an uncached prefix, one goes ahead and computes it. A request that was passed by too often goes
    first whatever it shares, so that none starves.
    """

    def order(self, queue: WaitingQueue, prefixes: PrefixTree, batches: int) -> Iterable[Request]:
        if queue.newcomer_count > LPM_AT_MOST:
            return queue.newcomers()
        waiting, top = list(queue.newcomers()), queue.top
        seen = InBatchPrefixes()
        ranks: dict[int, tuple[int, int, int]] = {}
        for request in waiting:
            key = request.key[: request.matchable * ID_BYTES]
            matched = prefixes.longest(key, request.salt)
            last = 0
            if matched <= IN_BATCH_CHECK:
                if seen.longest(key, request.salt) >= IN_BATCH_DEPRIORITIZE:
                    last = 1
                else:
                    seen.add(key, request.salt)
            if batches - request.queued_at_batch >= OVERDUE_BATCHES:
                last = -1
            ranks[request.id] = (-queue.level(request, top), last, -matched)
        return sorted(waiting, key=lambda request: ranks[request.id])


POLICIES: Final[dict[str, type[Policy]]] = {"fcfs": Fcfs, "lpm": LongestPrefixMatch}

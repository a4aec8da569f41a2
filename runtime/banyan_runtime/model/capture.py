"""What captures CUDA graphs."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import cache
from typing import Any, Final, Protocol

import torch

_WARM_UPS: Final = 2
_ROUNDS: Final = 5
MOST_REPLAYS: Final = 4
SHORT_S: Final = 2e-3  # of a replay: of longer ones one is measured by itself
_TORCH: Final = tuple(int(part) for part in torch.__version__.split(".")[:2])


class Recorder(Protocol):
    def record(self, body: Callable[[], None]) -> Callable[[], None]:
        """Run `body` until it is warm, and capture it; what comes back runs it again."""

    def seconds(self, body: Callable[[], None]) -> float:
        """That the device takes to run it again; it is captured, and let go."""


class CudaRecorder:
    """Captures CUDA graphs. They share one pool of memory, so the largest comes first."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._stream = _stream()

    def record(self, body: Callable[[], None]) -> Callable[[], None]:
        beside, here = self._stream, torch.cuda.current_stream()
        beside.wait_stream(here)
        with torch.cuda.stream(beside):
            for _ in range(_WARM_UPS):
                body()
        here.wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        pool, begun = self._pool or torch.cuda.graph_pool_handle(), False
        try:
            # By itself torch goes back to the stream that it came from only where it could end the capture.
            with torch.cuda.stream(here), torch.cuda.graph(graph, pool=pool, stream=beside):
                begun = True
                body()
        except BaseException:
            _abandon(graph, pool, begun=begun)
            raise
        self._pool = pool
        return graph.replay

    def seconds(self, body: Callable[[], None]) -> float:
        replay = CudaRecorder().record(body)  # over memory of its own, which goes with it
        replay()  # the first one also brings the graph to the device
        once = _timed(replay, 1)
        return statistics.median(_timed(replay, MOST_REPLAYS if once < SHORT_S else 1) for _ in range(_ROUNDS))


def _timed(replay: Callable[[], None], times: int) -> float:
    """Seconds of one of so many, one behind another as steps are."""
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    replay()  # while it runs, the host launches those that are timed
    begun.record()
    for _ in range(times):
        replay()
    ended.record()
    ended.synchronize()
    found: float = begun.elapsed_time(ended)
    return found / 1e3 / times


def _abandon(graph: torch.cuda.CUDAGraph, pool: tuple[int, int], *, begun: bool) -> None:
    """Behind a capture that failed. Where the driver could not end it, torch up to 2.12 leaves its allocator in it for ever: that gives
    nothing back to the device then, and lets no other capture share the pool. 2.13 ends it, and keeps the pool's memory (its capture_end
    fails between the two); later ones let go of both with the graph."""
    if _TORCH >= (2, 14):
        return
    device = torch.cuda.current_device()
    try:
        torch._C._cuda_endAllocateToPool(device, pool)
    except RuntimeError:
        if not begun or _TORCH < (2, 13) or _ended(graph):
            return
    torch._C._cuda_releasePool(device, pool)


def _ended(graph: torch.cuda.CUDAGraph) -> bool:
    """Whether the driver could end the capture; then the pool is let go with the graph."""
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True


@cache
def _stream() -> torch.cuda.Stream:
    """One for the process: for each stream that products were computed on torch keeps a workspace. From 2.13 on that goes with any graph of
    the stream, and others would replay over it: graphs are let go all together, before new ones are captured."""
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]

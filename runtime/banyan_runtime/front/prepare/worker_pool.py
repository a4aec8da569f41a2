"""Plans made by a few processes beside the event loop, so that no request holds up the tokens of others."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import logging
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from banyan_runtime.errors import UnavailableError
from banyan_runtime.front.body import decode_object
from banyan_runtime.front.errors import ApiError, internal, queue_full, unavailable
from banyan_runtime.front.plan import Endpoint, Plan, Preparer
from banyan_runtime.front.prepare.fork_server import ForkServer
from banyan_runtime.front.prepare.planner import Planner
from banyan_runtime.front.prepare.worker_client import WorkerClient, WorkerGone, template_failed

log = logging.getLogger("banyan")

WORKERS: Final = 3
PLAN_S: Final = 30.0
MOST_WORKERS: Final = 8
LARGE_BYTES: Final = 65_536  # of a body; one worker is kept free of such requests, and of those that may bring a grammar
GRAMMARS: Final = re.compile(
    rb'"(?:response_format|regex|ebnf|json_schema|structural_tag|structured_outputs|output_config|tool_choice|strict)"'
    rb"|\\u00[4-7]"  # a letter of such a name, written so that it is not found
)
MAX_WAITING: Final = 2048
MAX_WAITING_BYTES: Final = 256 << 20
FORK_AGAIN_S: Final = (0.0, 0.05, 0.5)
FORK_LATER_S: Final = 1.0
LACK_S: Final = 5.0  # without any worker, after which requests are refused at once; longer than it takes to start anew
WARM_UP_S: Final = 60.0
KEEP_EVERY_S: Final = 0.5
TRIES: Final = 2  # workers that one request may take down with it
SMALL_BYTES: Final = 8192  # of a body: some 1,600 token ids, which are planned in a fifth of a millisecond
FEW: Final = 4  # requests being planned or served; from so many on workers plan all requests, so that tokens of others need not wait
QUICK_FIELDS: Final = frozenset({
    "model", "prompt", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos",
    "min_tokens", "frequency_penalty", "presence_penalty", "repetition_penalty", "logprobs", "stream", "stream_options",
    "skip_special_tokens", "user", "priority", "service_tier",
})  # fmt: skip
"""Fields of a completion whose cost is bounded by their length. A grammar, several choices and a text to tokenize are not."""
HUGE_BYTES: Final = 1 << 20  # a body that may well have been too much for its worker's memory


class _Slot:
    """The place of one worker."""

    def __init__(self) -> None:
        self.worker: WorkerClient | None = None

    @property
    def empty(self) -> bool:
        return self.worker is None or self.worker.gone


class _Lanes:
    """Who gets the next free worker: the oldest, except that requests that may take long (`large`) leave one worker to the others."""

    def __init__(self, slots: list[_Slot]) -> None:
        self._idle = slots
        self._large_limit = max(1, len(slots) - 1)
        self._large_running = 0
        self._waiting: dict[bool, collections.deque[tuple[float, int, asyncio.Future[_Slot]]]] = {
            False: collections.deque(),
            True: collections.deque(),
        }
        self._waiting_bytes = 0

    def remove_gone(self) -> list[_Slot]:
        """Free places whose workers have ended; they are free no longer."""
        gone = [slot for slot in self._idle if slot.empty]
        for slot in gone:
            self._idle.remove(slot)
        return gone

    def refuse(self) -> None:
        """Send away all that wait: there are no workers."""
        for lane in self._waiting.values():
            for _, body_bytes, future in lane:
                self._waiting_bytes -= body_bytes
                if not future.done():
                    future.set_exception(_no_worker())
            lane.clear()

    async def take(self, body_bytes: int, *, large: bool) -> _Slot:
        """A place for one request, to be given back. Raises ApiError when too many wait already, or no place will be free."""
        if sum(map(len, self._waiting.values())) >= MAX_WAITING or self._waiting_bytes + body_bytes > MAX_WAITING_BYTES:
            raise queue_full()
        future: asyncio.Future[_Slot] = asyncio.get_running_loop().create_future()
        self._waiting[large].append((time.monotonic(), body_bytes, future))
        self._waiting_bytes += body_bytes
        self._hand_out()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self.over(large=large)
                self.give(future.result())
            raise

    def over(self, *, large: bool) -> None:
        """A request that had a place is done with."""
        self._large_running -= large
        self._hand_out()

    def give(self, slot: _Slot) -> None:
        """A place is free again."""
        self._idle.append(slot)
        self._hand_out()

    def _hand_out(self) -> None:
        while self._idle:
            lanes = [self._waiting[large] for large in (False, True) if not large or self._large_running < self._large_limit]
            heads = [lane for lane in lanes if lane]
            if not heads:
                return
            lane = min(heads, key=lambda lane: lane[0][0])
            _, body_bytes, future = lane.popleft()
            self._waiting_bytes -= body_bytes
            if not future.done():  # nobody waits for a cancelled one
                self._large_running += lane is self._waiting[True]
                future.set_result(self._idle.pop())


def workers_for(cores: int) -> int:
    """How many to start where so many cores have nothing else to do. While the loop tells hundreds of streams, a worker waits several
    milliseconds between one request and the next: of three, new requests would wait for a place although there are cores and little
    to do."""
    return max(WORKERS, min(MOST_WORKERS, cores // 2))


class WorkerPool(Preparer):
    """`workers` processes, forked from one that has loaded the model's text files."""

    def __init__(self, forks: ForkServer, *, timeout_s: float = PLAN_S, workers: int = WORKERS) -> None:
        self._forks = forks
        self._timeout_s = timeout_s
        self._slots = [_Slot() for _ in range(workers)]
        self._lanes = _Lanes(list(self._slots))
        self._refills: set[asyncio.Task[None]] = set()
        self._keeper: asyncio.Task[None] | None = None
        self._last_worker = time.monotonic()
        self._lacking = False
        self._inline: Planner | None = None
        self._in_engine: Callable[[], int] = lambda: 0
        self._planning = 0
        self.on_lack: Callable[[str], None] = lambda why: None  # told why no worker can be had; "" when one can again

    def plan_inline(self, planner: Planner, in_engine: Callable[[], int]) -> None:
        """Plan small completions of token ids on the event loop while few requests are served: the way to a worker and back wakes two
        processes, which takes longer than the plan. `in_engine`: how many requests the engine has."""
        self._inline, self._in_engine = planner, in_engine

    async def plan(self, endpoint: Endpoint, body: bytes | bytearray, request_id: str) -> Plan:
        if (
            self._inline is not None
            and endpoint == "completions"
            and len(body) <= SMALL_BYTES
            and self._planning + self._in_engine() < FEW
            and _is_quick(fields := decode_object(body))
        ):
            return self._inline.plan_of(endpoint, fields, request_id)
        large = _may_take_long(body)
        self._planning += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                slot = await self._lanes.take(len(body), large=large)
                try:
                    return await self._planned(slot, endpoint, body, request_id)
                finally:
                    self._lanes.over(large=large)
                    self._free(slot)
        except TimeoutError:
            message = f"The request could not be prepared within {self._timeout_s:g} s."
            raise ApiError(503, message, code="timeout", headers={"Retry-After": "1"}) from None
        finally:
            self._planning -= 1

    async def warm_up(self) -> None:
        """Fork all workers, so that the first requests need not wait for them, and have ended ones replaced from here on.

        Raises UnavailableError when not a single one can be had.
        """
        for slot in self._lanes.remove_gone():
            self._free(slot)
        await asyncio.wait(set(self._refills), timeout=WARM_UP_S)
        if not self._has_worker:
            raise UnavailableError(f"no process can be started that prepares requests{self._because}")
        self._keeper = asyncio.create_task(self._keep())

    async def _keep(self) -> None:
        """See to it that free places have workers, also while no requests come; and tell when there is none for long."""
        while True:
            await asyncio.sleep(KEEP_EVERY_S)
            try:
                self._look()
            except Exception:
                log.exception("the processes that prepare requests could not be looked after")

    def _look(self) -> None:
        for slot in self._lanes.remove_gone():
            self._free(slot)
        now = time.monotonic()
        if self._has_worker:
            self._last_worker = now
            if self._lacking:
                log.warning("requests can be prepared again")
                self._lacking = False
                self.on_lack("")
        elif now - self._last_worker > LACK_S:
            why = f"no process can be started that prepares requests{self._because}"
            if not self._lacking:
                log.error("%s; until there is one, requests are refused", why)
            self._lacking = True
            self.on_lack(why)
            self._lanes.refuse()

    @property
    def _has_worker(self) -> bool:
        return not all(slot.empty for slot in self._slots)

    @property
    def _because(self) -> str:
        return f" ({self._forks.trouble})" if self._forks.trouble else ""

    def _free(self, slot: _Slot) -> None:
        """Give a place back, with a worker in it."""
        if not slot.empty:
            self._lanes.give(slot)
            return
        task = asyncio.create_task(self._refill(slot))
        self._refills.add(task)
        task.add_done_callback(self._refills.discard)

    async def _refill(self, slot: _Slot) -> None:
        """Put a worker into an empty place, however often that has to be tried; no place is ever lost."""
        try:
            for pause in itertools.chain(FORK_AGAIN_S, itertools.repeat(FORK_LATER_S)):
                await asyncio.sleep(pause)
                with contextlib.suppress(WorkerGone):
                    slot.worker = await self._forks.fork()
                    break
        except ApiError:
            pass  # the server is shutting down
        except Exception:
            log.exception("a process that prepares requests could not be started")
        finally:
            self._lanes.give(slot)

    def close(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
        for refill in self._refills:
            refill.cancel()
        for slot in self._slots:
            if slot.worker is not None:
                slot.worker.close()
        self._forks.close()

    async def _worker(self, slot: _Slot) -> WorkerClient:
        """The worker in this place; a fresh one where it has ended. Raises ApiError when none can be had."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LACK_S):
                for pause in FORK_AGAIN_S:
                    if slot.worker is not None and not slot.worker.gone:
                        return slot.worker
                    await asyncio.sleep(pause)
                    with contextlib.suppress(WorkerGone):
                        slot.worker = await self._forks.fork()
        if slot.worker is None or slot.worker.gone:
            raise _no_worker()
        return slot.worker

    async def _planned(self, slot: _Slot, endpoint: Endpoint, body: bytes | bytearray, request_id: str) -> Plan:
        """Planning is pure: a request whose worker has ended is planned again by another. Raises ApiError."""
        for _ in range(TRIES):
            worker = await self._worker(slot)
            with contextlib.suppress(WorkerGone):
                return await worker.plan(endpoint, body, request_id)
        if worker.stalled:
            log.error("%d of the processes that prepare requests did not get on and were ended", TRIES)
            raise unavailable("The processes that prepare requests do not get on.")
        if len(body) > HUGE_BYTES:
            raise ApiError(413, "The request takes too much memory to be prepared.", code="request_too_large")
        if worker.rendering:
            raise template_failed("it took down the process that rendered it.")
        log.error("a request took down %d of the processes that tokenize", TRIES)
        raise internal()


def _may_take_long(body: bytes | bytearray) -> bool:
    """Whether planning may take more than moments. A few bytes of a grammar may take as long as a library is let compile them."""
    return len(body) > LARGE_BYTES or GRAMMARS.search(body) is not None


def _no_worker() -> ApiError:
    return unavailable("The server cannot start the process that prepares requests.")


def _is_quick(fields: Mapping[str, Any]) -> bool:
    prompt = fields.get("prompt")
    return isinstance(prompt, list) and bool(prompt) and type(prompt[0]) is int and fields.keys() <= QUICK_FIELDS

"""Plans made by a few processes beside the event loop, so that no request holds up the tokens of others."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import logging
import re
import time
from collections.abc import Callable
from typing import Final, Protocol

from banyan_runtime.errors import UnavailableError
from banyan_runtime.front.errors import ApiError, internal, queue_full, unavailable
from banyan_runtime.front.plan import Endpoint, Plan, Preparer, RefusalPlan
from banyan_runtime.front.prepare.channel import Channel, ChannelError
from banyan_runtime.front.prepare.exchange import Exchange, template_failed

log = logging.getLogger("banyan")

WORKERS: Final = 3
MOST_WORKERS: Final = 8
LARGE_BYTES: Final = 65_536  # of a body; one worker is kept free of such requests, and of those that may bring a grammar
GRAMMARS: Final = re.compile(
    rb'"(?:response_format|regex|ebnf|json_schema|structural_tag|structured_outputs|guided_[a-z]+|output_config|tool_choice|strict)"'
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
HUGE_BYTES: Final = 1 << 20  # a body that may well have been too much for its worker's memory


class Forks(Protocol):
    """Where workers come from."""

    trouble: str  # why none can be had, as far as is known

    async def fork(self) -> Channel:
        """A fresh worker. Raises ChannelError when none can be had now, ApiError when none will be any more."""
        ...

    def close(self) -> None: ...


class _Slot:
    """The place of one worker; there may be none in it just now."""

    def __init__(self) -> None:
        self.channel: Channel | None = None

    def empty(self) -> None:
        channel, self.channel = self.channel, None
        if channel is not None:
            channel.close()


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
        gone = [slot for slot in self._idle if slot.channel is None or slot.channel.gone]
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


class PreparerPool(Preparer):
    """`workers` processes, forked from one that has loaded the model's text files."""

    def __init__(self, forks: Forks, *, timeout_s: float, workers: int = WORKERS) -> None:
        self._forks = forks
        self._timeout_s = timeout_s
        self._slots = [_Slot() for _ in range(workers)]
        self._lanes = _Lanes(list(self._slots))
        self._refills: set[asyncio.Task[None]] = set()
        self._keeper: asyncio.Task[None] | None = None
        self._last_worker = time.monotonic()
        self._lacking = False
        self.on_lack: Callable[[str], None] = lambda why: None  # told why no worker can be had; "" when one can again

    async def plan(self, endpoint: Endpoint, body: bytes | bytearray, request_id: str) -> Plan:
        large = _may_take_long(body)
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
            slot.empty()
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
        return any(slot.channel is not None and not slot.channel.gone for slot in self._slots)

    @property
    def _because(self) -> str:
        return f" ({self._forks.trouble})" if self._forks.trouble else ""

    def _free(self, slot: _Slot) -> None:
        """Give a place back, with a worker in it."""
        if slot.channel is not None:
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
                with contextlib.suppress(ChannelError):
                    slot.channel = await self._forks.fork()
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
            slot.empty()
        self._forks.close()

    async def _worker(self, slot: _Slot) -> Channel:
        """The worker in this place; a fresh one where it has gone while nobody looked. Raises ApiError when none can be had."""
        if slot.channel is not None and slot.channel.gone:
            slot.empty()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LACK_S):
                for pause in FORK_AGAIN_S:
                    if slot.channel is not None:
                        return slot.channel
                    await asyncio.sleep(pause)
                    with contextlib.suppress(ChannelError):
                        slot.channel = await self._forks.fork()
        if slot.channel is None:
            raise _no_worker()
        return slot.channel

    async def _planned(self, slot: _Slot, endpoint: Endpoint, body: bytes | bytearray, request_id: str) -> Plan:
        """Planning is pure: what one worker could not finish because it was ended, another can do again. Raises ApiError."""
        exchange = Exchange(endpoint)
        for _ in range(TRIES):
            whole = False
            try:
                plan, last = await exchange.run(await self._worker(slot), body, request_id)
                whole = not last
            except ChannelError:
                continue
            finally:
                if not whole:  # also when nobody waits for the answer any more: the worker may be at it for long
                    slot.empty()
            if isinstance(plan, RefusalPlan):
                raise ApiError(plan.status, plan.message, code=plan.code, param=plan.param, headers=plan.headers)
            return plan
        if exchange.stalled:
            log.error("%d of the processes that prepare requests did not get on and were ended", TRIES)
            raise unavailable("The processes that prepare requests do not get on.")
        if len(body) > HUGE_BYTES:
            raise ApiError(413, "The request takes too much memory to be prepared.", code="request_too_large")
        if exchange.rendering:
            raise template_failed("it took down the process that rendered it.")
        log.error("a request took down %d of the processes that tokenize", TRIES)
        raise internal()


def _may_take_long(body: bytes | bytearray) -> bool:
    """Whether planning may take more than moments. A few bytes of a grammar may take as long as a library is let compile them."""
    return len(body) > LARGE_BYTES or GRAMMARS.search(body) is not None


def _no_worker() -> ApiError:
    return unavailable("The server cannot start the process that prepares requests.")

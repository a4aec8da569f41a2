"""Sends single lines until each has its outcome. The worker hands in request bodies, and knows neither connections nor retries.

`retries` decides what happens after each try, `concurrency` how many requests are in flight. Clock, chance and waiting are here.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Self

from banyan_runtime.batch.client import Answer, Client, NoAnswer, asked_model
from banyan_runtime.batch.concurrency import Breaker, Concurrency, Limiter, Turn
from banyan_runtime.batch.endpoints import Resolve
from banyan_runtime.batch.errors import AccessDenied, ModelNotFound, ServerGone
from banyan_runtime.batch.retries import Decision, Kind, RetryPolicy, Tries, decide, needs_readiness
from banyan_runtime.errors import UserError

FIRST_PROBE_S: Final = 1.0
LAST_PROBE_S: Final = 30.0
TRUST_S: Final = 10.0  # after which a probe holds back no other line
LONG_S: Final = 30.0  # a try that takes so long at a ready server is being served
ENOUGH_REFUSALS: Final = 8  # before any line was answered: the job or the server is wrong, not the lines
MOST_MODELS: Final = 1000  # served models to remember


@dataclass(frozen=True, slots=True)
class Failed:
    """The line ended by its own fault without an answer. `code` is OpenAI's code of the error line."""

    code: str
    message: str


Outcome = Answer | Failed


@dataclass(frozen=True, slots=True)
class Expected:
    """What is known of the lines before they are sent."""

    lines: int  # at most so many will be sent
    models: frozenset[str] | None = None  # all names that lines ask for, '' for those that name none; None: too many to know
    served_before: bool = False  # an earlier try of this run had lines answered


@dataclass(frozen=True, slots=True)
class Target:
    """Where lines go: a server as the user names it, and the endpoint that every line calls."""

    server: str
    endpoint: str
    api_key: str | None = None
    timeout_s: float = 1800.0  # of one try
    max_concurrency: int = 64
    resolve: Resolve | None = None  # in place of the system's name service
    key_now: Callable[[], str | None] | None = None  # as of `Client`


@dataclass(slots=True)
class Load:
    """Load of a sender."""

    in_flight: int = 0
    limit: int = 0
    retries: int = 0
    waiting_for: str = ""  # why nothing is sent, while the server is away


class Readiness:
    """Readiness of the server: one question at a time, at most one in `every_s`."""

    def __init__(self, client: Client, every_s: float) -> None:
        self._client = client
        self._every_s = every_s
        self._asked_at = float("-inf")
        self._ready = False
        self._asking: asyncio.Task[None] | None = None

    async def ask(self, *, since: float) -> bool:
        """Return what the server said when it was asked after `since`."""
        while self._asked_at <= since:
            if self._asking is None:
                self._asking = asyncio.create_task(self._ask())
            await asyncio.shield(self._asking)
        return self._ready

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait([self._asking])

    async def _ask(self) -> None:
        try:
            await asyncio.sleep(self._asked_at + self._every_s - time.monotonic())
            now = time.monotonic()
            self._ready = await self._client.ready()
            self._asked_at = now
        finally:
            self._asking = None


class Sender:
    """Use it as an async context."""

    def __init__(self, target: Target, expected: Expected, policy: RetryPolicy | None = None) -> None:
        self._policy = policy or RetryPolicy()
        self._client = Client(
            target.server,
            target.endpoint,
            api_key=target.api_key,
            timeout_s=target.timeout_s,
            resolve=target.resolve,
            key_now=target.key_now,
        )
        self._pause_s = min(FIRST_PROBE_S, self._policy.max_backoff_s)
        breaker = Breaker(self._pause_s, min(LAST_PROBE_S, self._policy.max_backoff_s))
        self._limiter = Limiter(Concurrency(maximum=target.max_concurrency), breaker)
        self._readiness = Readiness(self._client, self._pause_s)
        self._expected = expected
        self._succeeded = expected.served_before
        models = expected.models or frozenset()
        self._served_models = set(models) if self._succeeded and len(models) == 1 else set()
        self._missing_models: set[str] = set()
        self._refusals = 0  # before any line was answered
        self._refused: set[int] = set()  # orders of the lines that were
        self._unserved_since: float | None = None  # the first failed try since a line was answered
        self._addresses = 1
        self._retries = 0
        self._last_trouble = ""
        self._quitting = asyncio.Event()

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._limiter.close()
        await self._readiness.close()
        await self._client.__aexit__()

    def quit(self) -> None:
        """Send nothing any more: lines that wait for a try are cancelled, what is on its way may still be answered."""
        self._limiter.shut()
        self._quitting.set()

    @property
    def load(self) -> Load:
        """The load now."""
        waiting_for = f"the server to serve again ({self._last_trouble})" if self._limiter.breaker.is_open else ""
        return Load(self._limiter.in_flight, self._limiter.concurrency.limit, self._retries, waiting_for)

    async def send(self, body: bytes, *, key: bytes, order: int, clear: Callable[[], Awaitable[None]] | None = None) -> Outcome:
        """Send one request until it has an outcome. `key`: how the prompt begins; lines with equal keys share a server's cache.
        Lines of lower `order` go first. `clear` is awaited before each try, when it has its turn: the caller's last word on whether
        it goes. Raises ServerGone, AccessDenied and ModelNotFound, which are no line's fault.
        """
        tries = Tries()
        address = ""
        while True:
            turn = await self._limiter.enter(order, tries)
            try:
                if clear is not None:
                    await clear()
                address = await self._choose(key, avoid=address)
                ready = await self._readiness.ask(since=turn.began) if turn.probe else None
                reply = await self._post(turn, body, address)
                kind = self._kind(reply, body)
                if decide(kind, succeeded=self._succeeded, ready=True) is Decision.ANSWER:
                    assert isinstance(reply, Answer)
                    self._passed(turn, reply, body)
                    return reply
                self._failed(turn, kind, reply, ready=ready is True)
            finally:
                self._limiter.leave(turn)
            failed_at = time.monotonic()
            if ready is None and needs_readiness(kind, succeeded=self._succeeded):
                ready = await self._readiness.ask(since=failed_at)
            decision = decide(kind, succeeded=self._succeeded, ready=ready is True)
            if decision is Decision.FAIL_JOB and self._is_own_error(kind, reply, body, order):
                decision = Decision.ANSWER
            if decision is Decision.ANSWER:
                assert isinstance(reply, Answer)
                return reply
            tries.add(kind, decision, failed_at)
            await self._check_silence(kind, reply)
            if (reason := tries.exhausted(self._policy, failed_at)) is not None:
                return reply if isinstance(reply, Answer) else Failed("server_error", f"{reply.message}; {reason}")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._quitting.wait(), self._wait_s(tries, decision, reply))
            self._retries += 1

    async def _choose(self, key: bytes, *, avoid: str) -> str:
        address = await self._client.choose(key, avoid=avoid)
        now = max(1, len(self._client.endpoints.balancer.addresses))
        if now > self._addresses:
            self._limiter.concurrency.joined(now - self._addresses)
        self._addresses = now
        return address

    async def _post(self, turn: Turn, body: bytes, address: str) -> Answer | NoAnswer:
        if not turn.probe:
            return await self._client.post(body, address)
        watching = asyncio.create_task(self._watch(turn))
        try:
            return await self._client.post(body, address)
        finally:
            watching.cancel()

    async def _watch(self, turn: Turn) -> None:
        await asyncio.sleep(TRUST_S)
        self._limiter.release(turn, ready=await self._readiness.ask(since=time.monotonic()))

    def _kind(self, reply: Answer | NoAnswer, body: bytes) -> Kind:
        """Class of a reply; a served model that is missing is no error of the line."""
        if reply.kind is Kind.MODEL_MISSING and asked_model(body) in self._served_models:
            return Kind.REFUSED
        return reply.kind

    def _passed(self, turn: Turn, answer: Answer, body: bytes) -> None:
        self._limiter.passed(turn)
        self._succeeded = True
        self._unserved_since = None
        if answer.status < 400 and len(self._served_models) < MOST_MODELS:
            self._served_models.add(asked_model(body))

    def _failed(self, turn: Turn, kind: Kind, reply: Answer | NoAnswer, *, ready: bool) -> None:
        if self._unserved_since is None:
            self._unserved_since = time.monotonic()
        self._last_trouble = f"status {reply.status}" if isinstance(reply, Answer) else reply.message
        if kind is Kind.BUSY:
            self._limiter.busy(turn)
        elif kind in (Kind.REFUSED, Kind.MODEL_MISSING) and not self._succeeded:
            self._limiter.passed(turn)  # the server is there, and other lines show whether it answers any
        else:
            self._limiter.failed(turn, ready=ready, asked_s=self._asked_s(reply))

    def _asked_s(self, reply: Answer | NoAnswer) -> float:
        return min(reply.retry_after_s, self._policy.max_backoff_s) if isinstance(reply, Answer) else 0.0

    def _wait_s(self, tries: Tries, decision: Decision, reply: Answer | NoAnswer) -> float:
        if decision is Decision.FAIL_JOB:
            return self._pause_s * (1 + random.random()) / 2
        if self._limiter.breaker.is_open and (decision is Decision.RETRY_FREE or tries.suspect):
            return 0.0  # the breaker paces the probes
        return tries.backoff_s(self._policy, jitter=random.random(), asked_s=self._asked_s(reply))

    def _is_own_error(self, kind: Kind, reply: Answer | NoAnswer, body: bytes, order: int) -> bool:
        """Whether a line that is refused before any line was answered is to blame. Raises what ends the job once enough are refused.
        One line that is refused again and again proves nothing while others are being served.
        """
        assert isinstance(reply, Answer)
        self._refusals += 1
        self._refused.add(order)
        if kind is Kind.MODEL_MISSING and self._expected.models is not None:
            self._missing_models.add(asked_model(body))
        alone = self._refusals >= ENOUGH_REFUSALS and not self._limiter.in_flight
        if len(self._refused) < min(ENOUGH_REFUSALS, self._expected.lines) and not alone:
            return False
        if kind is Kind.MODEL_MISSING and (self._expected.models is None or not self._missing_models >= self._expected.models):
            return True
        raise _misconfigured(reply, "on every line")

    async def _check_silence(self, kind: Kind, reply: Answer | NoAnswer) -> None:
        """Raise what ends the run when no line was answered for too long."""
        now = time.monotonic()
        silent_s = 0.0 if self._unserved_since is None else now - self._unserved_since
        if silent_s <= self._policy.silence_s:
            return
        if now - self._limiter.oldest > min(LONG_S, self._policy.silence_s / 2) and await self._readiness.ask(since=now):
            return
        if isinstance(reply, Answer) and kind in (Kind.REFUSED, Kind.MODEL_MISSING):
            raise _misconfigured(reply, f"on every line for {silent_s:.0f} s")
        raise ServerGone(f"the server has served nothing for {silent_s:.0f} s (last: {self._last_trouble})")


def _misconfigured(answer: Answer, where: str) -> UserError:
    """Error of a job whose lines are all refused."""
    said = answer.body[:300].decode(errors="replace")
    if answer.status in (401, 403):
        return AccessDenied(
            f"the server refuses the API key ({answer.status} {where}): {said}", code="api_key_denied", field="--api-key-file"
        )
    what = "has none of the models that the lines ask for" if answer.kind is Kind.MODEL_MISSING else "has no such endpoint"
    return ModelNotFound(f"the server {what} ({answer.status} {where}): {said}")

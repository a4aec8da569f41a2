"""Sends single lines until each has its outcome. The worker hands in request bodies, and knows neither connections nor retries.

Whose fault a failure is, is decided in `retries`; whether anything is sent at all, in `breaker`; how much at once, in
`concurrency`; whether the job can work at all, in `refusals`. Here are the clock, the chance and the waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Final, Self

from banyan_runtime.batch.asker import Welfare
from banyan_runtime.batch.breaker import Breaker, State
from banyan_runtime.batch.client import Answer, Client, NoAnswer
from banyan_runtime.batch.concurrency import Concurrency
from banyan_runtime.batch.endpoints import Resolve
from banyan_runtime.batch.errors import AccessDenied, ModelNotFound, ServerGone
from banyan_runtime.batch.gate import Gate, Turn
from banyan_runtime.batch.problems import asked_model, missing_model
from banyan_runtime.batch.refusals import SHARED, Refusals, Verdict
from banyan_runtime.batch.refusals import Expected as Expected
from banyan_runtime.batch.retries import Health, RetryPolicy, Tries, Trouble, backoff_s, hopeless, judge, note, trouble_of
from banyan_runtime.batch.witness import Witness

FIRST_PROBE_S: Final = 1.0
LAST_PROBE_S: Final = 30.0
TRUST_S: Final = 10.0  # a probe that runs for so long while the server says that it is well holds nobody back
LONG_S: Final = 30.0  # a try that runs for so long is being served
OWN: Final = frozenset({403, 404})  # often for what is in the line, and then always the same; of others a witness must tell
OWN_ATTEMPTS: Final = 2
DENIED_S: Final = 180.0
"""A server that is well and denies everything for so long means it: a Secret that is written anew takes a kubelet a minute or two to bring
to the server, and to us."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The line ended by its own fault without an answer. `code` is OpenAI's code of the error line."""

    code: str
    message: str


Outcome = Answer | Failed


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
    """What a sender is doing."""

    in_flight: int = 0
    limit: int = 0
    retries: int = 0
    endpoints: int = 0
    waiting_for: str = ""  # why nothing is sent, while the server is away


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
        self._health = Health()
        self._refusals = Refusals(expected)
        longest = self._policy.max_backoff_s
        breaker = Breaker(min(FIRST_PROBE_S, longest), min(LAST_PROBE_S, longest))
        self._gate = Gate(Concurrency(maximum=target.max_concurrency), breaker)
        self._asker = Welfare(self._client, self._health, every_s=min(FIRST_PROBE_S, longest))
        self._witness = Witness(self._client, self._heard_witness, every_s=min(FIRST_PROBE_S, longest))
        self._endpoints = 0
        self._retries = 0
        self._last_trouble = ""
        self._quitting = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._gate.close()
        await self._asker.close()
        await self._witness.close()
        await self._client.__aexit__()

    def quit(self) -> None:
        """Send nothing any more: lines that wait for a try are cancelled, what is on its way may still be answered."""
        self._gate.shut()
        self._quitting.set()

    @property
    def load(self) -> Load:
        """What is going on now."""
        breaker = self._gate.breaker
        waiting_for = "" if breaker.state is State.CLOSED else f"the server to serve again ({self._last_trouble})"
        return Load(self._gate.in_flight, self._gate.concurrency.limit, self._retries, self._endpoints, waiting_for)

    async def send(self, body: bytes, *, key: bytes, order: int, clear: Callable[[], Awaitable[None]] | None = None) -> Outcome:
        """Send one request until it has an outcome. `key`: how the prompt begins; lines with equal keys share a server's cache.
        Lines of lower `order` go first. `clear` is awaited before each try, when it has its turn: the caller's last word on whether
        it goes. Raises ServerGone, AccessDenied and ModelNotFound, which are no line's fault.
        """
        tries = Tries(time.monotonic(), openings=self._gate.breaker.openings, passes_seen=self._health.passes)
        address = ""
        while True:
            turn = await self._gate.enter(order, tries)
            try:
                if clear is not None:
                    await clear()
                address = await self._choose(key, avoid=address)
                reply, wait_s = await self._try(turn, tries, body, address, order)
            finally:
                self._gate.leave(turn)
            if wait_s is None:
                assert isinstance(reply, Answer)
                return reply
            await self._be_patient(reply, body)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._quitting.wait(), wait_s)
            if (reason := await self._hopeless(tries, reply)) is not None:
                return reply if isinstance(reply, Answer) else Failed("server_error", f"{reply.message}; {reason}")
            self._retries += 1

    async def _choose(self, key: bytes, *, avoid: str) -> str:
        address = await self._client.choose(key, avoid=avoid)
        now = len(self._client.endpoints.balancer.addresses)
        if self._endpoints and now > self._endpoints:
            self._gate.concurrency.joined(now - self._endpoints)
        elif now > 1 and not self._endpoints:
            self._gate.concurrency.joined(now - 1)
        self._endpoints = now
        return address

    async def _try(self, turn: Turn, tries: Tries, body: bytes, address: str, order: int) -> tuple[Answer | NoAnswer, float | None]:
        """Send the request once; gives what came, and the seconds to wait if it is not a line's outcome."""
        alone = turn.probe and await self._asker.ask(since=turn.began)
        trust = asyncio.create_task(self._trust(turn)) if turn.probe else None
        try:
            reply = await self._client.post(body, address)
        finally:
            if trust is not None:
                trust.cancel()
        trouble = reply.trouble if isinstance(reply, NoAnswer) else trouble_of(reply.status, reply.body)
        on_word, own = True, False
        if isinstance(reply, Answer) and reply.status in SHARED:
            model = missing_model(reply.status, reply.body, body)
            if self._is_unjudged(reply, model, order, tries):
                trouble = Trouble.REFUSED
            # a key or a model that worked is not lost by a line's fault, whatever the server says of itself
            own = self._refusals.served and (reply.status in OWN or self._witness.known) and model is None
            on_word = own and not self._witness.known and (tries.known or not self._refusals.several)
        if trouble is None:
            assert isinstance(reply, Answer)
            self._passed(turn, reply, body)
            return reply, None
        asked_s = min((reply.retry_after_s or 0.0) if isinstance(reply, Answer) else 0.0, self._policy.max_backoff_s)
        now = time.monotonic()
        self._last_trouble = reply.message if isinstance(reply, NoAnswer) else f"status {reply.status}"
        self._health.met(trouble, now)
        starting = trouble is Trouble.REFUSED and not self._refusals.served
        if starting:
            self._gate.passed(turn)  # the server is there, and more lines shall show whether it takes any
        elif trouble is Trouble.BUSY:
            self._gate.refused(turn)
        elif trouble is not Trouble.REFUSED or turn.probe or (self._gate.oldest >= turn.began and not (own and tries.known)):
            self._gate.troubled(turn, asked_s=asked_s)  # but refusals come at once, and say little while earlier lines are being served
        note(tries, trouble, self._health, now=now, openings=self._gate.breaker.openings, alone=alone, on_word=on_word, own=own)
        if starting or (own and self._witness.known):
            return reply, min(FIRST_PROBE_S, self._policy.max_backoff_s) * (1 + random.random()) / 2
        if self._gate.breaker.state is not State.CLOSED:
            return reply, 0.0  # the circuit does the waiting
        return reply, backoff_s(tries, self._policy, jitter=random.random(), asked_s=asked_s)

    def _is_unjudged(self, answer: Answer, model: str | None, order: int, tries: Tries) -> bool:
        """Whether the line is to be tried again. Raises what ends a job that cannot work, before any line is charged for it."""
        verdict = self._refusals.refused(order, model, alone=self._gate.in_flight == 1, known=tries.known)
        if verdict is Verdict.JOB:
            raise _misconfigured(answer, model, "on every line")
        return verdict is Verdict.UNKNOWN

    def _passed(self, turn: Turn, answer: Answer, body: bytes) -> None:
        usage = answer.usage
        self._gate.passed(turn, work=1.0 if usage is None else max(1.0, usage.total_tokens - usage.cached_tokens))
        if answer.status not in SHARED:
            self._refusals.answered(answer.status, asked_model(body) if self._refusals.many_models else None)
        if answer.status not in SHARED or self._refusals.served:
            self._health.passed(turn.began)
        self._witness.offer(body, answer)

    def _heard_witness(self, body: bytes, answer: Answer, sent_at: float) -> None:
        """The server still answers what it has answered before."""
        self._refusals.answered(answer.status, asked_model(body) if self._refusals.many_models else None)
        self._health.passed(sent_at)
        self._health.vouched_at = sent_at
        self._gate.served()

    async def _trust(self, turn: Turn) -> None:
        await asyncio.sleep(TRUST_S)
        self._gate.trust(turn, well=await self._asker.ask(since=time.monotonic()))

    async def _hopeless(self, tries: Tries, reply: Answer | NoAnswer) -> str | None:
        """Charge the line with its failed try if that was its fault; why it is given up, if it is."""
        fault = tries.fault
        if fault is not None and not judge(tries, self._health, self._gate.breaker.openings):
            if fault.own and self._witness.known:
                await self._witness.ask(since=fault.at)
            elif await self._asker.ask(since=fault.at):
                self._gate.healthy()
            judge(tries, self._health, self._gate.breaker.openings)
        own = isinstance(reply, Answer) and (reply.status in OWN or (reply.status in SHARED and self._witness.known))
        policy = replace(self._policy, max_attempts=min(self._policy.max_attempts, OWN_ATTEMPTS)) if own else self._policy
        return hopeless(tries, policy, time.monotonic())

    async def _be_patient(self, reply: Answer | NoAnswer, body: bytes) -> None:
        """Raise what ends the run when nothing was served for too long; what runs for long at a server that is well is being served."""
        now = time.monotonic()
        silent_s = self._health.silent_s(now)
        if silent_s <= self._policy.silence_s and not await self._is_denied(reply, now):
            return
        long_s = min(LONG_S, self._policy.silence_s / 2)
        if now - self._gate.oldest > long_s and await self._asker.ask(since=now):
            return
        if isinstance(reply, Answer) and reply.status in SHARED:
            raise _misconfigured(reply, missing_model(reply.status, reply.body, body), f"on every line for {silent_s:.0f} s")
        raise ServerGone(f"the server has served nothing for {silent_s:.0f} s (last: {self._last_trouble})")

    async def _is_denied(self, reply: Answer | NoAnswer, now: float) -> bool:
        """Whether a server that is well has taken nothing for so long that the key must have lost its rights."""
        if not isinstance(reply, Answer) or self._health.refused_s(now) <= DENIED_S:
            return False
        denied = reply.status == 401 or (reply.status == 403 and self._refusals.several)
        return denied and await self._asker.ask(since=now)


def _misconfigured(answer: Answer, model: str | None, where: str) -> AccessDenied | ModelNotFound:
    """What a refusal means that is no line's fault."""
    said = answer.body[:300].decode(errors="replace")
    if answer.status in (401, 403):
        return AccessDenied(f"the server refuses the API key ({answer.status} {where}; see --api-key-file): {said}")
    what = "has no such endpoint" if model is None else "has none of the models that the lines ask for"
    return ModelNotFound(f"the server {what} ({answer.status} {where}): {said}")

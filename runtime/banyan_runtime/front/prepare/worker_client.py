"""A worker process as the API process sees it: a request goes out over a Unix socket, messages come back, and the last is the plan.

Each message is its length and a msgpack struct; behind a `Request` follows the raw body.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal
import socket
import struct
from typing import Final

import msgspec

from banyan_runtime.front.errors import ApiError, internal
from banyan_runtime.front.plan import ChatPlan, CompletionPlan, Endpoint, NativePlan, Plan, PooledPlan, RefusalPlan
from banyan_runtime.process import cpu_seconds

log = logging.getLogger("banyan")

LENGTH: Final = struct.Struct("<Q")
CHECK_EVERY_S: Final = 1.0
STALLED_CHECKS: Final = 5  # consecutive checks at which a worker has used no computing time
RENDER_CPU_S: Final = 4.0  # of a template that does not end by itself after its 2 s of computing time


class Request(msgspec.Struct, frozen=True, tag="request", array_like=True):
    """To a worker."""

    endpoint: Endpoint
    request_id: str
    body_bytes: int


class Hello(msgspec.Struct, frozen=True, tag="hello", array_like=True):
    """The first message of a worker."""

    pid: int


class Rendering(msgspec.Struct, frozen=True, tag="rendering", array_like=True):
    """The chat template begins: it is to blame for what happens from here on."""


class Tokenizing(msgspec.Struct, frozen=True, tag="tokenizing", array_like=True):
    """The template has ended. Not sent where the rest takes next to no time."""


class Planned(msgspec.Struct, frozen=True, tag="planned", array_like=True):
    plan: Plan
    last: bool = False  # the worker ends, since its memory has grown
    prompts: list[bytes] = []  # the ids of several sequences, each prompt once: they are long, and a prompt may have many choices
    numbers: list[int] = []  # of each sequence its prompt

    @staticmethod
    def of(plan: Plan, *, last: bool) -> Planned:
        if not isinstance(plan, ChatPlan | CompletionPlan | NativePlan | PooledPlan) or len(plan.requests) < 2:
            return Planned(plan, last)
        prompts = {ids: number for number, ids in enumerate(dict.fromkeys(one.token_ids for one in plan.requests))}
        bare = tuple(msgspec.structs.replace(one, token_ids=b"") for one in plan.requests)
        numbers = [prompts[one.token_ids] for one in plan.requests]
        return Planned(msgspec.structs.replace(plan, requests=bare), last, list(prompts), numbers)

    def whole(self) -> Plan:
        if not self.numbers:
            return self.plan
        assert isinstance(self.plan, ChatPlan | CompletionPlan | NativePlan | PooledPlan), self.plan
        replace = msgspec.structs.replace
        pairs = zip(self.plan.requests, self.numbers, strict=True)
        return replace(self.plan, requests=tuple(replace(one, token_ids=self.prompts[number]) for one, number in pairs))


class Broken(msgspec.Struct, frozen=True, tag="broken", array_like=True):
    """A bug, and the worker ends."""

    trace: str


Message = Hello | Rendering | Tokenizing | Planned | Broken
_encode: Final = msgspec.msgpack.Encoder().encode
decode_request: Final = msgspec.msgpack.Decoder(Request).decode
decode_message: Final[msgspec.msgpack.Decoder[Message]] = msgspec.msgpack.Decoder(Message)


def framed(message: Request | Message) -> bytes:
    raw = _encode(message)
    return LENGTH.pack(len(raw)) + raw


class WorkerGone(Exception):
    """The worker has ended."""


class WorkerClient:
    """The connection to one worker. `close` ends the worker."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter | None = None
        self.pid = 0
        self.rendering = False  # the last request ended in its chat template
        self.stalled = False  # the worker was ended because it used no computing time

    @staticmethod
    def pair() -> tuple[WorkerClient, socket.socket]:
        """A client, and the worker's end of its socket. Raises WorkerGone when no file descriptor is left."""
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise WorkerGone(str(error)) from error
        return WorkerClient(ours), theirs

    async def connect(self) -> None:
        """Wait for the worker's first message. Raises WorkerGone; after any error the worker is ended."""
        try:
            self._reader, self._writer = await asyncio.open_unix_connection(sock=self._connection)
            hello = await self._message()
            assert isinstance(hello, Hello), hello
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise WorkerGone(str(error)) from error
            raise
        self.pid = hello.pid

    @property
    def gone(self) -> bool:
        """Whether the worker has ended: nothing else holds the other end of the socket."""
        descriptor = self._connection.fileno()
        if descriptor < 0 or (self._writer is not None and self._writer.transport.is_closing()):
            return True
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return any(events & (select.POLLHUP | select.POLLERR) for _, events in poll.poll(0))

    async def plan(self, endpoint: Endpoint, body: bytes | bytearray, request_id: str) -> Plan:
        """The plan of one request. The worker is ended unless it has answered whole.

        Raises WorkerGone when the worker ends or has to be ended, ApiError for a refusal, a bug or an endless template.
        """
        assert self._writer is not None, "not connected"
        self.rendering = self.stalled = False
        watch, usable = _Watch(self), False
        try:
            try:
                self._writer.write(framed(Request(endpoint, request_id, len(body))))
                self._writer.write(body)
                await self._writer.drain()
            except OSError as error:
                raise WorkerGone from error
            while True:
                match await self._message():
                    case Planned() as planned:
                        usable, plan = not planned.last, planned.whole()
                        if isinstance(plan, RefusalPlan):
                            raise ApiError(plan.status, plan.message, code=plan.code, param=plan.param, headers=plan.headers)
                        return plan
                    case Broken(trace):
                        log.error("a request could not be planned:\n%s", trace)
                        raise internal()
                    case message:
                        self.rendering = isinstance(message, Rendering)
        except WorkerGone:
            if watch.endless:
                raise template_failed("it did not end.") from None
            raise
        finally:
            watch.cancel()
            if not usable:  # also when the client has gone: the worker may be busy for long
                self.close()

    async def _message(self) -> Message:
        try:
            (size,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            return decode_message.decode(await self._reader.readexactly(size))
        except (OSError, asyncio.IncompleteReadError) as error:
            raise WorkerGone from error

    def kill(self) -> None:
        """End the worker, whatever it is doing; a pending `plan` raises WorkerGone."""
        if self.pid and not self.gone:  # ended workers are not waited for: another process may have the number by then
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        if self._writer is not None:
            self._writer.transport.abort()
        else:
            self._connection.close()


class _Watch:
    """Kills a worker that is stalled, or that renders without end. It counts computing time: on a busy or suspended machine
    time passes through no fault of the request."""

    def __init__(self, worker: WorkerClient) -> None:
        self._worker = worker
        self._cpu_s = -1.0  # at the last check
        self._idle_checks = 0
        self._render_from_s: float | None = None  # computing time at the first check that found the template running
        self.endless = False
        self._timer = asyncio.get_running_loop().call_later(CHECK_EVERY_S, self._check)

    def cancel(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        worker = self._worker
        cpu_s = 0.0 if worker.gone else cpu_seconds(worker.pid)
        self._idle_checks = self._idle_checks + 1 if cpu_s == self._cpu_s else 0
        self._cpu_s = cpu_s
        if not worker.rendering:
            self._render_from_s = None
        elif self._render_from_s is None:
            self._render_from_s = cpu_s
        self.endless = self._render_from_s is not None and cpu_s - self._render_from_s > RENDER_CPU_S
        worker.stalled = self._idle_checks >= STALLED_CHECKS
        if self.endless or worker.stalled:
            worker.kill()
        self._timer = asyncio.get_running_loop().call_later(CHECK_EVERY_S, self._check)


def template_failed(reason: str) -> ApiError:
    return ApiError(400, f"The chat template failed: {reason}", param="messages")

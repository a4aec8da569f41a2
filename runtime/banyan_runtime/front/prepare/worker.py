"""A process that plans one request after another: what its socket brings, with limits on what a request may cost."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Final, NoReturn

from banyan_runtime.front.chat.template import ChatTemplate
from banyan_runtime.front.errors import ApiError
from banyan_runtime.front.plan import Plan, RefusalPlan
from banyan_runtime.front.prepare.clock import template_time
from banyan_runtime.front.prepare.constraints import TRIAL_CPU_S
from banyan_runtime.front.prepare.planner import Planner
from banyan_runtime.front.prepare.worker_client import (
    LENGTH,
    Broken,
    Hello,
    Message,
    Planned,
    Rendering,
    Tokenizing,
    decode_request,
    framed,
)
from banyan_runtime.process import limit_memory, resident_bytes

SLOW_S: Final = 0.05  # a request that has taken longer, or has a larger body, tells when its template has ended
LARGE_BYTES: Final = 65_536
MEMORY_BYTES: Final = 1 << 30  # that one request may take
LOOK_EVERY_S: Final = 0.2
GROWN_BYTES: Final = 64 << 20  # by which a worker may have grown before a fresh one takes its place


class Worker:
    """Serves one connection until it ends."""

    def __init__(self, connection: socket.socket, planner: Planner, template: ChatTemplate | None) -> None:
        self._connection = connection
        self._planner = planner
        self._started = 0.0
        self._body_bytes = 0
        if template is not None:
            template.guard = self._rendering
        planner.constraints.guard = self._trying

    def run(self) -> None:
        limit_memory(MEMORY_BYTES)
        self._send(Hello(os.getpid()))
        fresh = resident_bytes()
        last = False
        while not last:
            (size,) = LENGTH.unpack(self._read(LENGTH.size))
            request = decode_request(self._read(size))
            body = self._read(request.body_bytes)
            self._started, self._body_bytes = time.monotonic(), request.body_bytes
            try:
                plan: Plan = self._planner.plan(request.endpoint, body, request.request_id)
            except ApiError as error:
                plan = _refused(error)
            except BaseException:
                self._send(Broken(traceback.format_exc()))
                return  # whatever it was may have left something behind
            last = resident_bytes() - fresh > GROWN_BYTES
            self._send(Planned.of(plan, last=last))
            del body, plan

    @contextlib.contextmanager
    def _rendering(self) -> Iterator[None]:
        self._send(Rendering())
        with template_time():
            yield
        if self._body_bytes > LARGE_BYTES or time.monotonic() - self._started > SLOW_S:
            self._send(Tokenizing())

    @contextlib.contextmanager
    def _trying(self, refusal: ApiError) -> Iterator[None]:
        """A grammar is compiled, by a library that cannot be interrupted. When that takes too long, another thread answers, and ends
        this process. What counts is computing time, as for templates."""
        self._send(Tokenizing())  # the template is not to blame for what it takes
        over, turn = threading.Event(), threading.Lock()
        end_s = time.process_time() + TRIAL_CPU_S

        def watch() -> None:
            while not over.wait(LOOK_EVERY_S):
                with turn:
                    if not over.is_set() and time.process_time() > end_s:
                        self._send(Planned(_refused(refusal), last=True))
                        os._exit(0)

        threading.Thread(target=watch, name="grammar", daemon=True).start()
        try:
            yield
        finally:
            with turn:
                over.set()

    def _read(self, size: int) -> bytearray:
        """Raises EOFError when the front has gone."""
        raw = bytearray(size)
        view, filled = memoryview(raw), 0
        while filled < size:
            got = self._connection.recv_into(view[filled:])
            if not got:
                raise EOFError
            filled += got
        return raw

    def _send(self, message: Message) -> None:
        self._connection.sendall(framed(message))


def _refused(error: ApiError) -> RefusalPlan:
    return RefusalPlan(status=error.status, message=error.message, code=error.code, param=error.param, headers=error.headers)


def serve(connection: socket.socket, planner: Planner, template: ChatTemplate | None) -> NoReturn:
    """The life of a freshly forked worker."""
    gc.disable()  # planning leaves no cycles, and looking for them takes most of the time of a large body
    with contextlib.suppress(EOFError, ConnectionError):  # the front has gone, or does not want this worker any more
        Worker(connection, planner, template).run()
    os._exit(0)

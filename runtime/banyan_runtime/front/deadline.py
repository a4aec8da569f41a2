"""How long a request may take: --request-timeout, and less where it says so itself in X-Request-Timeout."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from starlette.datastructures import Headers
from starlette.requests import Request

from banyan_runtime.config import ServerConfig
from banyan_runtime.front.auth import INTERNAL
from banyan_runtime.front.errors import ApiError, invalid, ran_too_long, waited_too_long
from banyan_runtime.front.transport import EXCHANGE

T = TypeVar("T")
HEADER: Final = "X-Request-Timeout"  # seconds
LONGEST_S: Final = 86_400.0


class Deadline:
    """When a request must be over; perhaps never."""

    def __init__(self, at: float = math.inf) -> None:
        """`at`: monotonic seconds, infinite for never."""
        self.at = at

    @staticmethod
    def of(config: ServerConfig, request: Request, received: float) -> Deadline:
        """That of a request that came at `received`, in monotonic seconds; this server's own batches have all the time that they ask
        for. Raises ApiError."""
        general = None if INTERNAL in request.scope else config.request_timeout
        limits = [limit for limit in (general, _asked(request.headers)) if limit is not None]
        return Deadline(received + min(limits, default=math.inf))

    async def wait(self, work: Awaitable[T]) -> T:
        """Do what comes before a request is submitted. Raises ApiError, with the work cancelled, when the time is over."""
        if math.isinf(self.at):
            return await work
        try:
            async with asyncio.timeout(max(0.0, self.at - time.monotonic())):
                return await work
        except TimeoutError:
            raise waited_too_long() from None

    def watch(self, request: Request, expire: Callable[[], None]) -> None:
        """Call `expire` when the time is over, unless the request is."""
        request.scope[EXCHANGE].callback(self.call(expire))

    def call(self, expire: Callable[[], None]) -> Callable[[], None]:
        """Call `expire` when the time is over, unless what this gives is called before."""
        if math.isinf(self.at):
            return lambda: None
        return asyncio.get_running_loop().call_later(max(0.0, self.at - time.monotonic()), expire).cancel


def _asked(headers: Headers) -> float | None:
    given = headers.get(HEADER)
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= LONGEST_S:
        raise invalid(HEADER, f"{HEADER} must be seconds in (0, {LONGEST_S:g}], got '{given[:50]}'.")
    return seconds


def passed(*, running: bool) -> ApiError:
    """The end of a submitted request at its deadline. `running`: it had a token already."""
    return ran_too_long() if running else waited_too_long()

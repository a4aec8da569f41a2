"""/flush_cache and /abort_request."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from banyan_runtime.front.admission import admit
from banyan_runtime.front.body import read_command
from banyan_runtime.front.context import Context
from banyan_runtime.front.engine_client import EngineClient, EngineError
from banyan_runtime.front.errors import ApiError, invalid, of_engine
from banyan_runtime.front.parsing import RequestModel, parse
from banyan_runtime.front.transport import while_connected

MAX_WAIT_S: Final = 300.0
_POLL_S: Final = 0.1


async def flush_cache(context: Context, request: Request) -> Response:
    """Empty the prefix cache. `?timeout=SECONDS`: how long to wait for running requests; without, 400 while any runs."""
    admit(context)
    await while_connected(request, _flush(context.client, time.monotonic() + _timeout(request)))
    return Response("Cache flushed.\nPlease check backend logs for more details.\n", media_type="text/plain")


async def _flush(client: EngineClient, deadline: float) -> None:
    """Try until the deadline, in monotonic seconds. Raises ApiError."""
    try:
        while not await client.flush():
            if time.monotonic() >= deadline:
                raise ApiError(400, "The cache was not flushed: requests are running or waiting.")
            await asyncio.sleep(_POLL_S)
    except EngineError as error:
        raise of_engine(error, "") from error


def _timeout(request: Request) -> float:
    given = request.query_params.get("timeout", "0")
    try:
        seconds = float(given)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MAX_WAIT_S:
        raise invalid("timeout", f"timeout must be in [0, {MAX_WAIT_S:g}] seconds.")
    return seconds


class AbortRequest(RequestModel):
    rid: str = ""
    abort_all: bool = False


async def abort_request(context: Context, request: Request) -> Response:
    """End requests by their exact id, or all. Ids that are not known are no error: they may just have finished."""
    asked = parse(AbortRequest, await read_command(request))
    if asked.abort_all:
        context.live.abort_all()
    elif asked.rid:
        for name in (asked.rid, f"chatcmpl-{asked.rid}", f"cmpl-{asked.rid}"):
            context.live.abort(name)
    return Response(status_code=200)

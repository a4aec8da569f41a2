"""Commands to the server: emptying the prefix cache, ending requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from banyan_runtime.front.admission import admit
from banyan_runtime.front.auth import OWNER, Access
from banyan_runtime.front.body import read_command
from banyan_runtime.front.context import Context
from banyan_runtime.front.engine_client import EngineClient
from banyan_runtime.front.errors import ApiError, invalid, of_engine
from banyan_runtime.front.parsing import RequestModel, parse
from banyan_runtime.front.submission import EngineError
from banyan_runtime.front.transport import while_connected

MAX_WAIT_S: Final = 300.0
_POLL_S: Final = 0.1
AT_ONCE: Final = 100  # ids that are aborted in one turn of the loop
_PREFIXES: Final = ("", "chatcmpl-", "cmpl-", "embd-", "score-", "rerank-")  # of the ids of answers, before a client's own


async def flush_cache(context: Context, request: Request) -> Response:
    """Empty the prefix cache. `?timeout=SECONDS`: how long to wait for running requests; without, 400 while any runs."""
    if request.method == "GET" and request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        # What else has an effect is POST, and `origins` looks at it; a browser names no origin for a page's picture.
        raise ApiError(403, "Web pages cannot empty the cache with GET; use POST.", code="origin_not_allowed")
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


class AbortRequests(RequestModel):
    request_ids: list[str]


async def abort_request(context: Context, request: Request) -> Response:
    """End one's own requests by their exact id, or, as an admin, anybody's and all. Ids that are not known are no error: they may just
    have finished."""
    asked = parse(AbortRequest, await read_command(request))
    if asked.abort_all:
        if (refusal := context.gate.check(request.scope, Access.ADMIN)) is not None:
            raise refusal
        context.live.abort_all()
    elif asked.rid:
        await _abort(context, request, [asked.rid])
    return await _heard(context)


async def abort_requests(context: Context, request: Request) -> Response:
    """vLLM's way to end requests by their ids."""
    await _abort(context, request, parse(AbortRequests, await read_command(request)).request_ids)
    return await _heard(context)


async def _abort(context: Context, request: Request, rids: Sequence[str]) -> None:
    """`rids`: the client's own, or what it was answered with."""
    for at in range(0, len(rids), AT_ONCE):
        ids = [prefix + rid for rid in rids[at : at + AT_ONCE] for prefix in _PREFIXES]
        context.live.abort_each(ids, request.scope[OWNER])
        await asyncio.sleep(0)  # what else there is to do comes in between


async def _heard(context: Context) -> Response:
    if context.live.heard is not None:  # what comes behind the answer is not meant
        await context.live.heard()
    return Response(status_code=200)

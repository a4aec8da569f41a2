"""POST /tokenize and /detokenize."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from banyan_runtime.front.admission import admit
from banyan_runtime.front.answers import ignored
from banyan_runtime.front.body import read_body
from banyan_runtime.front.context import Context
from banyan_runtime.front.plan import AnswerPlan, Endpoint
from banyan_runtime.front.transport import while_connected


async def tokenize(context: Context, request: Request) -> Response:
    return await _answer(context, request, "tokenize")


async def detokenize(context: Context, request: Request) -> Response:
    return await _answer(context, request, "detokenize")


async def _answer(context: Context, request: Request, endpoint: Endpoint) -> Response:
    body = await read_body(request)
    admit(context)
    assert context.preparer is not None, "admitted before it was ready"
    plan = await while_connected(request, context.preparer.plan(endpoint, body, ""))
    assert isinstance(plan, AnswerPlan)
    return Response(plan.body, headers=ignored(plan.ignored), media_type="application/json")

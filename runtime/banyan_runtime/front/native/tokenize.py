"""POST /tokenize and /detokenize."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from banyan_runtime.front.answers import answer, given
from banyan_runtime.front.context import Context
from banyan_runtime.front.plan import AnswerPlan


async def tokenize(context: Context, request: Request) -> Response:
    return await answer(context, request, "tokenize", AnswerPlan, given)


async def detokenize(context: Context, request: Request) -> Response:
    return await answer(context, request, "detokenize", AnswerPlan, given)

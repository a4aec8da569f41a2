"""POST /v1/embeddings."""

from __future__ import annotations

from collections.abc import Iterator

from starlette.requests import Request
from starlette.responses import Response

from banyan_runtime.front.answers import Answer, Arrival, Outcome, Whole, answer, to_json
from banyan_runtime.front.context import Context
from banyan_runtime.front.openai.vectors import as_json, begin, unit, usage
from banyan_runtime.front.plan import EmbeddingPlan


async def embeddings(context: Context, http: Request) -> Response:
    return await answer(context, http, "embeddings", EmbeddingPlan, _start)


def _start(context: Context, arrival: Arrival, plan: EmbeddingPlan) -> Answer:
    identity, start = begin(context, arrival, plan, "embeddings", "embd-")
    dimensions, packed = plan.dimensions, plan.base64
    numbers = usage([request.prompt_tokens for request in plan.requests])

    def body(outcomes: list[Outcome]) -> Iterator[bytes]:
        yield b'{"object":"list","data":['
        for index, outcome in enumerate(outcomes):
            vector = as_json(unit(outcome.vector, dimensions), packed=packed)
            yield b'%b{"object":"embedding","index":%d,"embedding":%b}' % (b"," if index else b"", index, vector)
        yield b'],"model":%b,"usage":%b}' % (to_json(identity.model), to_json(numbers))

    return Whole(start, body)

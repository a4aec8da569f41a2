"""POST /v1/rerank: documents by their similarity to a query, most similar first."""

from __future__ import annotations

from collections.abc import Iterator

from starlette.requests import Request
from starlette.responses import Response

from banyan_runtime.front.answers import Answer, Arrival, Outcome, Whole, answer, to_json
from banyan_runtime.front.context import Context
from banyan_runtime.front.openai.vectors import begin, similarities, usage
from banyan_runtime.front.plan import RerankPlan


async def rerank(context: Context, http: Request) -> Response:
    return await answer(context, http, "rerank", RerankPlan, _start)


def _start(context: Context, arrival: Arrival, plan: RerankPlan) -> Answer:
    identity, start = begin(context, arrival, plan, "rerank", "rerank-")
    documents, top = plan.documents, plan.top_n
    numbers = usage([request.prompt_tokens for request in plan.requests])

    def body(outcomes: list[Outcome]) -> Iterator[bytes]:
        scores: list[float] = []
        for score in similarities(outcomes, [(0, index) for index in range(1, len(outcomes))]):
            scores.append(score)
            yield b""
        order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[: top or None]
        head = {"id": identity.id, "model": identity.model, "usage": numbers}
        yield to_json(head)[:-1] + b',"results":['
        for place, index in enumerate(order):
            document = b'"document":%b,' % documents[index] if documents else b""
            told = (b"," if place else b"", index, document, to_json(scores[index]))
            yield b'%b{"index":%d,%b"relevance_score":%b}' % told
        yield b"]}"

    return Whole(start, body)

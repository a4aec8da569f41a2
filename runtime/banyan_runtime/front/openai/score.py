"""POST /v1/score: vLLM's, by the similarity of vectors, and SGLang's, by the probabilities of label tokens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from banyan_runtime.front.answers import Answer, Arrival, Outcome, Start, Whole, answer, to_json
from banyan_runtime.front.context import Context
from banyan_runtime.front.openai.vectors import begin, similarities, usage
from banyan_runtime.front.plan import LabelScorePlan, PooledPlan, ScorePlan


async def score(context: Context, http: Request) -> Response:
    return await answer(context, http, "score", PooledPlan, _start)


def _start(context: Context, arrival: Arrival, plan: PooledPlan) -> Answer:
    identity, start = begin(context, arrival, plan, "score", "score-")
    if isinstance(plan, LabelScorePlan):
        return _by_labels(start, plan)
    assert isinstance(plan, ScorePlan)
    pairs, numbers = plan.pairs, usage([request.prompt_tokens for request in plan.requests])

    def body(outcomes: list[Outcome]) -> Iterator[bytes]:
        yield to_json(identity.head("list"))[:-1] + b',"data":['
        for index, found in enumerate(similarities(outcomes, pairs)):
            yield b'%b{"index":%d,"object":"score","score":%b}' % (b"," if index else b"", index, to_json(found))
        yield b'],"usage":%b}' % to_json(numbers)

    return Whole(start, body)


def _by_labels(start: Start, plan: LabelScorePlan) -> Answer:
    labels, softmax, temperature, model = plan.labels, plan.softmax, plan.temperature, plan.envelope.model
    numbers = usage([request.prompt_tokens - 1 for request in plan.requests[::labels]])  # without the label

    def body(outcomes: list[Outcome]) -> Iterator[bytes]:
        yield b'{"scores":['
        for first in range(0, len(outcomes), labels):
            found = _probabilities(outcomes[first : first + labels], temperature if softmax else None)
            yield (b"," if first else b"") + to_json(found)
        yield b'],"model":%b,"usage":%b,"object":"scoring"}' % (to_json(model), to_json(numbers))

    return Whole(start, body)


def _probabilities(outcomes: list[Outcome], temperature: float | None) -> list[float]:
    """Of the labels of one item: in the vocabulary, or with a temperature among themselves."""
    logprobs = np.array([np.frombuffer(outcome.prompt_logprobs[-1].columns.values, dtype="<f4")[-1] for outcome in outcomes], np.float64)
    if temperature is None:
        return [float(value) for value in np.exp(logprobs)]
    weights = np.exp((logprobs - logprobs.max()) / temperature)
    return [float(value) for value in weights / weights.sum()]

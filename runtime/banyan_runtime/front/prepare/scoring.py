"""Plans of score and rerank: by the similarity of vectors, or by the probabilities of label tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from banyan_runtime import wire
from banyan_runtime.front.errors import ApiError, invalid, missing
from banyan_runtime.front.openai.vector_schema import RerankRequest, ScoreRequest
from banyan_runtime.front.parsing import parse
from banyan_runtime.front.plan import GenerateRequest, LabelScorePlan, RerankPlan, ScorePlan
from banyan_runtime.front.prepare.embeddings import Input, begin, check_number, ids_of, inputs, needed, pooled
from banyan_runtime.front.prepare.prompts import check_ids
from banyan_runtime.front.prepare.sequences import Served, check_room, priority_of


def plan_score(served: Served, body: Mapping[str, Any], request_id: str) -> ScorePlan | LabelScorePlan:
    """Raises ApiError."""
    asked = parse(ScoreRequest, body)
    if asked.label_token_ids is not None:
        return _by_labels(served, asked, asked.label_token_ids)
    embedding = needed(served)
    envelope = begin(served, asked)
    ones, others = _sides(asked)
    requests = [pooled(served, embedding, asked, each) for each in (*ones, *others)]
    check_room(served.info, requests, others[0].param.partition("[")[0])
    pairs = tuple((index if len(ones) > 1 else 0, len(ones) + index) for index in range(len(others)))
    return ScorePlan(envelope=envelope, requests=tuple(requests), pairs=pairs)


def plan_rerank(served: Served, body: Mapping[str, Any], request_id: str) -> RerankPlan:
    """Raises ApiError."""
    embedding = needed(served)
    asked = parse(RerankRequest, body)
    envelope = begin(served, asked)
    instruction = asked.instruct or asked.instruction
    query = inputs(asked.query, "query")
    if instruction:
        query = [Input("query", embedding.instructed(asked.query, instruction))]
    texts = [document if isinstance(document, str) else document.text for document in asked.documents]
    requests = [pooled(served, embedding, asked, each) for each in (*query, *inputs([*texts], "documents"))]
    check_room(served.info, requests, "documents")
    return RerankPlan(
        envelope=envelope,
        requests=tuple(requests),
        top_n=min(asked.top_n, len(texts)),
        documents=tuple(msgspec.json.encode({"text": text}) for text in texts) if asked.return_documents else (),
    )


def _sides(asked: ScoreRequest) -> tuple[list[Input], list[Input]]:
    """What is compared with what: one with each, or pair by pair. Raises ApiError."""
    ways = {"text_1": ("text_2",), "data_1": ("data_2",), "queries": ("documents", "items"), "query": ("documents", "items")}
    one = next((name for name in ways if getattr(asked, name) is not None), None)
    if one is None:
        raise missing("queries")
    other = next((name for name in ways[one] if getattr(asked, name) is not None), None)
    if other is None:
        raise missing(ways[one][0])
    ones, others = inputs(getattr(asked, one), one), inputs(getattr(asked, other), other)
    if len(ones) not in (1, len(others)):
        raise invalid(one, f"{one} must have one input, or as many as {other}: got {len(ones)} and {len(others)}.")
    return ones, others


def _by_labels(served: Served, asked: ScoreRequest, labels: list[int]) -> LabelScorePlan:
    """SGLang's: the query and each item make a prompt, of whose next token the labels' probabilities are wanted."""
    if not served.config.serves_text:
        raise ApiError(400, "label_token_ids needs a server of text; this one serves vectors (--is-embedding).", code="unsupported")
    envelope = begin(served, asked)
    if not labels:
        raise invalid("label_token_ids", "label_token_ids cannot be empty.", "empty_array")
    check_ids(labels, served.info, "label_token_ids")
    if asked.query is None or asked.items is None:
        raise missing("items" if asked.query is not None else "query")
    prompts = _prompts(asked.query, asked.items, item_first=asked.item_first)
    check_number(len(prompts) * len(labels), "items")
    requests: list[GenerateRequest] = []
    for prompt in prompts:
        ids = ids_of(served, asked, prompt, room=1)
        # The probability of a prompt's last token, given those before it. All prompts of an item share what is computed of it.
        scored = wire.LogprobRequest(prompt_from=len(ids))
        requests += [
            GenerateRequest(
                token_ids=wire.pack_ids([*ids, label]),
                sampling=wire.Sampling(0),
                logprobs=scored,
                priority=priority_of(asked.priority),
                param=prompt.param,
                told_tokens=0 if place else len(ids),  # without the label
            )
            for place, label in enumerate(labels)
        ]
    check_room(served.info, requests, "items")
    return LabelScorePlan(
        envelope=envelope, requests=tuple(requests), labels=len(labels), softmax=asked.apply_softmax, temperature=float(asked.temperature)
    )


def _prompts(query: str | list[Any], items: str | list[Any], *, item_first: bool) -> list[Input]:
    """Raises ApiError."""
    (first, *more), several = inputs(query, "query"), inputs(items, "items")
    if more:
        raise invalid("query", "query must be one text, or the token ids of one.")
    return [_joined(each, first, each.param) if item_first else _joined(first, each, each.param) for each in several]


def _joined(one: Input, other: Input, param: str) -> Input:
    if isinstance(one.value, str) and isinstance(other.value, str):
        return Input(param, one.value + other.value)
    if isinstance(one.value, str) or isinstance(other.value, str):
        raise invalid("items", "query and items must both be text, or both be token ids.")
    return Input(param, [*one.value, *other.value])

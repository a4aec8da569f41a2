"""Plans of responses: the chat completion that they ask for, and what the answer says of the request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from banyan_runtime.front.errors import ApiError
from banyan_runtime.front.openai.responses.items import messages_of, shown
from banyan_runtime.front.openai.responses.references import Before, named, resolved
from banyan_runtime.front.openai.responses.schema import ResponsesRequest, check_input
from banyan_runtime.front.openai.responses.tools import Tools
from banyan_runtime.front.parsing import parse
from banyan_runtime.front.plan import AnswerPlan, ChatPlan, ResponsePlan
from banyan_runtime.front.prepare.chat import plan_chat
from banyan_runtime.front.prepare.sequences import Served
from banyan_runtime.front.prepare.truncation import fitted
from banyan_runtime.front.renaming import renamed, renamed_plan
from banyan_runtime.grammar.errors import GrammarError
from banyan_runtime.grammar.schema import prepare
from banyan_runtime.wire import Grammar


def plan_response(served: Served, body: Mapping[str, Any], request_id: str) -> ResponsePlan:
    """`body`: the client's is `request`; `before`: what the server knows of it, `references.Before`. Raises ApiError."""
    known: Before = body["before"]
    history: list[dict[str, Any]] = msgspec.json.decode(known.history)
    asked = parse(ResponsesRequest, body["request"])
    check_input(asked.input)
    asked.check()
    system = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
    before = [*system, *history]
    items = resolved(asked.input, known.kept)
    tools = Tools(asked.tools, items, lambda schema: _enforceable(served, schema))
    said, names = messages_of(items, len(before))
    names += [(f"messages[{place}]", "instructions" if place < len(system) else "previous_response_id") for place in range(len(before))]
    messages = [*history, *said]
    names += asked.names(tools)

    def plan(given: Sequence[Mapping[str, Any]]) -> ChatPlan:
        return renamed_plan(plan_chat(served, asked.chat(given, tools), request_id), names)

    try:
        chat = fitted([*before, *said], plan) if asked.truncation == "auto" else plan([*before, *said])
    except ApiError as error:
        raise renamed(error, names) from None
    envelope = msgspec.structs.replace(chat.envelope, stream=asked.stream, ignored=(*chat.unshown, *asked.without_effect(tools)))
    return ResponsePlan(
        **{name: getattr(chat, name) for name in ChatPlan.__struct_fields__ if name != "envelope"},
        envelope=envelope,
        id=known.id,
        settings=msgspec.json.encode(_settings(asked, chat)),
        items=msgspec.json.encode(shown(items, known.id)),
        messages=msgspec.json.encode(messages),
        store=asked.store,
        background=asked.background,
        previous=asked.previous_response_id,
        called=tools.called(),
    )


def _enforceable(served: Served, schema: Mapping[str, Any]) -> bool:
    try:
        return served.constraints.usable(Grammar("json_schema", prepare(schema)))
    except GrammarError:
        return False


def answer_input_tokens(served: Served, body: Mapping[str, Any], request_id: str) -> AnswerPlan:
    """How many tokens the input of a response has. Raises ApiError."""
    plan = plan_response(served, body, request_id)
    counted = {"object": "response.input_tokens", "input_tokens": plan.requests[0].prompt_tokens}
    return AnswerPlan(body=msgspec.json.encode(counted), ignored=plan.envelope.ignored)


def answer_previous(served: Served, body: Mapping[str, Any], request_id: str) -> AnswerPlan:
    """What a request names of the responses that are kept: JSON of `references.Named`. Raises ApiError."""
    return AnswerPlan(body=msgspec.json.encode(named(body)))


def _settings(asked: ResponsesRequest, chat: ChatPlan) -> dict[str, Any]:
    """What every answer repeats of its request."""
    sampling = chat.requests[0].sampling
    extra = asked.model_extra or {}
    return {
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": asked.max_tool_calls,
        "metadata": asked.metadata,
        "parallel_tool_calls": extra.get("parallel_tool_calls", True),
        "previous_response_id": asked.previous_response_id,
        "prompt_cache_key": extra.get("prompt_cache_key"),
        "reasoning": {"effort": asked.reasoning.effort, "summary": asked.reasoning.summary},
        "safety_identifier": extra.get("safety_identifier"),
        "service_tier": chat.envelope.tier or "default",
        "store": asked.store,
        "temperature": sampling.temperature,
        "text": {"format": asked.text.format or {"type": "text"}, "verbosity": asked.text.verbosity or "medium"},
        "tool_choice": asked.tool_choice or "auto",
        "tools": asked.tools,
        "top_logprobs": asked.top_logprobs,
        "top_p": sampling.top_p,
        "truncation": asked.truncation or "disabled",
        "user": extra.get("user"),
    }

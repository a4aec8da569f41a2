"""Plans of chat completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from banyan_runtime.front.chat.prompt import ChatOptions, render
from banyan_runtime.front.openai.schema import CHAT_UNSUPPORTED, ChatRequest
from banyan_runtime.front.openai.tools import ToolChoice, choice_of
from banyan_runtime.front.parsing import parse
from banyan_runtime.front.plan import ChatPlan, GenerateRequest
from banyan_runtime.front.prepare.encode import encode
from banyan_runtime.front.prepare.openai import begin, salt_of
from banyan_runtime.front.prepare.output import output_of
from banyan_runtime.front.prepare.sequences import (
    Frame,
    Scores,
    Served,
    check_logprobs,
    check_room,
    priority_of,
    sequences,
    within_logprobs,
)
from banyan_runtime.front.sampling import resolve


def plan_chat(served: Served, body: Mapping[str, Any], request_id: str) -> ChatPlan:
    """Raises ApiError."""
    asked = parse(ChatRequest, body)
    text = served.text
    envelope = begin(served, asked, CHAT_UNSUPPORTED)
    params = resolve(asked, text.defaults.openai, text.defaults.eos_ids | text.turn_end_ids, served.info.vocab_size)
    _ = text.needed_tokenizer  # the clearer error comes first
    choice = choice_of(asked.tool_choice, asked.tools)
    options = ChatOptions(
        add_generation_prompt=asked.add_generation_prompt is not False,
        continue_final_message=asked.continue_final_message,
        variables=asked.template_variables(),
        tools=_shown(body, choice),
        documents=asked.documents,
    )
    prompt = render(text.template, asked.messages, options)
    output = output_of(served, asked, choice, prompt.opening)
    frame = Frame(
        param="messages",
        default_max_tokens=None,
        stream=envelope.stream,
        priority=priority_of(asked.urgency),
        salt=salt_of(asked),
        reasoning=output.reasoning,
        separate_reasoning=asked.separate_reasoning,
        stream_reasoning=asked.stream_reasoning,
        tools=output.tools,
        constraint=output.constraint,
    )
    # The template writes BOS itself, so the tokenizer must not add a second one.
    ids = encode(served, prompt.text, "messages", add_special_tokens=asked.add_special_tokens)
    unshown = (*prompt.unshown, *(f"tools[{index}].function.parameters" for index in output.loosened))
    top = asked.top_logprobs if asked.logprobs else -1
    requests: Sequence[GenerateRequest] = sequences(
        served, frame, ids, params, seed_id=f"chatcmpl-{envelope.own_id or request_id}", scores=Scores(top)
    )
    check_room(served.info, requests, "n")
    if params.max_tokens is None:
        requests = within_logprobs(requests)
    check_logprobs(requests, "top_logprobs", params.max_tokens_name)
    return ChatPlan(
        envelope=msgspec.structs.replace(envelope, ignored=(*unshown, *envelope.ignored)),
        requests=tuple(requests),
        choices_per_prompt=params.n,
        top_logprobs=top,
        tokens_as_ids=asked.return_tokens_as_token_ids,
        include_reasoning=asked.include_reasoning,
        turn_end=tuple(text.turn_end_ids),
        unshown=unshown,
    )


def _shown(body: Mapping[str, Any], choice: ToolChoice) -> Sequence[Mapping[str, Any]]:
    """The tools that the model sees."""
    if choice.mode == "none":
        return ()
    tools: Sequence[Mapping[str, Any]] = body["tools"]
    return [tool for tool in tools if tool["function"]["name"] in choice.names] if choice.limited else tools

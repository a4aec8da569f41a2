"""Plans of chat completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from banyan_runtime.front.chat.prompt import ChatOptions, ChatPrompt, render
from banyan_runtime.front.openai.schema import CHAT_UNSUPPORTED, ChatRequest
from banyan_runtime.front.parsing import parse
from banyan_runtime.front.plan import ChatPlan, ReasoningStart
from banyan_runtime.front.prepare.encode import encode
from banyan_runtime.front.prepare.openai import begin, salt_of
from banyan_runtime.front.prepare.sequences import Frame, Scores, Served, check_logprobs, priority_of, sequences
from banyan_runtime.front.sampling import resolve
from banyan_runtime.front.text.text import Text


def plan_chat(served: Served, body: Mapping[str, Any], request_id: str) -> ChatPlan:
    """Raises ApiError."""
    asked = parse(ChatRequest, body)
    text = served.text
    envelope = begin(served, asked, CHAT_UNSUPPORTED)
    params = resolve(asked, text.defaults.openai, text.defaults.eos_ids | text.turn_end_ids, served.info.vocab_size)
    _ = text.needed_tokenizer  # the clearer error comes first
    options = ChatOptions(
        add_generation_prompt=asked.add_generation_prompt is not False,
        continue_final_message=asked.continue_final_message,
        variables=asked.template_variables(),
    )
    prompt = render(text.template, asked.messages, options)
    frame = Frame(
        param="messages",
        default_max_tokens=None,
        stream=envelope.stream,
        priority=priority_of(asked.priority),
        salt=salt_of(asked),
        reasoning=_reasoning(text, asked, prompt),
        stream_reasoning=asked.stream_reasoning,
    )
    # The template writes BOS itself, so the tokenizer must not add a second one.
    ids = encode(served, prompt.text, "messages", add_special_tokens=asked.add_special_tokens)
    top = asked.top_logprobs if asked.logprobs else -1
    requests = sequences(served, frame, ids, params, seed_id=f"chatcmpl-{envelope.own_id or request_id}", scores=Scores(top))
    check_logprobs(requests, "top_logprobs")
    return ChatPlan(
        envelope=envelope,
        requests=tuple(requests),
        choices_per_prompt=params.n,
        top_logprobs=top,
        include_reasoning=asked.include_reasoning,
        turn_end=tuple(text.turn_end_ids),
    )


def _reasoning(text: Text, asked: ChatRequest, prompt: ChatPrompt) -> ReasoningStart | None:
    if text.reasoning is None or not asked.separate_reasoning:
        return None
    return text.reasoning.form.start_state(prompt.opening).value

"""Plans of completions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

from banyan_runtime import wire
from banyan_runtime.front.errors import ApiError, invalid, invalid_type, unsupported
from banyan_runtime.front.openai.schema import COMPLETION_UNSUPPORTED, CompletionRequest
from banyan_runtime.front.parsing import parse
from banyan_runtime.front.plan import CompletionPlan, GenerateRequest
from banyan_runtime.front.prepare.encode import encode
from banyan_runtime.front.prepare.openai import begin, salt_of
from banyan_runtime.front.prepare.prompts import MAX_PROMPTS, as_ids
from banyan_runtime.front.prepare.sequences import (
    Frame,
    Scores,
    Served,
    check_logprobs,
    check_room,
    check_sequences,
    priority_of,
    sequences,
)
from banyan_runtime.front.sampling import resolve
from banyan_runtime.front.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS: Final = 16


def plan_completion(served: Served, body: Mapping[str, Any], request_id: str) -> CompletionPlan:
    """Raises ApiError."""
    asked = parse(CompletionRequest, body)
    envelope = begin(served, asked, COMPLETION_UNSUPPORTED)
    text, eos_ids = served.text, served.text.defaults.eos_ids
    params = resolve(asked, text.defaults.openai, eos_ids, served.info.vocab_size)
    kept = params.n
    params = dataclasses.replace(params, n=asked.best_of or kept)
    _ = text.needed_tokenizer  # also for ids: the answer is text
    prompts = _prompts(asked.prompt)
    constraint = served.constraints.of(asked)
    check_sequences(len(prompts), params.n)
    frame = Frame(
        param="prompt",
        default_max_tokens=DEFAULT_MAX_TOKENS,
        stream=envelope.stream,
        priority=priority_of(asked.urgency),
        salt=salt_of(asked),
        constraint=constraint,
    )
    top = -1 if asked.logprobs is None else asked.logprobs
    scores = Scores(max(top, 0) if params.n > kept else top, 0 if asked.echo and top >= 0 else -1)
    seed_id = f"cmpl-{envelope.own_id or request_id}"
    requests: list[GenerateRequest] = []
    echoes: list[str] = []
    for position, prompt in enumerate(prompts):
        if asked.suffix:
            prompt = infill(text.needed_tokenizer, prompt, asked.suffix)
        ids = encode(served, prompt, "prompt", add_special_tokens=asked.add_special_tokens) if isinstance(prompt, str) else prompt
        prompt_seed_id = seed_id if position == 0 else f"{seed_id}:{position}"
        choices = sequences(served, frame, ids, params, seed_id=prompt_seed_id, scores=scores)
        requests += choices
        echoes += [_echo(served, prompt, choices[0]) if asked.echo else ""] * params.n
    check_room(served.info, requests, "prompt" if params.n == 1 else "n" if params.n == kept else "best_of")
    check_logprobs(requests, "logprobs", params.max_tokens_name)
    return CompletionPlan(
        envelope=envelope,
        requests=tuple(requests),
        choices_per_prompt=params.n,
        top_logprobs=top,
        tokens_as_ids=asked.return_tokens_as_token_ids,
        echoes=tuple(echoes),
        echo_logprobs=asked.echo and top >= 0,
        kept=kept,
    )


def _prompts(given: str | list[Any]) -> Sequence[str | list[int]]:
    """One or many prompts, each text or token ids. Raises ApiError."""
    if isinstance(given, str):
        if not given:
            raise _empty()
        return [given]
    if not given:
        raise _empty()
    if all(type(item) is int for item in given):
        return [given]
    if len(given) > MAX_PROMPTS:
        raise invalid("prompt", f"at most {MAX_PROMPTS} prompts are allowed, got {len(given)}", "array_above_max_length")
    if all(isinstance(item, str) for item in given):
        return given
    if all(isinstance(item, list) for item in given):
        return [as_ids(item, f"prompt[{position}]") for position, item in enumerate(given)]
    raise invalid_type("prompt", "expected a string, an array of strings, an array of token ids, or an array of such arrays.")


def _echo(served: Served, prompt: str | list[int], request: GenerateRequest) -> str:
    """A prompt as echo repeats it: as it was written, or what its ids say."""
    if isinstance(prompt, str):
        return prompt
    return served.text.needed_tokenizer.decode(wire.unpack_ids(request.token_ids).tolist(), skip_special_tokens=False)


def _empty() -> ApiError:
    return invalid("prompt", "Prompt cannot be empty", "empty_array")


_MARKERS: Final = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
)
"""What stands before the beginning, before the end, and where the model goes on."""


def infill(tokenizer: Tokenizer, prompt: str | list[int], suffix: str) -> str:
    """Raises ApiError for models that do not know how, and prompts that are no text."""
    if not isinstance(prompt, str):
        raise invalid("suffix", "suffix needs a prompt that is text.")
    for before, behind, middle in _MARKERS:
        if before in tokenizer.added and behind in tokenizer.added and middle in tokenizer.added:
            return f"{before}{prompt}{behind}{suffix}{middle}"
    raise unsupported("suffix", "this model has no tokens for text to be filled in")

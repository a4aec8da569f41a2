"""Answers of /tokenize and /detokenize, in SGLang's and vLLM's words at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from banyan_runtime.front.chat.prompt import ChatOptions, render
from banyan_runtime.front.errors import invalid, missing, unknown_model
from banyan_runtime.front.native.schema import TOKENIZE_UNSUPPORTED, DetokenizeRequest, TokenizeRequest
from banyan_runtime.front.openai.tools import check_tools
from banyan_runtime.front.parsing import parse, refuse_unsupported, unknown
from banyan_runtime.front.plan import AnswerPlan
from banyan_runtime.front.prepare.encode import beginning
from banyan_runtime.front.prepare.prompts import MAX_PROMPTS, as_ids, check_ids
from banyan_runtime.front.prepare.sequences import Served

MAX_TOKENS: Final = 1_000_000


def answer_tokenize(served: Served, body: Mapping[str, Any], request_id: str) -> AnswerPlan:
    """Raises ApiError."""
    asked = parse(TokenizeRequest, body)
    _check_model(served, asked.model)
    refuse_unsupported(asked, TOKENIZE_UNSUPPORTED)
    tokenizer = served.text.needed_tokenizer
    ignored = unknown(asked, frozenset(TOKENIZE_UNSUPPORTED))
    if asked.prompt is not None:
        special = asked.add_special_tokens is not False
        prompts = asked.prompt if isinstance(asked.prompt, list) else [asked.prompt]
    elif asked.messages is not None:
        special = asked.add_special_tokens is True
        check_tools(asked.tools)
        options = ChatOptions(
            add_generation_prompt=asked.add_generation_prompt and not asked.continue_final_message,
            continue_final_message=asked.continue_final_message,
            variables=asked.chat_template_kwargs,
            tools=body["tools"] if asked.tools else (),
        )
        rendered = render(served.text.template, asked.messages, options)
        prompts, ignored = [rendered.text], (*rendered.unshown, *ignored)
    else:
        raise missing("prompt")
    if len(prompts) > MAX_PROMPTS:
        raise invalid("prompt", f"at most {MAX_PROMPTS} prompts are allowed, got {len(prompts)}", "array_above_max_length")
    tokens: list[list[int]] = []
    total = 0
    for prompt in prompts:
        ids, _ = beginning(tokenizer, prompt, MAX_TOKENS, add_special_tokens=special)
        total += len(ids)
        _check_count(total, "prompt" if asked.prompt is not None else "messages")
        tokens.append(ids)
    several = isinstance(asked.prompt, list)
    answer: dict[str, Any] = {
        "tokens": tokens if several else tokens[0],
        "count": [len(ids) for ids in tokens] if several else len(tokens[0]),
        "max_model_len": served.info.max_model_len,
    }
    if asked.return_token_strs:
        pieces = [[tokenizer.token_text(token_id) for token_id in ids] for ids in tokens]
        answer["token_strs"] = pieces if several else pieces[0]
    return AnswerPlan(body=msgspec.json.encode(answer), ignored=ignored)


def answer_detokenize(served: Served, body: Mapping[str, Any], request_id: str) -> AnswerPlan:
    """Raises ApiError."""
    asked = parse(DetokenizeRequest, body)
    _check_model(served, asked.model)
    tokenizer = served.text.needed_tokenizer
    several = bool(asked.tokens) and isinstance(asked.tokens[0], list)
    lists = [as_ids(ids, "tokens") for ids in (asked.tokens if several else [asked.tokens])]
    _check_count(sum(map(len, lists)), "tokens")
    texts: list[str] = []
    for ids in lists:
        check_ids(ids, served.info, "tokens")
        texts.append(tokenizer.decode(ids, skip_special_tokens=asked.skip_special_tokens))
    answer = texts if several else texts[0]
    return AnswerPlan(body=msgspec.json.encode({"text": answer, "prompt": answer}), ignored=unknown(asked, frozenset()))


def _check_model(served: Served, model: str | None) -> None:
    if model is not None and not served.config.serves(model):
        raise unknown_model(model, served.config.names)


def _check_count(tokens: int, param: str) -> None:
    if tokens > MAX_TOKENS:
        raise invalid(param, f"at most {MAX_TOKENS} tokens are allowed.", "array_above_max_length")

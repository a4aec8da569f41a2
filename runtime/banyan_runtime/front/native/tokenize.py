"""/tokenize and /detokenize, answering in SGLang's and vLLM's words at once."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from banyan_runtime.front.chat.messages import FIRST_PROBLEM, ChatMessage
from banyan_runtime.front.chat.prompt import ChatOptions, render
from banyan_runtime.front.context import Context
from banyan_runtime.front.errors import invalid, missing
from banyan_runtime.front.limits import admit, as_ids, check_ids, read_json
from banyan_runtime.front.openai.serving import to_json
from banyan_runtime.front.parsing import RequestModel, Texts, parse
from banyan_runtime.front.text.text import Text


class TokenizeRequest(RequestModel):
    prompt: str | Texts | None = None
    messages: Annotated[list[ChatMessage], FIRST_PROBLEM] | None = None
    add_special_tokens: bool | None = None  # default: for a prompt, not for messages
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    return_token_strs: bool = False


class DetokenizeRequest(RequestModel):
    tokens: list[Any]
    skip_special_tokens: bool = True


async def tokenize(context: Context, request: Request) -> Response:
    asked = parse(TokenizeRequest, await read_json(request))
    admit(context)
    assert context.text is not None
    text = context.text
    if asked.prompt is not None:
        special = asked.add_special_tokens is not False
        prompts = asked.prompt if isinstance(asked.prompt, list) else [asked.prompt]
    elif asked.messages is not None:
        special = asked.add_special_tokens is True
        options = ChatOptions(
            add_generation_prompt=asked.add_generation_prompt and not asked.continue_final_message,
            continue_final_message=asked.continue_final_message,
            variables=asked.chat_template_kwargs,
        )
        prompts = [(await asyncio.to_thread(render, text.template, asked.messages, options)).text]
    else:
        raise missing("prompt")
    tokens = [await text.tokenize(prompt, add_special_tokens=special) for prompt in prompts]
    several = isinstance(asked.prompt, list)
    body: dict[str, Any] = {
        "tokens": tokens if several else tokens[0],
        "count": [len(ids) for ids in tokens] if several else len(tokens[0]),
        "max_model_len": context.client.info.context_len,
    }
    if asked.return_token_strs:
        deltas = [[text.needed_tokenizer.token_text(token_id) for token_id in ids] for ids in tokens]
        body["token_strs"] = deltas if several else deltas[0]
    return Response(to_json(body), media_type="application/json")


async def detokenize(context: Context, request: Request) -> Response:
    asked = parse(DetokenizeRequest, await read_json(request))
    admit(context)
    assert context.text is not None
    several = bool(asked.tokens) and isinstance(asked.tokens[0], list)
    lists = [as_ids(ids, "tokens") for ids in (asked.tokens if several else [asked.tokens])]
    texts = [_decode(context, context.text, ids, asked.skip_special_tokens) for ids in lists]
    answer = texts if several else texts[0]
    return Response(to_json({"text": answer, "prompt": answer}), media_type="application/json")


def _decode(context: Context, text: Text, ids: list[int], skip_special_tokens: bool) -> str:
    check_ids(ids, context.client.info, "tokens")
    if len(ids) > 1_000_000:
        raise invalid("tokens", "at most 1000000 tokens are allowed.", "array_above_max_length")
    return text.needed_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

"""litellm, as OpenAI's client and as one of vLLM."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import litellm
from asking import CAPITAL, TOO_LONG, WEATHER, Questions
from pydantic import BaseModel

question = Questions("litellm", "openai")
PROVIDERS = ("openai/tiny", "hosted_vllm/tiny")
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}},
}


class Visit(BaseModel):
    city: Literal["Paris", "Oslo"]
    days: Literal[1, 2, 3]


def options(url: str, **more: Any) -> dict[str, Any]:
    return {"api_base": f"{url}/v1", "api_key": "None", "max_retries": 0, **more}


def ask(url: str, model: str, text: str = CAPITAL, **more: Any) -> Any:
    messages = [{"role": "user", "content": text}]
    return litellm.completion(model=model, messages=messages, **options(url, **{"temperature": 0, "max_tokens": 200, **more}))


@question
def completion(url: str) -> Any:
    answers = [ask(url, model) for model in PROVIDERS]
    return [
        {
            "text": answer.choices[0].message.content,
            "reasoning": answer.choices[0].message.reasoning_content,
            "usage": answer.usage.model_dump(),
        }
        for answer in answers
    ]


@question
def stream(url: str) -> Any:
    told = []
    for model in PROVIDERS:
        chunks = list(ask(url, model, stream=True, stream_options={"include_usage": True}))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        usages = [chunk.usage.model_dump() for chunk in chunks if getattr(chunk, "usage", None)]
        told.append({"text": text, "usages": usages, "built": litellm.stream_chunk_builder(chunks).choices[0].message.content})
    return told


@question
def asynchronous(url: str) -> Any:
    async def several() -> list[Any]:
        messages = [{"role": "user", "content": CAPITAL}]
        asked = [litellm.acompletion(model=model, messages=messages, **options(url, temperature=0, max_tokens=200)) for model in PROVIDERS]
        return await asyncio.gather(*asked)

    return [answer.choices[0].message.content for answer in asyncio.run(several())]


@question
def reasoning_effort(url: str) -> Any:
    return [ask(url, "hosted_vllm/tiny", reasoning_effort=effort).choices[0].message.content for effort in ("low", "high")]


@question
def tools(url: str) -> Any:
    told = []
    for model in PROVIDERS:
        whole = ask(url, model, WEATHER, tools=[TOOL])
        built = litellm.stream_chunk_builder(list(ask(url, model, WEATHER, tools=[TOOL], stream=True)))
        calls = [[[call.function.name, call.function.arguments] for call in a.choices[0].message.tool_calls] for a in (whole, built)]
        told.append({"whole": calls[0], "stream": calls[1], "reason": whole.choices[0].finish_reason})
    return told


@question
def structured(url: str) -> Any:
    return [ask(url, model, response_format=Visit).choices[0].message.content for model in PROVIDERS]


@question
def text_completion(url: str) -> Any:
    asked = options(url, max_tokens=12, temperature=0)
    return litellm.text_completion(model="text-completion-openai/tiny", prompt="One, two,", **asked).choices[0].text


@question
def embeddings(url: str) -> Any:
    return [
        [len(one["embedding"]) for one in litellm.embedding(model=model, input=["cats", "dogs"], **options(url)).data]
        for model in PROVIDERS
    ]


@question
def rerank(url: str) -> Any:
    answer = litellm.rerank(model="hosted_vllm/tiny", api_base=url, query="cats", documents=["dogs", "cats"], top_n=2)
    return [[one["index"], one["relevance_score"]] for one in answer.results]


@question
def overflow(url: str) -> Any:
    told = []
    for model in PROVIDERS:
        try:
            ask(url, model, TOO_LONG)
        except litellm.ContextWindowExceededError as error:
            told.append(error.status_code)
    return told


@question
def unknown_model(url: str) -> Any:
    try:
        ask(url, "openai/nobody")
    except litellm.NotFoundError as error:
        return str(error)


question.main()

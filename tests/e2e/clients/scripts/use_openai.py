"""The openai SDK, asynchronous: `.parse()`, `.stream()`, a tool loop, many at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import openai
from asking import CAPITAL, TOO_LONG, WEATHER, Questions
from pydantic import BaseModel, Field

question = Questions("openai")
Client = openai.AsyncOpenAI


class Visit(BaseModel):
    """A visit to a city."""

    city: Literal["Paris", "Oslo"]
    days: int = Field(ge=1, le=9)


class GetWeather(BaseModel):
    """The weather of a city."""

    city: str


TOOLS = [openai.pydantic_function_tool(GetWeather)]


def asking(ask: Callable[[Client], Awaitable[Any]]) -> None:
    """A question with a client of its own, open as long as it takes."""

    async def run(url: str) -> Any:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="None", max_retries=0) as client:
            return await ask(client)

    def answer(url: str) -> Any:
        return asyncio.run(run(url))

    answer.__name__ = ask.__name__
    question(answer)


def body(text: str, **options: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **{"temperature": 0, "max_tokens": 200, **options}}


@asking
async def parse(client: Client) -> Any:
    completion = await client.chat.completions.parse(**body(WEATHER), response_format=Visit)
    return completion.choices[0].message.parsed.model_dump()


@asking
async def parse_tools(client: Client) -> Any:
    completion = await client.chat.completions.parse(**body(WEATHER), tools=TOOLS)
    return [[call.function.name, call.function.parsed_arguments.model_dump()] for call in completion.choices[0].message.tool_calls]


@asking
async def parse_cut(client: Client) -> Any:
    try:
        await client.chat.completions.parse(**body(WEATHER, max_tokens=12), response_format=Visit)
    except openai.LengthFinishReasonError as error:
        return error.completion.usage.completion_tokens


@asking
async def stream(client: Client) -> Any:
    async with client.chat.completions.stream(**body(WEATHER), response_format=Visit, stream_options={"include_usage": True}) as events:
        kinds = [event.type async for event in events]
        completion = await events.get_final_completion()
    return {
        "kinds": sorted(set(kinds)),
        "parsed": completion.choices[0].message.parsed.model_dump(),
        "usage": completion.usage.model_dump(),
    }


@asking
async def stream_tools(client: Client) -> Any:
    async with client.chat.completions.stream(**body(WEATHER), tools=TOOLS) as events:
        done = [event async for event in events if event.type == "tool_calls.function.arguments.done"]
        completion = await events.get_final_completion()
    (call,) = completion.choices[0].message.tool_calls
    return {"events": [[event.name, event.arguments] for event in done], "call": [call.function.name, call.function.arguments]}


@asking
async def tool_loop(client: Client) -> Any:
    asked: dict[str, Any] = body(WEATHER, tools=TOOLS)
    first = (await client.chat.completions.create(**asked)).choices[0]
    asked["messages"] += [first.message]
    asked["messages"] += [
        {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"weather": "rain"})} for call in first.message.tool_calls
    ]
    second = (await client.chat.completions.create(**asked)).choices[0]
    return [first.finish_reason, second.finish_reason]


@asking
async def many(client: Client) -> Any:
    async def one(index: int) -> list[str]:
        whole = await client.chat.completions.create(**body(CAPITAL, seed=index))
        text = ""
        async for chunk in await client.chat.completions.create(**body(CAPITAL, seed=index), stream=True):
            text += chunk.choices[0].delta.content or ""
        return [whole.choices[0].message.content or "", text]

    return await asyncio.gather(*(one(index) for index in range(16)))


@asking
async def responses(client: Client) -> Any:
    whole = await client.responses.create(model="tiny", input=CAPITAL, temperature=0, max_output_tokens=200)
    text = ""
    async for event in await client.responses.create(model="tiny", input=CAPITAL, temperature=0, max_output_tokens=200, stream=True):
        if event.type == "response.output_text.delta":
            text += event.delta
    parsed = await client.responses.parse(model="tiny", input=WEATHER, temperature=0, max_output_tokens=200, text_format=Visit)
    kept = await client.responses.retrieve(whole.id)
    return {"text": whole.output_text, "stream": text, "kept": kept.output_text, "parsed": parsed.output_parsed.model_dump()}


@asking
async def embeddings(client: Client) -> Any:
    packed = await client.embeddings.create(model="tiny", input=["cats", "dogs"])
    plain = await client.embeddings.create(model="tiny", input=["cats", "dogs"], encoding_format="float")
    return [[one.embedding for one in answer.data] for answer in (packed, plain)]


@asking
async def overflow(client: Client) -> Any:
    try:
        await client.chat.completions.create(**body(TOO_LONG))
    except openai.BadRequestError as error:
        return [error.code, error.param, str(error), error.request_id]


@asking
async def models(client: Client) -> Any:
    listed = [model.id async for model in client.models.list()]
    return [listed, (await client.models.retrieve("tiny")).id]


question.main()

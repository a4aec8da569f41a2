"""langchain-openai."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from asking import CAPITAL, TOO_LONG, WEATHER, Questions
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

question = Questions("langchain-openai", "langchain-core", "openai")


class Visit(BaseModel):
    """A visit to a city."""

    city: Literal["Paris", "Oslo"]
    days: int = Field(ge=1, le=9)


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"Rain in {city}."


def chat(url: str, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model="tiny", base_url=f"{url}/v1", api_key="None", **{"temperature": 0, "max_tokens": 200, "max_retries": 0, **options}
    )


@question
def invoke(url: str) -> Any:
    answer = chat(url).invoke(CAPITAL)
    return {"text": answer.content, "usage": answer.usage_metadata, "reason": answer.response_metadata["finish_reason"]}


@question
def stream(url: str) -> Any:
    chunks = list(chat(url, stream_usage=True).stream(CAPITAL))
    return {"texts": [chunk.content for chunk in chunks], "usages": [chunk.usage_metadata for chunk in chunks]}


@question
def logprobs(url: str) -> Any:
    answer = chat(url, logprobs=True, top_logprobs=2).invoke(CAPITAL)
    return answer.response_metadata["logprobs"]["content"]


@question
def asynchronous(url: str) -> Any:
    async def several() -> list[Any]:
        return await asyncio.gather(*(chat(url).ainvoke(CAPITAL) for _ in range(4)))

    return [answer.content for answer in asyncio.run(several())]


def structured(url: str, method: Any, **options: Any) -> Any:
    answer = chat(url).with_structured_output(Visit, method=method, include_raw=True, **options).invoke(WEATHER)
    parsed = answer["parsed"].model_dump() if answer["parsed"] else None
    return {"parsed": parsed, "text": answer["raw"].content, "error": repr(answer["parsing_error"])}


@question
def json_schema(url: str) -> Any:
    return structured(url, "json_schema")


@question
def json_schema_strict(url: str) -> Any:
    return structured(url, "json_schema", strict=True)


@question
def function_calling(url: str) -> Any:
    return structured(url, "function_calling")


@question
def json_mode(url: str) -> Any:
    return structured(url, "json_mode")


@question
def structured_stream(url: str) -> Any:
    parts = list(chat(url).with_structured_output(Visit, method="json_schema").stream(WEATHER))
    return parts[-1].model_dump()


@question
def tools(url: str) -> Any:
    model = chat(url).bind_tools([get_weather])
    messages: list[Any] = [HumanMessage(WEATHER)]
    first = model.invoke(messages)
    messages.append(first)
    messages += [ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"]) for call in first.tool_calls]
    second = model.invoke(messages)
    streamed: Any = None
    for chunk in model.stream(WEATHER):
        streamed = chunk if streamed is None else streamed + chunk
    return {
        "calls": [[call["name"], call["args"]] for call in first.tool_calls],
        "streamed": [[call["name"], call["args"]] for call in streamed.tool_calls],
        "reasons": [answer.response_metadata["finish_reason"] for answer in (first, second)],
    }


@question
def named_tool(url: str) -> Any:
    model = chat(url).bind_tools([get_weather], tool_choice="get_weather", parallel_tool_calls=False)
    return [[call["name"], call["args"]] for call in model.invoke("Hello").tool_calls]


@question
def embeddings(url: str) -> Any:
    client = OpenAIEmbeddings(model="tiny", base_url=f"{url}/v1", api_key="None", check_embedding_ctx_length=False, max_retries=0)
    one = client.embed_query("cats")
    return {"one": one, "several": client.embed_documents(["cats", "dogs"]), "later": asyncio.run(client.aembed_query("cats"))}


@question
def completions(url: str) -> Any:
    client = OpenAI(model="tiny", base_url=f"{url}/v1", api_key="None", temperature=0, max_tokens=12, max_retries=0)
    whole = client.generate(["One, two,", "The capital"])
    return {
        "whole": [one[0].text for one in whole.generations],
        "usage": whole.llm_output["token_usage"],
        "stream": "".join(client.stream("One, two,")),
    }


@question
def overflow(url: str) -> Any:
    try:
        chat(url).invoke(TOO_LONG)
    except ContextOverflowError as error:
        return str(error)


@question
def bad_schema(url: str) -> Any:
    bad = {"title": "visit", "description": "x", "type": "object", "properties": {"city": {"type": "town"}}}
    try:
        chat(url).with_structured_output(bad, method="json_schema").invoke("Hello")
    except Exception as error:
        return [type(error).__name__, str(error)]


question.main()

"""llama-index' OpenAILike."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from asking import CAPITAL, WEATHER, Questions
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

question = Questions("llama-index-llms-openai-like", "llama-index-core", "openai")


class Visit(BaseModel):
    """A visit to a city."""

    city: Literal["Paris", "Oslo"]
    days: int = Field(ge=1, le=9)


def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"Rain in {city}."


def model(url: str, **options: Any) -> OpenAILike:
    common = {"context_window": 2048, "max_tokens": 200, "is_chat_model": True, "is_function_calling_model": True, "max_retries": 0}
    return OpenAILike(model="tiny", api_base=f"{url}/v1", api_key="None", **{**common, **options})


@question
def chat(url: str) -> Any:
    answer = model(url).chat([ChatMessage(role="user", content=CAPITAL)])
    return {"text": answer.message.content, "blocks": [type(block).__name__ for block in answer.message.blocks]}


@question
def stream(url: str) -> Any:
    return "".join(part.delta or "" for part in model(url).stream_chat([ChatMessage(role="user", content=CAPITAL)]))


@question
def asynchronous(url: str) -> Any:
    async def ask() -> Any:
        return (await model(url).achat([ChatMessage(role="user", content=CAPITAL)])).message.content

    return asyncio.run(ask())


@question
def completion(url: str) -> Any:
    plain = model(url, is_chat_model=False, temperature=0, max_tokens=12)
    return [plain.complete("One, two,").text, "".join(part.delta or "" for part in plain.stream_complete("One, two,"))]


@question
def structured(url: str) -> Any:
    return model(url).structured_predict(Visit, PromptTemplate(WEATHER)).model_dump()


@question
def structured_without_tools(url: str) -> Any:
    plain = model(url, is_function_calling_model=False, should_use_structured_outputs=True)
    return plain.structured_predict(Visit, PromptTemplate(WEATHER)).model_dump()


@question
def structured_stream(url: str) -> Any:
    return [getattr(part, "model_dump", dict)() for part in model(url).stream_structured_predict(Visit, PromptTemplate(WEATHER))][-1]


@question
def tools(url: str) -> Any:
    llm, tool = model(url), FunctionTool.from_defaults(get_weather)
    history = [ChatMessage(role="user", content=WEATHER)]
    first = llm.chat_with_tools([tool], chat_history=history)
    calls = llm.get_tool_calls_from_response(first)
    history.append(first.message)
    history += [
        ChatMessage(role="tool", content=tool(**call.tool_kwargs).content, additional_kwargs={"tool_call_id": call.tool_id})
        for call in calls
    ]
    last = llm.chat(history)
    return {"calls": [[call.tool_name, call.tool_kwargs] for call in calls], "answer": last.message.content}


question.main()

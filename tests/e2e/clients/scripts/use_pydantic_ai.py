"""pydantic-ai."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from asking import CAPITAL, WEATHER, Questions
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

question = Questions("pydantic-ai-slim", "openai")


class Visit(BaseModel):
    """A visit to a city."""

    city: Literal["Paris", "Oslo"]
    days: int = Field(ge=1, le=9)


def agent(url: str, output: Any = str) -> Agent[None, Any]:
    model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="None"))
    return Agent(model, output_type=output, retries=1, model_settings={"temperature": 0, "max_tokens": 300})


@question
def run(url: str) -> Any:
    result = agent(url).run_sync(CAPITAL)
    return {
        "text": result.output,
        "output_tokens": result.usage.output_tokens if not callable(result.usage) else result.usage().output_tokens,
    }


@question
def tool_output(url: str) -> Any:
    return agent(url, ToolOutput(Visit)).run_sync(WEATHER).output.model_dump()


@question
def native_output(url: str) -> Any:
    return agent(url, NativeOutput(Visit)).run_sync(WEATHER).output.model_dump()


@question
def stream(url: str) -> Any:
    async def ask() -> Any:
        async with agent(url).run_stream(CAPITAL) as result:
            return "".join([part async for part in result.stream_text(delta=True)])

    return asyncio.run(ask())


question.main()

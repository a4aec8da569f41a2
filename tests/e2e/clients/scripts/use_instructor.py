"""instructor."""

from __future__ import annotations

from typing import Any, Literal

import instructor
import openai
from asking import WEATHER, Questions
from pydantic import BaseModel, Field

question = Questions("instructor", "openai")
TRIES = 20
MESSAGES: Any = [{"role": "user", "content": WEATHER}]


class Visit(BaseModel):
    """A visit to a city."""

    city: Literal["Paris", "Oslo"]
    days: int = Field(ge=1, le=9)


class Anything(BaseModel, extra="allow"):
    """Whatever object a small model writes."""


def client(url: str, mode: instructor.Mode) -> Any:
    return instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="None", max_retries=0), mode=mode)


def visit(url: str, mode: instructor.Mode, model: type[BaseModel] = Visit, **more: Any) -> Any:
    asked = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 300, "max_retries": 1, **more}
    return client(url, mode).chat.completions.create(response_model=model, **asked).model_dump()


@question
def tools(url: str) -> Any:
    return visit(url, instructor.Mode.TOOLS)


@question
def json_schema(url: str) -> Any:
    return visit(url, instructor.Mode.JSON_SCHEMA)


@question
def json(url: str) -> Any:
    return visit(url, instructor.Mode.JSON, Anything, frequency_penalty=2)  # or the small model never ends its object


def partial(url: str, mode: instructor.Mode) -> Any:
    """The parts of every try: a busy machine may tell a short answer in one piece, so it is asked until one was told in more."""
    asked = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 300}
    tries: list[list[Any]] = []
    while len(tries) < TRIES and not any(part["days"] is None for parts in tries for part in parts):
        parts = client(url, mode).chat.completions.create_partial(response_model=Visit, **asked)
        tries.append([part.model_dump() for part in parts])
    return tries


@question
def partial_tools(url: str) -> Any:
    return partial(url, instructor.Mode.TOOLS)


@question
def partial_json_schema(url: str) -> Any:
    return partial(url, instructor.Mode.JSON_SCHEMA)


question.main()

"""What tests ask of responses through the real `openai` client."""

from __future__ import annotations

from typing import Any, Final

import openai
import pydantic
import pytest
from openai.types.responses import Response

from tests.support.server.process import MODEL, ServerProcess

CAPITAL: Final = "What is the capital of France?"
WEATHER: Final = "What is the weather in Oslo?"
CITY: Final[dict[str, Any]] = {
    "type": "object", "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}}, "required": ["city"],
    "additionalProperties": False,
}  # fmt: skip
TOOL: Final[dict[str, Any]] = {"type": "function", "name": "get_weather", "parameters": CITY}
LONG: Final[dict[str, Any]] = {"max_output_tokens": 1900, "extra_body": {"ignore_eos": True}}
ENDS: Final = ("response.completed", "response.incomplete", "response.failed")


def client_of(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="None", max_retries=0)


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return client_of(server)


def ask(client: openai.OpenAI, given: Any = CAPITAL, **options: Any) -> Response:
    response: Response = client.responses.create(model=MODEL, input=given, **{"temperature": 0, "max_output_tokens": 256, **options})
    return response


def stream(client: openai.OpenAI, given: Any = CAPITAL, **options: Any) -> list[Any]:
    """The events, after a look at their numbers."""
    options = {"temperature": 0, "max_output_tokens": 256, **options}
    events = list(client.responses.create(model=MODEL, input=given, stream=True, **options))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events


_PASSING: Final = ("id", "created_at", "completed_at", "call_id", "cached_tokens")


def lasting(value: Any) -> Any:
    """What two answers to the same request have in common."""
    if isinstance(value, pydantic.BaseModel):
        value = value.model_dump()
    if isinstance(value, dict):
        return {name: lasting(one) for name, one in value.items() if name not in _PASSING}
    return [lasting(one) for one in value] if isinstance(value, list) else value


def reference(item: Any) -> dict[str, Any]:
    return {"type": "item_reference", "id": item if isinstance(item, str) else item.id}

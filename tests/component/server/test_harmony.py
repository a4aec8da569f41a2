"""gpt-oss's channels on a real server: what a grammar says holds for the channel that it is meant for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from banyan_runtime.front.chat.reasoning.harmony import END, MARKERS
from tests.support.server.collector import Collector
from tests.support.server.process import MODEL, ServerProcess, StartServer
from tests.unit.grammar.harmony import speaking_harmony

pytestmark = pytest.mark.long  # a server of another model
SCHEMA = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"], "additionalProperties": False}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
HELLO: Any = [{"role": "user", "content": "Hello"}]
SEEDS = range(3)


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(scope="module")
def server(start_server: StartServer, collector: Collector, tiny_chat: Any, tmp_path_factory: pytest.TempPathFactory) -> ServerProcess:
    folder = speaking_harmony(tiny_chat, tmp_path_factory.mktemp("harmony"))
    return start_server("--otlp-traces-endpoint", collector.url, model=folder).ready()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="None", max_retries=0)


def ask(client: openai.OpenAI, seed: int, **options: Any) -> Any:
    ends = {str(787 + MARKERS.index(END)): 8}  # it was never trained on these, and would think until it is cut off
    options = {"temperature": 1.5, "max_tokens": 900, "logit_bias": ends, **options}
    return client.chat.completions.create(model=MODEL, messages=HELLO, seed=seed, **options).choices[0]


def test_an_answer_obeys_behind_whatever_thoughts(client: openai.OpenAI) -> None:
    thoughts = []
    for seed in SEEDS:
        choice = ask(client, seed, response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}})
        assert choice.finish_reason == "stop"
        assert isinstance(json.loads(choice.message.content)["yes"], bool)
        thoughts.append(choice.message.reasoning_content)
        assert re.fullmatch("[A-Z]{3}", ask(client, seed, extra_body={"regex": "[A-Z]{3}"}).message.content)
    assert any(thoughts)


def test_a_trace_calls_an_answer_json_though_the_grammar_is_of_all_messages(
    server: ServerProcess, client: openai.OpenAI, collector: Collector
) -> None:
    asked = {"json": {"response_format": {"type": "json_object"}}, "text": {"extra_body": {"regex": "[A-Z]{3}"}}}
    for kind, options in asked.items():
        ask(client, 0, extra_headers={"x-request-id": f"of-{kind}"}, **options)
    for kind in asked:
        roots = lambda kind=kind: [span for span in collector.spans if span.attributes.get("banyan.request_id") == f"of-{kind}"]
        (root,) = server.eventually(roots, f"the span of of-{kind}", 10)
        assert root.attributes["gen_ai.output.type"] == kind


def test_a_call_that_is_required_is_made_in_the_channel_for_it(client: openai.OpenAI) -> None:
    for seed in SEEDS:
        answer = ask(client, seed, tools=[TOOL], tool_choice="required")
        (call,) = answer.message.tool_calls
        assert call.function.name == "f"
        assert isinstance(json.loads(call.function.arguments)["yes"], bool)
        assert not answer.message.content
        assert answer.finish_reason == "tool_calls"

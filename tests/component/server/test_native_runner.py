"""A server whose tokens the native runner computes says what one says that torch computes for."""

from __future__ import annotations

import concurrent.futures
import json
from typing import Any

import httpx2 as httpx
import openai
import pytest

from tests.support.server.process import MODEL, ServerProcess, StartServer

pytestmark = pytest.mark.long  # a server of each runner; all other tests have the native one
QUESTIONS = ["What is the capital of France?", "Name three colours.", "Say hello in Spanish, please.", "hi"]
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 1.2, "top_p": 0.9, "seed": 6, "presence_penalty": 0.5},
    {"temperature": 0, "logit_bias": {"70": -5}, "frequency_penalty": 0.3},
]


@pytest.fixture(scope="module")
def servers(start_server: StartServer) -> list[ServerProcess]:
    return [start_server("--dtype", "float32", "--runner", runner).ready() for runner in ("torch", "native")]


def client_of(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_the_same_questions_have_the_same_answers(servers: list[ServerProcess]) -> None:
    def ask(client: openai.OpenAI, question: str, settings: dict[str, Any]) -> list[tuple[str | None, str | None]]:
        messages: Any = [{"role": "user", "content": question}]
        answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=48, n=2, **settings)
        return [(choice.finish_reason, choice.message.content) for choice in answer.choices]

    cases = [(question, settings) for question in QUESTIONS for settings in SETTINGS]
    torch, native = (client_of(server) for server in servers)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:  # in a crowd there, alone here
        crowd = list(pool.map(lambda case: ask(native, *case), cases))
    assert crowd == [ask(torch, *case) for case in cases]
    assert crowd == [ask(native, *case) for case in cases]


def test_log_probabilities_and_grammars_are_the_same(servers: list[ServerProcess]) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "n": {"type": "integer"}},
        "required": ["city", "n"],
    }
    found = []
    for server in servers:
        client = client_of(server)
        messages: Any = [{"role": "user", "content": "A city as JSON."}]
        answer = client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=60, temperature=0, logprobs=True, top_logprobs=4,
            response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}},
        )  # fmt: skip
        assert answer.choices[0].message.content is not None
        if answer.choices[0].finish_reason == "stop":
            assert set(json.loads(answer.choices[0].message.content)) == {"city", "n"}
        assert answer.choices[0].logprobs is not None
        assert answer.choices[0].logprobs.content is not None
        found.append(answer.choices[0].logprobs.content)
    assert [one.token for one in found[0]] == [one.token for one in found[1]]
    for one, other in zip(*found, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=2e-3)
        assert [top.logprob for top in one.top_logprobs] == pytest.approx([top.logprob for top in other.top_logprobs], abs=2e-3)


def test_a_stream_and_a_cached_prefix_say_the_same(servers: list[ServerProcess]) -> None:
    native = servers[1]
    body = {"text": "The river is long and " * 20, "sampling_params": {"max_new_tokens": 30, "temperature": 0, "ignore_eos": True}}
    first = native.post("/generate", body).json()
    again = native.post("/generate", body).json()
    assert again["text"] == first["text"] == servers[0].post("/generate", body).json()["text"]
    assert again["meta_info"]["cached_tokens"] > 50
    with httpx.stream("POST", f"{native.url}/generate", json={**body, "stream": True}, timeout=60) as stream:
        events = [line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: {")]
    assert json.loads(events[-1])["text"] == first["text"]
    assert native.get("/server_info").json()["runner"] == "native"
    assert "Attention backend" not in native.log


def test_instructions_that_the_processor_lacks_are_a_configuration_error(start_server: StartServer) -> None:
    refused = start_server("--runner", "native", environment={"BANYAN_NATIVE_VARIANT": "avx1024"})
    assert refused.process.wait(60) == 64
    words = json.loads(refused.termination_log.read_text())
    assert (words["code"], words["field"], words["value"]) == ("invalid_flag", "BANYAN_NATIVE_VARIANT", "avx1024")

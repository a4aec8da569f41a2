"""Text behind a call is told behind it, however many tokens come at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2 as httpx
import msgspec
import pytest

from banyan_runtime.front.plan import ToolUse
from banyan_runtime.front.text.tokenizer import Tokenizer
from banyan_runtime.wire import FinishCode
from tests.unit.front.answering import chat, request
from tests.unit.front.support import FakeEngine, Front, byte_level, finish, run
from tests.unit.front.test_responses import EOS, response

HERMES = (
    'See: <tool_call>\n{"name": "f", "arguments": {"a": 12}}\n</tool_call>\nand <tool_call>{"name": "f", "arguments": {}}</tool_call> done.'
)
CODER = "<tool_call>\n<function=f>\n<parameter=a>\n12\n</parameter>\n</function>\n</tool_call>\nDone."
GLM = "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>12</arg_value>\n</tool_call>\nDone."
CALL = ("call", {"a": 12})
SAID = {
    "hermes": (HERMES, [("text", "See:"), CALL, ("text", "and"), ("call", {}), ("text", "done.")]),
    "qwen3_coder": (CODER, [CALL, ("text", "Done.")]),
    "glm45": (GLM, [CALL, ("text", "Done.")]),
    "pythonic": ("[f(a=12)] and done", [CALL, ("text", "and done")]),
}
ALL_AT_ONCE = 1000


def asked(format: str, **options: Any) -> Any:
    return request(tools=ToolUse(format=format, schemas=msgspec.json.encode({"f": {"type": "object"}})), **options)


async def answered(folder: Path, path: str, plan: Any, text: str, together: int) -> str:
    """What a client is answered where the engine gives so many tokens at a time."""
    tokenizer = Tokenizer.load(folder)
    async with FakeEngine(folder) as engine:
        front = Front(engine, tokenizer)
        async with front.served() as address, httpx.AsyncClient(base_url=f"http://{address[0]}:{address[1]}/v1", timeout=15) as client:
            front.preparer.plans.append(plan)
            answer = asyncio.create_task(client.post(path, json={}))
            one = await engine.submitted()
            tokens = [*tokenizer.encode(text, add_special_tokens=False), EOS]
            steps = [tokens[at : at + together] for at in range(0, len(tokens), together)]
            for step in steps[:-1]:
                await engine.step({one: step})
            await engine.step({one: steps[-1]}, finish(one, FinishCode.STOP))
            return (await answer).text


def events(stream: str) -> list[Any]:
    return [json.loads(line.removeprefix("data: ")) for line in stream.splitlines() if line.startswith("data: {")]


def items(told: Sequence[Any]) -> list[tuple[str, Any]]:
    """What a response says."""
    assert {item["status"] for item in told} == {"completed"}
    return [
        ("call", json.loads(item["arguments"])) if item["type"] == "function_call" else ("text", item["content"][0]["text"].strip())
        for item in told
    ]


def blocks(stream: str) -> list[tuple[str, Any]]:
    """What a message says. Each block is filled only while it is the open one."""
    found: list[tuple[str, Any]] = []
    kind, said = "", ""
    for event in events(stream):
        if event["type"] == "content_block_start":
            kind, said = event["content_block"]["type"], ""
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            assert (kind == "tool_use") == ("partial_json" in delta)
            said += delta.get("partial_json") or delta.get("text") or ""
        elif event["type"] == "content_block_stop":
            found.append(("call", json.loads(said)) if kind == "tool_use" else ("text", said.strip()))
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    byte_level(tmp_path, added=("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    return tmp_path


@pytest.mark.matrix(gate=8)
@pytest.mark.parametrize("form", SAID)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("together", [3, 1, 8, 40, ALL_AT_ONCE])
def test_a_response_has_its_items_in_order(folder: Path, form: str, together: int, stream: bool) -> None:
    async def scenario() -> None:
        text, said = SAID[form]
        told = await answered(folder, "/responses", response(asked(form), stream=stream), text, together)
        assert items(events(told)[-1]["response"]["output"] if stream else json.loads(told)["output"]) == said

    run(scenario)


@pytest.mark.matrix(gate=4)
@pytest.mark.parametrize("form", SAID)
@pytest.mark.parametrize("together", [3, 1, 8, 40, ALL_AT_ONCE])
def test_a_message_has_its_blocks_in_order(folder: Path, form: str, together: int) -> None:
    async def scenario() -> None:
        text, said = SAID[form]
        assert blocks(await answered(folder, "/messages", chat(asked(form), stream=True), text, together)) == said

    run(scenario)

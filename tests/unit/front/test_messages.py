"""Messages in Anthropic's form over real HTTP, while the test makes the plan and plays the engine."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from banyan_runtime import wire
from banyan_runtime.config import ServerConfig
from banyan_runtime.front.plan import ChatPlan
from banyan_runtime.front.prepare.planner import Planner
from banyan_runtime.front.text.text import Text
from banyan_runtime.front.text.tokenizer import Tokenizer
from tests.unit.front.answering import A, Play, chat, player
from tests.unit.front.support import CHATML, FakeEngine, Front, engine_info


@pytest.fixture
def play(tmp_path: Path, bytes_tokenizer: Tokenizer) -> Play:
    return player(tmp_path, bytes_tokenizer)


def test_a_failure_closes_the_open_block_and_is_told(play: Play) -> None:
    async def scenario(front: Front, engine: FakeEngine, address: tuple[str, int]) -> None:
        front.preparer.plans.append(chat(stream=True))
        url = f"http://{address[0]}:{address[1]}/v1/messages"
        async with (
            httpx.AsyncClient(verify=False, timeout=15) as client,
            client.stream("POST", url, json={}) as answer,
        ):
            one = await engine.submitted()
            await engine.step({one: [A]})
            pieces = answer.aiter_text()
            text = ""
            while "text_delta" not in text:
                text += await anext(pieces)
            await engine.send(wire.Failed(one, "kv_exhausted", "The KV pool is full."))
            async for piece in pieces:
                text += piece
        *_, stop, last, rest = text.split("\n\n")
        assert rest == ""
        assert stop == 'event: content_block_stop\ndata: {"type":"content_block_stop","index":0}'
        assert last.startswith("event: error\n")
        error = {"type": "overloaded_error", "message": "The KV pool is full."}
        assert json.loads(last.partition("data: ")[2]) == {"type": "error", "error": error, "request_id": ""}  # no server, no ids

    play(scenario)


@pytest.mark.parametrize("stream", [True, False])
def test_a_refusal_by_the_engine_is_an_error_of_the_clients_form(play: Play, stream: bool) -> None:
    async def scenario(front: Front, engine: FakeEngine, address: tuple[str, int]) -> None:
        front.preparer.plans.append(chat(stream=stream))
        async with httpx.AsyncClient(verify=False, timeout=15) as client:
            asked = asyncio.create_task(client.post(f"http://{address[0]}:{address[1]}/v1/messages", json={}))
            await engine.send(wire.Failed(await engine.submitted(), "queue_full", ""))
            answer = await asked
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert answer.json()["error"]["type"] == "rate_limit_error"

    play(scenario)


@pytest.mark.parametrize("parser", ["deepseek-r1", "qwen3", "gpt-oss"])
@pytest.mark.parametrize("thoughts", [[], [{"type": "thinking", "thinking": "Paris.", "signature": ""}]])
def test_what_goes_on_with_an_answer_is_no_thought(tiny_chat: Path, tmp_path: Path, parser: str, thoughts: list[Any]) -> None:
    (tmp_path / "chatml.jinja").write_text(CHATML)  # which shows no marker of reasoning
    config = ServerConfig(model_path=str(tiny_chat), reasoning_parser=parser, chat_template=str(tmp_path / "chatml.jinja"))
    text = Text.load(config, tiny_chat)
    planner = Planner(config, text, engine_info(vocab_size=text.model_config["vocab_size"]))
    begun = {"role": "assistant", "content": [*thoughts, {"type": "text", "text": "The capital of"}]}
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": "Hello"}, begun]}
    plan = planner.plan("messages", json.dumps(body).encode(), "request")
    assert isinstance(plan, ChatPlan)
    assert plan.requests[0].reasoning == "content"
    prompt = text.needed_tokenizer.decode(wire.unpack_ids(plan.requests[0].token_ids).tolist(), skip_special_tokens=False)
    assert prompt.endswith("<|im_start|>assistant\nThe capital of")

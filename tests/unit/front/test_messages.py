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
from banyan_runtime.front.errors import ApiError
from banyan_runtime.front.plan import AnswerPlan, ChatPlan
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


# --- histories that hold more than text ---

QUESTION: dict[str, Any] = {"role": "user", "content": "Weather?"}
CALLING: dict[str, Any] = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "look", "input": {}}]}
IMAGE: dict[str, Any] = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
NOTE: dict[str, Any] = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "It rains."}, "title": "Oslo"}
PARTS: dict[str, Any] = {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "It rains."}]}}
PDF: dict[str, Any] = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}}
FOUND: dict[str, Any] = {"type": "search_result", "source": "x", "title": "Oslo", "content": [{"type": "text", "text": "It rains."}]}
SEARCH: dict[str, Any] = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}}
SEARCHED: dict[str, Any] = {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"type": "web_search_result", "url": "x"}]}
TEXT: dict[str, Any] = {"type": "text", "text": "So."}


def told(tiny_chat: Path, messages: list[Any], **more: Any) -> tuple[str, tuple[str, ...]]:
    """The prompt without what begins the answer, and what is named as ignored: by messages and by count_tokens alike."""
    config = ServerConfig(model_path=str(tiny_chat), chat_template="{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    text = Text.load(config, tiny_chat)
    planner = Planner(config, text, engine_info(vocab_size=text.model_config["vocab_size"]))
    plan = planner.plan("messages", json.dumps({"max_tokens": 5, "messages": messages, **more}).encode(), "request")
    counted = planner.plan("count_tokens", json.dumps({"messages": messages, **more}).encode(), "request")
    assert isinstance(plan, ChatPlan)
    assert isinstance(counted, AnswerPlan)
    assert counted.ignored == plan.envelope.ignored
    assert json.loads(counted.body)["input_tokens"] == plan.requests[0].prompt_tokens
    prompt = text.needed_tokenizer.decode(wire.unpack_ids(plan.requests[0].token_ids).tolist(), skip_special_tokens=False)
    return prompt, plan.envelope.ignored


@pytest.mark.matrix(gate=4)
@pytest.mark.parametrize(
    ("content", "shown", "unread"),
    [
        ([TEXT, IMAGE, TEXT], "So.\n[image]\nSo.", [1]),
        ([{"type": "tool_reference", "tool_name": "look"}], "[tool_reference]", [0]),
        ([FOUND], "Oslo\nIt rains.", []),
        ([NOTE, TEXT], "Oslo\nIt rains.\nSo.", []),
        ([PARTS], "It rains.", []),
        ([PDF], "[document]", [0]),
        ([{**FOUND, "content": 5}, {"type": "document"}], "[search_result]\n[document]", [0, 1]),
        ([], "", []),
    ],
)
def test_what_a_tool_gave_is_shown_as_far_as_it_is_text(tiny_chat: Path, content: Any, shown: str, unread: list[int]) -> None:
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": content}]}
    prompt, ignored = told(tiny_chat, [QUESTION, CALLING, result])
    assert prompt == f"<user>Weather?<assistant><tool>{shown}"
    assert ignored == tuple(f"messages[2].content[0].content[{place}]" for place in unread)


def test_what_other_servers_tools_did_in_an_answer_is_named_and_its_text_is_kept(tiny_chat: Path) -> None:
    said = {"role": "assistant", "content": [TEXT, TEXT, SEARCH, SEARCHED, {"type": "thinking", "thinking": "Hm", "signature": ""}, TEXT]}
    prompt, ignored = told(tiny_chat, [QUESTION, said, QUESTION])
    assert prompt == "<user>Weather?<assistant>So.So.\n[server_tool_use]\n[web_search_tool_result]\nSo.<user>Weather?"
    assert ignored == ("messages[1].content[2]", "messages[1].content[3]")


def test_a_document_of_the_users_is_read_if_it_is_text(tiny_chat: Path) -> None:
    assert told(tiny_chat, [{"role": "user", "content": [NOTE, FOUND, TEXT]}]) == ("<user>Oslo\nIt rains.\nOslo\nIt rains.\nSo.", ())
    for block in (PDF, IMAGE):  # the model is asked about what it cannot see
        with pytest.raises(ApiError) as refused:
            told(tiny_chat, [{"role": "user", "content": [TEXT, block]}])
        assert (refused.value.status, refused.value.code, refused.value.param) == (400, "unsupported_content", "messages[0].content[1]")


@pytest.mark.matrix(gate=2)
@pytest.mark.parametrize("system", [None, "", [], [{"type": "text", "text": "x-anthropic-billing-header: cc_version=1"}]])
@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user"}],
        [{"role": "user"}, {"role": "user"}, {"role": "user"}],
        [QUESTION, {"role": "assistant", "content": "So."}, {"role": "user"}],
        [{"role": "assistant"}],
        [{"role": "system"}, {"role": "user"}],
    ],
)
def test_a_turn_without_blocks_is_one_without_text(tiny_chat: Path, messages: list[dict[str, Any]], system: Any) -> None:
    blank, empty = ([{**turn, "content": turn.get("content", content)} for turn in messages] for content in ("", []))
    assert told(tiny_chat, empty, system=system) == told(tiny_chat, blank, system=system)
    assert told(tiny_chat, empty, system=system)[0].endswith("<assistant>" if messages[-1]["role"] == "assistant" else "<user>")

"""Prompts of no token and of far too many."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from banyan_runtime.front.errors import ApiError
from banyan_runtime.front.plan import Endpoint
from banyan_runtime.front.prepare.planner import Planner
from banyan_runtime.front.text.tokenizer import Tokenizer
from tests.unit.front.planning import USER, completion, planner_of, refused


@pytest.mark.parametrize("content", ["", []])
def test_a_prompt_without_tokens_is_refused_on_every_path(tiny_chat: Path, content: Any) -> None:
    bare = planner_of(tiny_chat, chat_template="{{ messages[-1].content }}")
    error = refused(bare, "chat", messages=[{"role": "user", "content": content}])
    assert (error.param, error.code) == ("messages", "empty_array")
    assert refused(bare, "completions", prompt=["a", ""]).param == "prompt"
    assert refused(bare, "completions", prompt=[[5], []]).code == "empty_array"
    assert refused(bare, "generate", text=["a", ""]).param == "text"
    assert refused(bare, "generate", input_ids=[[5], []]).param == "input_ids"


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The length of every text that is tokenized."""
    lengths: list[int] = []
    encode = Tokenizer.encode

    def spy(self: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
        lengths.append(len(text))
        return encode(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", spy)
    return lengths


@pytest.mark.parametrize("text", [" " * 5_000_000, "word " * 1_000_000, "a" * 5_000_000], ids=["spaces", "words", "one word"])
def test_of_a_prompt_that_is_far_too_long_only_the_beginning_is_tokenized(planner: Planner, encoded: list[int], text: str) -> None:
    bodies: tuple[tuple[Endpoint, dict[str, Any]], ...] = (
        ("chat", {"messages": [{"role": "user", "content": text}]}),
        ("completions", {"prompt": ["a", text]}),
        ("generate", {"text": text}),
    )
    for endpoint, body in bodies:
        error = refused(planner, endpoint, **body)
        assert (error.code, error.param) == ("context_length_exceeded", "messages" if endpoint == "chat" else "prompt")
        assert "2048" in error.message
    assert sum(encoded) < 200_000


def test_a_long_prompt_of_few_tokens_is_tokenized_whole(planner: Planner, encoded: list[int]) -> None:
    text = "<|im_end|>" * 1900
    assert len(text) > 8 * 2042
    made = completion(planner, prompt=text, max_tokens=1)
    assert made.requests[0].prompt_tokens >= 1900
    assert encoded[-1] == len(text)


@pytest.mark.parametrize(
    ("endpoint", "body", "param"),
    [
        ("chat", {"max_tokens": 2**31}, "max_tokens"),
        ("chat", {"max_completion_tokens": 2**31}, "max_completion_tokens"),
        ("completions", {"max_tokens": 2**31}, "max_tokens"),
        ("responses", {"input": "Hello", "max_output_tokens": 2**31}, "max_output_tokens"),
        ("generate", {"text": "Hello", "sampling_params": {"max_new_tokens": 2**31}}, "max_new_tokens"),
    ],
)
def test_more_tokens_than_the_context_has_are_the_fault_of_who_asks_for_them(
    planner: Planner, endpoint: Endpoint, body: dict[str, Any], param: str
) -> None:
    known = b'{"id":"resp_1"}\n' if endpoint == "responses" else b""
    whole = {"messages": USER, **body} if endpoint == "chat" else {"prompt": "Hello", **body} if endpoint == "completions" else body
    with pytest.raises(ApiError) as caught:
        planner.plan(endpoint, known + json.dumps(whole).encode(), "request")
    error = caught.value
    assert (error.code, (error.param or "").rpartition(".")[2]) == ("context_length_exceeded", param)

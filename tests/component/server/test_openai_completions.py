"""Completions through the real `openai` client."""

from __future__ import annotations

from typing import Any

import httpx2 as httpx
import openai
import pytest
from openai.types import Completion

from tests.support.server.process import MODEL, ServerProcess

PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="None", max_retries=0)


def complete(client: openai.OpenAI, prompt: Any = PROMPT, **options: Any) -> Completion:
    return client.completions.create(model=MODEL, prompt=prompt, **{"temperature": 0, "max_tokens": 8, **options})


def ids(server: ServerProcess, text: str) -> list[int]:
    tokens: list[int] = httpx.post(f"{server.url}/tokenize", json={"prompt": text}).json()["tokens"]
    return tokens


def test_text_and_its_token_ids_are_the_same_prompt(client: openai.OpenAI, server: ServerProcess) -> None:
    text, tokens = complete(client), complete(client, ids(server, PROMPT))
    assert text.choices[0].text == tokens.choices[0].text
    assert text.usage is not None
    assert tokens.usage is not None
    assert text.usage.prompt_tokens == tokens.usage.prompt_tokens == len(ids(server, PROMPT))
    assert text.id.startswith("cmpl-")
    assert text.object == "text_completion"


def test_a_stop_that_never_occurs_changes_nothing_for_another(client: openai.OpenAI) -> None:
    """It held back text of a token that may be no stop yet, in which the other was found with the next one."""
    options: dict[str, Any] = {"max_tokens": 12, "extra_body": {"ignore_eos": True, "min_tokens": 5}}
    whole = complete(client, **options, logprobs=0).choices[0]
    assert whole.logprobs is not None
    early = whole.text[: (whole.logprobs.text_offset or [])[4]]  # of four tokens
    stop, never = early[-1], early[-1] + "ZZZ"
    alone = complete(client, **options, stop=[stop])
    assert len(alone.choices[0].text) >= len(early)
    assert complete(client, **options, stop=[stop, never]).choices == alone.choices


def test_without_a_limit_sixteen_tokens_are_made(client: openai.OpenAI) -> None:
    completion = complete(client, max_tokens=None, extra_body={"ignore_eos": True})
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 16
    assert completion.choices[0].finish_reason == "length"


def test_echo_puts_the_prompt_before_the_text_also_for_ids_and_streams(client: openai.OpenAI, server: ServerProcess) -> None:
    plain = complete(client).choices[0].text
    assert complete(client, echo=True).choices[0].text == PROMPT + plain
    assert complete(client, ids(server, PROMPT), echo=True).choices[0].text == PROMPT + plain
    deltas = [chunk.choices[0].text for chunk in complete(client, echo=True, stream=True)]  # type: ignore[attr-defined]
    assert deltas[0] == PROMPT
    assert "".join(deltas) == PROMPT + plain


def test_with_no_new_tokens_the_prompt_alone_comes_back(client: openai.OpenAI) -> None:
    for options in ({}, {"n": 2}):
        completion = complete(client, max_tokens=0, echo=True, **options)
        assert [(choice.text, choice.finish_reason) for choice in completion.choices] == [(PROMPT, "length")] * len(completion.choices)
        assert completion.usage is not None
        assert completion.usage.completion_tokens == 0


def test_many_prompts_and_choices_come_back_in_order(client: openai.OpenAI, server: ServerProcess) -> None:
    prompts = [PROMPT, "Count to", "Say hello"]
    options: dict[str, Any] = {"n": 2, "seed": 3, "temperature": 1.5, "extra_body": {"ignore_eos": True}}
    together = complete(client, prompts, **options)
    assert [choice.index for choice in together.choices] == list(range(6))
    assert [choice.text for choice in together.choices] == [
        choice.text for prompt in prompts for choice in complete(client, prompt, **options).choices
    ]
    assert together.usage is not None
    assert together.usage.prompt_tokens == sum(len(ids(server, prompt)) for prompt in prompts)
    assert together.usage.completion_tokens == 6 * 8
    lists = complete(client, [ids(server, prompt) for prompt in prompts], **options)
    assert [choice.text for choice in lists.choices] == [choice.text for choice in together.choices]
    texts = [""] * 6
    for chunk in complete(client, prompts, stream=True, **options):  # type: ignore[attr-defined]
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in together.choices]


def test_a_stream_ends_with_its_reason_and_usage_when_asked(client: openai.OpenAI) -> None:
    whole = complete(client)
    stream = list(complete(client, stream=True, stream_options={"include_usage": True}))
    *body, last = stream
    assert "".join(chunk.choices[0].text for chunk in body) == whole.choices[0].text  # type: ignore[attr-defined]
    *before, reason = [chunk.choices[0].finish_reason for chunk in body]  # type: ignore[attr-defined]
    assert reason == whole.choices[0].finish_reason
    assert set(before) <= {None}
    assert last.choices == []  # type: ignore[attr-defined]
    assert whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens  # type: ignore[attr-defined]


def test_stop_strings_across_tokens_cut_the_text(client: openai.OpenAI) -> None:
    text = complete(client, max_tokens=24).choices[0].text
    stop = text[3:6]
    choice = complete(client, max_tokens=24, stop=[stop, "never there"]).choices[0]
    assert (choice.text, choice.finish_reason) == (text[: text.index(stop)], "stop")
    assert choice.model_extra is not None
    assert choice.model_extra["matched_stop"] == stop


def test_penalties_change_greedy_text(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"max_tokens": 24, "extra_body": {"ignore_eos": True}}
    plain = complete(client, **options).choices[0].text
    assert complete(client, frequency_penalty=2.0, **options).choices[0].text != plain
    assert complete(client, **{**options, "extra_body": {"ignore_eos": True, "repetition_penalty": 1.9}}).choices[0].text != plain
    assert complete(client, **options).choices[0].text == plain


def test_best_of_as_many_as_are_wanted_asks_for_nothing(client: openai.OpenAI) -> None:
    assert len(complete(client, n=2, best_of=2, max_tokens=1).choices) == 2

"""Log probabilities end to end: real model, real HTTP, compared with what transformers computes."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.server.process import MODEL, ServerProcess

PROMPT = "The capital of France is"
MESSAGES: Any = [{"role": "user", "content": "What is the capital of France?"}]
NEAR = 2e-4  # between two ways to compute the same in float32


@pytest.fixture(scope="module")
def exact(server: ServerProcess) -> ServerProcess:
    """The shared server, which computes in float32."""
    return server


@pytest.fixture(scope="module")
def client(exact: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{exact.url}/v1", api_key="None", max_retries=0)


@cache
def model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def expected(folder: Path, ids: list[int]) -> torch.Tensor:
    """float32 [len(ids) - 1, vocabulary]: the log probabilities of what may follow each token but the last."""
    with torch.inference_mode():
        logits: torch.Tensor = model(folder)(torch.tensor([ids])).logits[0, :-1]
    return logits.log_softmax(-1)


def of_tokens(table: torch.Tensor, ids: list[int]) -> list[float]:
    """The log probabilities of ids[1:]."""
    values: list[float] = table.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    return values


def tokenize(server: ServerProcess, **body: Any) -> list[int]:
    tokens: list[int] = httpx.post(f"{server.url}/tokenize", json=body).json()["tokens"]
    return tokens


def generate(server: ServerProcess, **body: Any) -> Any:
    response = httpx.post(f"{server.url}/generate", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def test_generate_scores_prompt_and_output_as_transformers_does(exact: ServerProcess, tiny_chat: Path) -> None:
    params = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True, "skip_special_tokens": False}
    options: dict[str, Any] = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 3, "return_text_in_logprobs": True}
    answer = generate(exact, text=PROMPT, sampling_params=params, **options)
    meta, prompt = answer["meta_info"], tokenize(exact, prompt=PROMPT)
    ids = prompt + answer["output_ids"]
    table = expected(tiny_chat, ids)
    rows = meta["input_token_logprobs"] + meta["output_token_logprobs"]
    assert [token_id for _, token_id, _ in rows] == ids
    assert rows[0][0] is None
    assert [value for value, *_ in rows[1:]] == pytest.approx(of_tokens(table, ids), abs=NEAR)
    assert "".join(text for *_, text in meta["output_token_logprobs"]) == answer["text"]
    tops = meta["input_top_logprobs"] + meta["output_top_logprobs"]
    assert tops[0] is None
    for row, top in zip(table, tops[1:], strict=True):
        values, likeliest = row.topk(3)
        assert [token_id for _, token_id, _ in top] == likeliest.tolist()
        assert [value for value, *_ in top] == pytest.approx(values.tolist(), abs=NEAR)
    later = generate(exact, text=PROMPT, sampling_params=params, **{**options, "logprob_start_len": 3})["meta_info"]["input_token_logprobs"]
    assert [row[1] for row in later] == prompt[3:]
    assert later[0][0] is None
    assert [row[0] for row in later[1:]] == pytest.approx([row[0] for row in meta["input_token_logprobs"][4:]], abs=NEAR)


def test_a_cached_prompt_is_scored_all_the_same(exact: ServerProcess) -> None:
    body: dict[str, Any] = {"text": "one two three four five six seven", "sampling_params": {"temperature": 0, "max_new_tokens": 2}}
    generate(exact, **body)
    scored = [generate(exact, **body, return_logprob=True, logprob_start_len=0)["meta_info"]["input_token_logprobs"] for _ in range(2)]
    assert scored[0] == scored[1]
    assert len(scored[0]) == len(tokenize(exact, prompt=body["text"]))


def test_what_lm_eval_asks_for(client: openai.OpenAI, exact: ServerProcess, tiny_chat: Path) -> None:
    prompts = [tokenize(exact, prompt=PROMPT), tokenize(exact, prompt="Count to three: one, two")]
    completion = client.completions.create(model=MODEL, prompt=prompts, temperature=0, max_tokens=1, logprobs=1, seed=1234, echo=True)
    for prompt, choice in zip(prompts, sorted(completion.choices, key=lambda choice: choice.index), strict=True):
        logprobs = choice.logprobs
        assert logprobs is not None
        values, tops = logprobs.token_logprobs, logprobs.top_logprobs
        assert values is not None
        assert tops is not None
        assert len(values) == len(tops) == len(logprobs.tokens or []) == len(prompt) + 1
        assert (values[0], tops[0]) == (None, None)
        table = expected(tiny_chat, [*prompt, 0])
        assert sum(values[1:-1]) == pytest.approx(sum(of_tokens(table[:-1], prompt)), abs=len(prompt) * NEAR)
        greedy = [value == max(top.values()) for value, top in zip(values[1:], tops[1:], strict=True)]
        likeliest = table.argmax(-1).tolist()
        assert greedy == [*(found == token for found, token in zip(likeliest, prompt[1:], strict=False)), True]


def test_a_prompt_is_scored_alone_with_max_tokens_0(client: openai.OpenAI, exact: ServerProcess, tiny_chat: Path) -> None:
    completion = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=0, logprobs=0, echo=True)
    (choice,) = completion.choices
    ids = tokenize(exact, prompt=PROMPT)
    assert choice.logprobs is not None
    assert "".join(choice.logprobs.tokens or []) == choice.text == PROMPT
    assert (choice.logprobs.token_logprobs or [])[1:] == pytest.approx(of_tokens(expected(tiny_chat, ids), ids), abs=NEAR)
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 0


def test_offsets_and_alternatives_hold_where_characters_have_several_tokens(client: openai.OpenAI) -> None:
    text = "🎉🎊 hello world"
    completion = client.completions.create(model=MODEL, prompt=text, max_tokens=0, logprobs=5, echo=True)
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.text_offset is not None
    parts = [at for token, at in zip(logprobs.tokens, logprobs.text_offset, strict=True) if token.startswith("bytes:\\x")]
    assert set(parts) == {0, 1}
    whole = [(token, at) for token, at in zip(logprobs.tokens, logprobs.text_offset, strict=True) if not token.startswith("bytes:")]
    assert "".join(token for token, _ in whole) == text[2:]
    assert all(text.startswith(token, at) for token, at in whole)
    assert all(len(top) in (5, 6) for top in (logprobs.top_logprobs or [])[1:])
    options: dict[str, Any] = {"model": MODEL, "prompt": text, "max_tokens": 8, "logprobs": 2, "echo": True, "temperature": 0}
    known = client.completions.create(**options).choices[0].logprobs
    streamed = [chunk.choices[0].logprobs for chunk in client.completions.create(**options, stream=True)]
    assert known is not None
    assert [at for part in streamed if part is not None for at in part.text_offset or []] == known.text_offset


def test_the_log_probabilities_of_a_chat_add_up_to_what_transformers_gives(
    client: openai.OpenAI, exact: ServerProcess, tiny_chat: Path
) -> None:
    options: dict[str, Any] = {
        "model": MODEL,
        "messages": MESSAGES,
        "max_tokens": 12,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }
    (choice,) = client.chat.completions.create(**options).choices
    assert choice.logprobs is not None
    content = choice.logprobs.content
    assert content
    text = b"".join(bytes(entry.bytes or ()) for entry in content)
    prompt = tokenize(exact, messages=MESSAGES)
    ids = prompt + tokenize(exact, prompt=text.decode(), add_special_tokens=False)
    told = of_tokens(expected(tiny_chat, ids), ids)[len(prompt) - 1 :]
    assert sum(entry.logprob for entry in content) == pytest.approx(sum(told), abs=len(told) * NEAR)
    assert all(entry.top_logprobs[0].logprob == entry.logprob for entry in content), "greedy takes the likeliest"
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    for extra in ({}, {"n": 2}):
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**options, **extra, stream=True)]
        for index in range(extra.get("n", 1)):
            streamed = [entry for chunk in chunks if chunk.index == index and chunk.logprobs for entry in chunk.logprobs.content or ()]
            assert streamed == content


def test_asking_for_none_differs_from_asking_for_the_token_alone(client: openai.OpenAI) -> None:
    for logprobs, expected_tops in ((None, None), (0, [1, 1, 1])):
        options: dict[str, Any] = {} if logprobs is None else {"logprobs": logprobs}
        completion = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=3, extra_body={"ignore_eos": True}, **options)
        found = completion.choices[0].logprobs
        assert (None if found is None else [len(top) for top in found.top_logprobs or []]) == expected_tops


def test_neighbours_that_ask_for_nothing_get_the_same_text(exact: ServerProcess) -> None:
    params = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
    alone = generate(exact, text=PROMPT, sampling_params=params)["text"]
    both = generate(exact, text=[PROMPT, PROMPT], sampling_params=params, return_logprob=[False, True])
    assert [answer["text"] for answer in both] == [alone, alone]
    assert ["output_token_logprobs" in answer["meta_info"] for answer in both] == [False, True]


def test_tokens_are_told_by_their_ids_where_that_is_asked_for(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 6, "temperature": 0, "seed": 1}
    by_id = {"return_tokens_as_token_ids": True}

    def spelled(token: str) -> str:
        name, _, number = token.partition(":")
        assert (name, number.isdigit()) == ("token_id", True), token
        return number

    plain = client.completions.create(prompt=PROMPT, logprobs=2, echo=True, **asked).choices[0].logprobs
    named = client.completions.create(prompt=PROMPT, logprobs=2, echo=True, **asked, extra_body=by_id).choices[0].logprobs
    assert plain is not None
    assert named is not None
    assert (named.token_logprobs, named.text_offset) == (plain.token_logprobs, plain.text_offset)
    assert len(list(map(spelled, named.tokens or []))) == len(plain.tokens or [])
    for top in (named.top_logprobs or [])[1:]:
        assert len(list(map(spelled, top))) in (2, 3)
    stream = client.completions.create(prompt=PROMPT, logprobs=2, echo=True, stream=True, **asked, extra_body=by_id)
    parts = [chunk.choices[0].logprobs for chunk in stream]
    assert [token for part in parts if part is not None for token in part.tokens or []] == named.tokens
    talk: dict[str, Any] = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 1}
    usual = client.chat.completions.create(**talk, **asked).choices[0].logprobs
    told = client.chat.completions.create(**talk, **asked, extra_body=by_id).choices[0].logprobs
    assert usual is not None
    assert told is not None
    for one, other in zip(usual.content or [], told.content or [], strict=True):
        spelled(other.token)
        assert (one.bytes, one.logprob) == (other.bytes, other.logprob), "the bytes are the token's own"
        assert other.top_logprobs[0].token == other.token


def test_generate_tells_of_tokens_by_name_however_unlikely_they_are(exact: ServerProcess, tiny_chat: Path) -> None:
    params = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    ids, wanted = tokenize(exact, prompt=PROMPT), [[700, 3], [11]]
    options: dict[str, Any] = {"return_logprob": True, "return_text_in_logprobs": True, "sampling_params": params}
    body = {"input_ids": [ids, ids[:4]], "logprob_start_len": [0, 1], "top_logprobs_num": [2, 0], "token_ids_logprob": wanted, **options}
    whole = generate(exact, **body)
    for answer, prompt, start, named in zip(whole, (ids, ids[:4]), (0, 1), wanted, strict=True):
        meta = answer["meta_info"]
        first, *scored = meta["input_token_ids_logprobs"]
        assert first is None
        table = expected(tiny_chat, prompt + answer["output_ids"])[start:]
        told = scored + meta["output_token_ids_logprobs"]
        assert [[token_id for _, token_id, _ in row] for row in told] == [named] * len(table)
        assert [[value for value, *_ in row] for row in told] == [pytest.approx(row[named].tolist(), abs=NEAR) for row in table]
        assert told[0][0][2] == exact.post("/detokenize", {"tokens": named[:1]}).json()["text"]
    alone = generate(exact, text=PROMPT, token_ids_logprob=[318], **options)["meta_info"]
    assert alone["input_token_ids_logprobs"] == []
    assert "output_top_logprobs" not in alone
    assert len(alone["output_token_ids_logprobs"]) == 6
    without = generate(exact, text=PROMPT, **options)["meta_info"]
    assert "output_token_ids_logprobs" not in without
    with exact.http.stream("POST", f"{exact.url}/generate", json={**body, "stream": True}) as stream:
        events = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
    for index, answer in enumerate(whole):
        last = [event for event in events if event["index"] == index][-1]
        for name in ("input_token_ids_logprobs", "output_token_ids_logprobs", "output_top_logprobs"):
            assert last["meta_info"].get(name) == answer["meta_info"].get(name), name

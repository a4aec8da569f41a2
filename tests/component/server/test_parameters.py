"""Parameters of chat completions and completions that change what is generated, through the real `openai` client."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.support.server.process import MODEL, ServerProcess

FRANCE: Any = [{"role": "user", "content": "What is the capital of France?"}]
NO_THINKING: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="None", max_retries=0)


def text(client: openai.OpenAI, **options: Any) -> str:
    extra = NO_THINKING | options.pop("extra_body", {})
    asked = {"temperature": 0, "max_tokens": 40, **options}
    completion = client.chat.completions.create(model=MODEL, messages=FRANCE, extra_body=extra, **asked)
    return completion.choices[0].message.content or ""


def test_a_bias_forbids_and_forces_tokens(client: openai.OpenAI, server: ServerProcess) -> None:
    plain = client.chat.completions.create(
        model=MODEL, messages=FRANCE, temperature=0, max_tokens=20, logprobs=True, extra_body=NO_THINKING
    )
    assert plain.choices[0].logprobs is not None
    ids = server.post("/tokenize", {"prompt": plain.choices[0].message.content, "add_special_tokens": False}).json()["tokens"]
    forbidden = text(client, logit_bias={str(ids[1]): -100}, max_tokens=20)
    assert forbidden != plain.choices[0].message.content
    again = server.post("/tokenize", {"prompt": forbidden, "add_special_tokens": False}).json()["tokens"]
    assert ids[1] not in again
    forced = client.completions.create(model=MODEL, prompt="x", max_tokens=3, temperature=0, logit_bias={str(ids[1]): 100})
    piece = server.post("/detokenize", {"tokens": [ids[1]] * 3}).json()["text"]
    assert forced.choices[0].text == piece
    native = {"text": "x", "sampling_params": {"max_new_tokens": 3, "temperature": 0, "logit_bias": {str(ids[1]): 100}}}
    assert server.post("/generate", native).json()["output_ids"] == [ids[1]] * 3


@pytest.mark.parametrize(
    ("bias", "param", "code"),
    [
        ({"x": 1}, "logit_bias", "invalid_value"),
        ({"-1": 1}, "logit_bias", "invalid_value"),
        ({"99999999": 1}, "logit_bias", "invalid_value"),
        ({"1": 101}, "logit_bias", "invalid_value"),
        ({"1": "a"}, "logit_bias.1", "invalid_type"),
    ],
)
def test_a_bias_that_means_nothing_is_refused(client: openai.OpenAI, bias: Any, param: str, code: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        text(client, logit_bias=bias)
    assert (refused.value.param, refused.value.code) == (param, code)


def test_the_best_of_many_has_the_likeliest_tokens(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"prompt": "The capital of", "max_tokens": 8, "temperature": 1.3, "seed": 5, "logprobs": 0}
    every = client.completions.create(model=MODEL, n=6, **options)
    best = client.completions.create(model=MODEL, n=2, best_of=6, **options)

    def mean(choice: Any) -> float:
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    assert [choice.index for choice in best.choices] == [0, 1]
    assert [choice.text for choice in best.choices] == [choice.text for choice in sorted(every.choices, key=mean, reverse=True)[:2]]
    assert best.usage is not None
    assert every.usage is not None
    assert best.usage.completion_tokens == every.usage.completion_tokens
    plain = client.completions.create(model=MODEL, n=2, best_of=6, **{**options, "logprobs": None})
    assert [choice.text for choice in plain.choices] == [choice.text for choice in best.choices]
    assert plain.choices[0].logprobs is None
    for wrong in ({"n": 3, "best_of": 2}, {"best_of": 21}, {"best_of": 2, "stream": True}):
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model=MODEL, prompt="x", **wrong)
        assert refused.value.param == "best_of"


def test_a_suffix_is_refused_where_the_model_cannot_fill_in(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt="def f(", suffix="return 1")
    assert refused.value.param == "suffix"

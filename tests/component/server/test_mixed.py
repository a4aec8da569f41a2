"""--enable-mixed-chunk from outside: the real `openai` client gets the same answers, whoever comes meanwhile."""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import openai
import pytest

from tests.support.server.process import MODEL, ServerProcess, StartServer

pytestmark = pytest.mark.long  # four servers
FLAGS = ("--dtype", "float32", "--chunked-prefill-size", "64")
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 0, "frequency_penalty": 0.5},
    {"temperature": 0, "logprobs": 3},
    {"temperature": 0, "logit_bias": {"40": 3}},
    {"temperature": 0, "extra_body": {"regex": "[a-z ]{10,40}"}},
    {"temperature": 1.0, "seed": 5, "top_p": 0.9, "extra_body": {"min_tokens": 20}},
]


@pytest.fixture(scope="module")
def servers(start_server: StartServer) -> dict[str, ServerProcess]:
    started = {
        "plain": start_server(*FLAGS),
        "mixed": start_server(*FLAGS, "--enable-mixed-chunk"),
        "pages": start_server(*FLAGS, "--enable-mixed-chunk", "--page-size", "16"),
        "torch": start_server(*FLAGS, "--enable-mixed-chunk", "--runner", "torch"),
    }
    return {name: server.ready() for name, server in started.items()}


def asked(server: ServerProcess, number: int) -> Any:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="None", max_retries=0)
    prompt = f"Question {number}: " + "why is the sky blue, and what is it like at night? " * (1 + 5 * number % 7)
    done = client.completions.create(model=MODEL, prompt=prompt, max_tokens=30 + number, **KINDS[number % len(KINDS)])
    choice, usage = done.choices[0], done.usage
    assert usage is not None
    scores = None if choice.logprobs is None else (choice.logprobs.tokens, choice.logprobs.text_offset)
    return choice.text, choice.finish_reason, usage.completion_tokens, scores


def together(server: ServerProcess, count: int) -> list[Any]:
    """Answers to requests that come one after the other while those before still run."""
    answers: list[Any] = [None] * count

    def ask(number: int) -> None:
        answers[number] = asked(server, number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
        time.sleep(0.01)
    for thread in threads:
        thread.join()
    return answers


@pytest.mark.parametrize("name", ["mixed", "pages", "torch"])
def test_answers_are_the_same_as_without(servers: dict[str, ServerProcess], name: str) -> None:
    count = 3 * len(KINDS)
    alone = [asked(servers["plain"], number) for number in range(count)]
    for _ in range(2):
        assert together(servers[name], count) == alone


def test_steps_of_prompts_took_others_along(servers: dict[str, ServerProcess]) -> None:
    together(servers["mixed"], 2 * len(KINDS))
    tokens, prompts = (counted(servers["mixed"], name) for name in ("step_tokens_sum", "prompt_tokens_total"))
    assert tokens['phase="prefill"'] > prompts['source="computed"'] + 20
    tokens, prompts = (counted(servers["plain"], name) for name in ("step_tokens_sum", "prompt_tokens_total"))
    assert tokens['phase="prefill"'] == prompts['source="computed"']


def counted(server: ServerProcess, name: str) -> dict[str, float]:
    """The values of a metric by its other label."""
    found = re.findall(rf"banyan_{name}\{{([^}}]*)\}} (\S+)", server.get("/metrics").text)
    return {next(part for part in labels.split(",") if "model_name" not in part): float(value) for labels, value in found}

"""--speculative-algorithm NGRAM from outside: the real `openai` client gets the same answers, in fewer steps."""

from __future__ import annotations

import functools
from typing import Any

import openai
import pytest

from tests.support.server.process import MODEL, ServerProcess, StartServer

NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
REPEATING = "The capital of France is Paris. The capital of Japan is Tokyo. " * 12 + "The capital of France is"
LIST = [{"role": "user", "content": "List 3 countries and their capitals."}]


FLAGS = ("--dtype", "float32", "--speculative-algorithm", "NGRAM")


class Servers:
    """The shared server, which does not draft, and two of their own that do, started on first use."""

    def __init__(self, plain: ServerProcess, start_server: StartServer) -> None:
        self.plain = plain
        self._start = start_server

    @functools.cached_property
    def drafting(self) -> ServerProcess:
        return self._start(*FLAGS, "--decode-log-interval", "5").ready()

    @functools.cached_property
    def pages(self) -> ServerProcess:
        return self._start(*FLAGS, "--speculative-num-draft-tokens", "5", "--page-size", "16").ready()


@pytest.fixture(scope="module")
def servers(shared_server: ServerProcess, start_server: StartServer) -> Servers:
    return Servers(shared_server, start_server)


def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="None", max_retries=0)


def completed(server: ServerProcess, **options: Any) -> list[tuple[str, str | None]]:
    """The texts and ends of all choices."""
    asked = {"prompt": REPEATING, "max_tokens": 120, "temperature": 0, **options}
    done = client(server).completions.create(model=MODEL, **asked)
    assert done.usage is not None
    assert done.usage.completion_tokens > 0
    return [(choice.text, choice.finish_reason) for choice in done.choices]


def streamed(server: ServerProcess, **options: Any) -> tuple[str, int]:
    """The text of a streamed chat, and what it counts of tokens."""
    asked = {"messages": LIST, "max_tokens": 200, "temperature": 0, "extra_body": {**NO_THINKING, "ignore_eos": True}, **options}
    text, used = "", 0
    for chunk in client(server).chat.completions.create(model=MODEL, stream=True, stream_options={"include_usage": True}, **asked):
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        used = chunk.usage.completion_tokens if chunk.usage else used
    return text, used


@pytest.mark.matrix(gate=3)
@pytest.mark.parametrize("other", ["drafting", pytest.param("pages", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7, "seed": 3},
        {"temperature": 1.0, "seed": 4, "top_p": 0.9, "n": 2},
        {"stop": ["Tokyo. The"]},
        {"stop": "France", "max_tokens": 40},
        {"logit_bias": {"40": 3}, "max_tokens": 40},
        {"frequency_penalty": 0.5, "max_tokens": 40},
        {"extra_body": {"min_tokens": 30}},
        {"extra_body": {"ignore_eos": True}, "max_tokens": 300},
    ],
    ids=str,
)
def test_answers_are_the_same_as_without(servers: Servers, other: str, options: dict[str, Any]) -> None:
    assert completed(getattr(servers, other), **options) == completed(servers.plain, **options)


@pytest.mark.matrix(gate=3)
@pytest.mark.parametrize("other", ["drafting", pytest.param("pages", marks=pytest.mark.long)])
@pytest.mark.parametrize("options", [{}, {"stop": ["Tok"]}, {"temperature": 0.8, "seed": 5}], ids=str)
def test_streams_are_the_same_as_without(servers: Servers, other: str, options: dict[str, Any]) -> None:
    """Tokens behind a stop string, accepted in the same step, are neither told nor counted."""
    assert streamed(getattr(servers, other), **options) == streamed(servers.plain, **options)


def test_log_probabilities_are_the_same_as_without(servers: Servers) -> None:
    def scored(server: ServerProcess) -> Any:
        done = client(server).completions.create(model=MODEL, prompt=REPEATING, max_tokens=60, temperature=0, logprobs=3)
        assert done.choices[0].logprobs is not None
        return done.choices[0].logprobs.model_dump()

    assert scored(servers.drafting) == scored(servers.plain)


def test_drafts_are_accepted_and_save_steps(servers: Servers) -> None:
    def counted(server: ServerProcess) -> tuple[float, float, float]:
        return (
            server.metric("banyan_generation_tokens_total"),
            server.metric('banyan_steps_total{phase="decode",graph="false"}'),
            server.metric('banyan_draft_tokens_total{outcome="accepted"}'),
        )

    def steps(server: ServerProcess) -> tuple[float, float]:
        server.until_idle()
        server.settled("banyan_generation_tokens_total")
        tokens, taken, accepted = counted(server)
        completed(server, max_tokens=300, extra_body={"ignore_eos": True})
        server.eventually(lambda: counted(server)[0] - tokens >= 300, "the metrics of all 300 tokens")
        _, taken_then, accepted_then = counted(server)
        return taken_then - taken, accepted_then - accepted

    plain, nothing = steps(servers.plain)
    drafting, accepted = steps(servers.drafting)
    assert 0 < plain <= 299, "the first comes from the prompt's step; of the others, several may come from one call"
    assert nothing == 0
    assert drafting + accepted == 299
    assert drafting < 200
    assert any(float(line.split("accept len: ")[1].split(",")[0]) > 1.2 for line in servers.drafting.lines if "accept len: " in line)
    assert "accept len" not in servers.plain.log

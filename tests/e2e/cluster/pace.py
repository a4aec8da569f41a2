"""How much work takes how long on this machine, so that something can happen to a batch before it is over, on a fast one too."""

from __future__ import annotations

import time

import openai

from tests.e2e.cluster.batches import MODEL
from tests.e2e.cluster.kubectl import Kubectl

MOST = 1900
"""Tokens that the small model's context has room for beside a request."""


def tokens_for(seconds: float, token_s: float) -> int:
    """`max_tokens` of a line that goes on for so long and does not end by itself."""
    return max(1, min(MOST, round(seconds / token_s)))


def seconds_per_token(team: Kubectl, server: str) -> float:
    """What a token of an answer takes a server that is asked nothing else, by the fastest of three answers: no machine takes less later."""
    told, took = 200, []
    with team.url(server) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120)
        for _ in range(3):
            began = time.monotonic()
            answer = client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=told, extra_body={"ignore_eos": True}
            )
            took.append(time.monotonic() - began)
            assert answer.usage is not None
            assert answer.usage.completion_tokens == told
    return min(took) / told

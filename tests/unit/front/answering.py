"""Plans made by a test, asked for over real HTTP, while it plays the engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from banyan_runtime import wire
from banyan_runtime.front.plan import ChatPlan, CompletionPlan, Envelope, GenerateRequest, NativePlan
from banyan_runtime.front.text.tokenizer import Tokenizer
from tests.unit.front.support import Connection, FakeEngine, Front, columns, run

A, B, C = 67, 68, 69  # the letters in the byte-level vocabulary
EOS = 2
Scenario = Callable[[Front, FakeEngine, tuple[str, int]], Awaitable[None]]
Play = Callable[[Scenario], None]


def player(tmp_path: Path, bytes_tokenizer: Tokenizer) -> Play:
    def play(scenario: Scenario) -> None:
        async def played() -> None:
            async with FakeEngine(tmp_path) as engine:
                front = Front(engine, bytes_tokenizer)
                async with front.served() as address:
                    await scenario(front, engine, address)

        run(played)

    return play


def request(*prompt: int, max_new_tokens: int = 16, **options: Any) -> GenerateRequest:
    return GenerateRequest(token_ids=wire.pack_ids(list(prompt or (A, B))), sampling=wire.Sampling(max_new_tokens), **options)


def openai(**options: Any) -> dict[str, Any]:
    """Fields of an OpenAI plan, those of its envelope among the options."""
    envelope = {name: options.pop(name) for name in Envelope.__struct_fields__ if name in options}
    return {"envelope": Envelope(**{"model": "tiny", **envelope}), "choices_per_prompt": 1, "top_logprobs": -1, **options}


def chat(*requests: GenerateRequest, **options: Any) -> ChatPlan:
    return ChatPlan(requests=requests or (request(),), **openai(**{"include_reasoning": True, **options}))


def completion(*requests: GenerateRequest, **options: Any) -> CompletionPlan:
    requests = requests or (request(),)
    return CompletionPlan(requests=requests, **openai(**{"echoes": ("",) * len(requests), "echo_logprobs": False, **options}))


def native(*requests: GenerateRequest, **options: Any) -> NativePlan:
    number = len(requests)
    plan = {
        "rids": (None,) * number, "listed": False, "stream": False, "top_logprobs": (-1,) * number, "named": (0,) * number,
        "logprobs_from": (-1,) * number, "text_in_logprobs": False,
    }  # fmt: skip
    return NativePlan(requests=requests, **{**plan, **options})


PATHS = {ChatPlan: "/v1/chat/completions", CompletionPlan: "/v1/completions", NativePlan: "/generate"}


async def ask(front: Front, address: tuple[str, int], plan: ChatPlan | CompletionPlan | NativePlan) -> Connection:
    front.preparer.plans.append(plan)
    return await Connection.post(address, PATHS[type(plan)])


def streaming(kind: str) -> ChatPlan | CompletionPlan | NativePlan:
    if kind == "chat":
        return chat(stream=True)
    return completion(stream=True) if kind == "completions" else native(request(), stream=True)


KINDS = ["chat", "completions", "generate"]


def told(*rows: tuple[int, float, int]) -> dict[str, Any]:
    """Columns of a step whose tokens are all scored: (token, value, likeliest token, whose value is -0.25)."""
    tops = [[(token, value)] if token == likeliest else [(likeliest, -0.25)] for token, value, likeliest in rows]
    return {"scored": wire.pack_ids(list(range(len(rows)))), "logprobs": columns([value for _, value, _ in rows], tops)}


SCORED = wire.LogprobRequest(output_top=1)

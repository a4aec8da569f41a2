"""Asks a server what a plan says, and keeps the times."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Final

from load.client import Failed, Server
from load.plan import Ask, Plan, Session
from load.sample import Played, Sample

WORDS: Final = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world",
    "school", "state", "family", "student", "group", "country", "problem", "hand", "part", "place", "case",
    "week", "company", "system", "program", "question", "work", "government", "number", "night", "point",
)  # fmt: skip


def in_words(ids: tuple[int, ...]) -> str:
    """A prompt for servers that take no token ids, and for conversations: a word an id."""
    return "".join(" " + WORDS[number % len(WORDS)] for number in ids)


async def takes_ids(server: Server) -> bool:
    """Whether the server takes a prompt of token ids. Raises Failed if it takes none at all."""
    try:
        await server.ask(server.request((300, 301, 302), 1))
    except Failed as refused:
        if not str(refused).startswith("HTTP 4"):
            raise
        await server.ask(server.request("one two three", 1))
        return False
    return True


async def play(plan: Plan, server: Server, *, ids: bool = True) -> Played:
    """Play `plan` against `server`, with prompts of token ids or of words. Requests that fail are samples with an error."""
    ready: dict[int, bytes] = {}
    if not plan.conversation:  # made before the clock runs
        ready = {
            id(ask): server.request(ask.prompt if ids else in_words(ask.prompt), ask.max_tokens, plan.temperature) for ask in plan.asks
        }
    samples: list[Sample] = []
    waiting = deque(plan.sessions)
    await server.connect(min(plan.concurrent, len(plan.sessions)))
    cpu, began = time.process_time(), time.perf_counter()

    async def one(ask: Ask, request: bytes, turn: int) -> str:
        sample = Sample(turn, time.perf_counter() - began)
        samples.append(sample)
        try:
            answer = await server.ask(request)
        except Failed as error:
            sample.error = str(error)
            return ""
        sample.pieces = [at - began for at in answer.pieces]
        sample.ended = answer.ended - began
        sample.prompt_tokens, sample.output_tokens = answer.prompt_tokens or len(ask.prompt), answer.output_tokens or len(answer.pieces)
        sample.cached_tokens = answer.cached_tokens
        return "".join(answer.text) if plan.conversation else ""

    async def session(session: Session) -> None:
        text = ""
        for turn, ask in enumerate(session.asks):
            if plan.conversation:
                text += in_words(ask.prompt)
                text += await one(ask, server.request(text, ask.max_tokens, plan.temperature), turn)
            else:
                await one(ask, ready[id(ask)], turn)

    async def place() -> None:
        while waiting:
            begun = waiting.popleft()
            await asyncio.sleep(max(0.0, began + begun.due_s - time.perf_counter()))
            await session(begun)

    await asyncio.gather(*(place() for _ in range(min(plan.concurrent, len(plan.sessions)))))
    wall_s = time.perf_counter() - began
    return Played(samples, wall_s, time.process_time() - cpu)

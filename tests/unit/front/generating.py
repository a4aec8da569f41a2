"""Generations without HTTP: a front around an engine that the test plays, and a reader that keeps everything."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from banyan_runtime import wire
from banyan_runtime.front.deltas import Delta
from banyan_runtime.front.errors import ApiError
from banyan_runtime.front.generation import Call
from banyan_runtime.front.generation_group import GenerationGroup
from banyan_runtime.front.plan import GenerateRequest
from banyan_runtime.front.text.tokenizer import Tokenizer
from tests.unit.front.support import FakeEngine, Front, run

A, B, C, D, E = IDS = [67, 68, 69, 70, 71]  # the letters a to e in the byte-level vocabulary
CALL = Call(endpoint="chat", streaming=True, received=0.0)


class Reader:
    """A consumer that keeps everything."""

    def __init__(self) -> None:
        self.deltas: list[tuple[int, Delta]] = []
        self.ended: asyncio.Future[ApiError | None] = asyncio.get_running_loop().create_future()
        self.news = asyncio.Event()

    def add(self, index: int, delta: Delta) -> None:
        self.deltas.append((index, delta))
        self.news.set()

    def end(self, error: ApiError | None) -> None:
        self.ended.set_result(error)

    async def all(self) -> list[Delta]:
        """Of one sequence. Raises the error that it ended with."""
        if (error := await self.ended) is not None:
            raise error
        return [delta for _, delta in self.deltas]

    async def heard(self) -> None:
        await self.news.wait()
        self.news.clear()


class World:
    """A front around a played engine."""

    def __init__(self, engine: FakeEngine, tokenizer: Tokenizer) -> None:
        self.engine = engine
        self.front = Front(engine, tokenizer)
        self.context = self.front.context
        self.records = self.front.records

    def start(self, *requests: GenerateRequest) -> tuple[GenerationGroup, Reader]:
        reader = Reader()
        return GenerationGroup(self.context, CALL, requests, ["r"] * len(requests), reader), reader


Scenario = Callable[[World], Awaitable[None]]
Play = Callable[[Scenario], None]


def player(tmp_path: Path, bytes_tokenizer: Tokenizer) -> Play:
    def play(scenario: Scenario) -> None:
        assert bytes_tokenizer.encode("abcde", add_special_tokens=False) == IDS

        async def played() -> None:
            async with FakeEngine(tmp_path) as engine:
                await scenario(World(engine, bytes_tokenizer))

        run(played)

    return play


def request(**options: Any) -> GenerateRequest:
    sampling = wire.Sampling(options.pop("max_new_tokens", 16), options.pop("min_new_tokens", 0))
    return GenerateRequest(token_ids=wire.pack_ids([1, 2, 3]), sampling=sampling, **options)


def text(deltas: Sequence[Delta]) -> str:
    return "".join(delta.content for delta in deltas)

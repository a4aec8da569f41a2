"""/health_generate, whoever asks and however often."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.unit.front.support import FakeEngine, Front, finish, run


async def ask(address: tuple[str, int]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(b"GET /health_generate HTTP/1.1\r\nHost: x\r\n\r\n")
    return reader, writer


def test_however_many_ask_one_token_is_generated_for_all(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with FakeEngine(tmp_path) as engine, Front(engine, None).served() as address:
            for _ in range(2):  # once they have their answer, the engine is asked anew
                clients = [await ask(address) for _ in range(20)]
                (asked,) = await engine.submits()
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(engine.next(), 0.3)
                await engine.step({asked.id: [5]}, finish(asked.id))
                for reader, writer in clients:
                    assert (await reader.readline()).split()[1] == b"200"
                    writer.close()

    run(scenario)


def test_when_the_last_who_asked_has_left_the_request_is_ended(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with FakeEngine(tmp_path) as engine, Front(engine, None).served() as address:
            clients = [await ask(address) for _ in range(3)]
            (asked,) = await engine.submits()
            for _, writer in clients[:2]:
                writer.close()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(engine.next(), 0.3)
            clients[2][1].close()
            assert await engine.aborted() == asked.id

    run(scenario)

"""Sends cases over several connections at once, as bytes, and keeps what must not be answered."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from tests.e2e.clients.fuzz.cases import Case, Cases

HANG_S: Final = 120.0
"""Far longer than any case takes beside the others on a slow machine."""
LARGEST: Final = 64 << 20
CONTINUE: Final = 100
FAILED: Final = re.compile(rb'"(type|code)": ?"(server_error|internal_error|api_error)"')
"""An error of the server inside an answer that began well; the description of the API only lists the words."""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes


class ClosedError(Exception):
    """The server ended the connection; `received` is what came before."""


@dataclass
class Outcome:
    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    closed: int = 0  # connections that ended without an answer
    left: int = 0  # cases whose client turned away


class Sender:
    """Some connections, each with one case after the other."""

    def __init__(self, port: int, cases: Cases, known: deque[str]) -> None:
        self.port = port
        self.cases = cases
        self.known = known
        self.outcome = Outcome()

    async def run(self, count: int, connections: int) -> Outcome:
        todo = iter(range(count))

        async def work() -> None:
            reader: asyncio.StreamReader | None = None
            writer: asyncio.StreamWriter | None = None
            for _ in todo:
                case = self.cases.next()
                if writer is None:
                    reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=LARGEST)
                assert reader is not None
                try:
                    stays = await asyncio.wait_for(self._one(case, reader, writer), HANG_S)
                except TimeoutError:
                    self.outcome.wrong.append(f"no answer within {HANG_S:g} s: {case}")
                    stays = False
                except (ClosedError, OSError):
                    self.outcome.closed += 1
                    stays = False
                if not stays:
                    writer.close()
                    writer = None
            if writer is not None:
                writer.close()

        await asyncio.gather(*(work() for _ in range(connections)))
        return self.outcome

    async def _one(self, case: Case, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection can be used again."""
        sent = case.bytes
        writer.write(sent[: len(sent) // 2] if case.leaves == "half" else sent)
        await writer.drain()
        if case.leaves in ("half", "sent"):
            self.outcome.left += 1
            return False
        if case.leaves == "answered":
            await reader.read(100)
            self.outcome.left += 1
            return False
        answer = await receive(reader, case.method)
        self.outcome.statuses[answer.status] += 1
        if reason := objection(case, answer):
            self.outcome.wrong.append(f"{reason}: {answer.status} {answer.body[:600]!r} to {case}")
        self._note(answer)
        return answer.headers.get("connection", "").lower() != "close"

    def _note(self, answer: Answer) -> None:
        """Ids that later cases may name."""
        if answer.status == 200 and answer.headers.get("content-type", "").startswith("application/json"):
            told = json.loads(answer.body or b"null")
            if isinstance(told, dict) and isinstance(told.get("id"), str):
                self.known.append(told["id"])


async def receive(reader: asyncio.StreamReader, method: str) -> Answer:
    """One answer, interim ones left out.

    Raises: ClosedError."""
    try:
        while True:
            top = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            status = int(top[0].split(" ")[1])
            if status != CONTINUE:
                break
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in top[1:] if line)}
        if method == "HEAD" or status in (204, 304):
            return Answer(status, headers, b"")
        if headers.get("transfer-encoding") == "chunked":
            return Answer(status, headers, await _chunks(reader))
        if "content-length" in headers:
            return Answer(status, headers, await reader.readexactly(int(headers["content-length"])))
        return Answer(status, headers, await reader.read())
    except asyncio.IncompleteReadError as error:
        raise ClosedError from error


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    parts = []
    while length := int(await reader.readuntil(b"\r\n"), 16):
        parts.append(await reader.readexactly(length))
        await reader.readexactly(2)
    await reader.readuntil(b"\r\n")
    return b"".join(parts)


def objection(case: Case, answer: Answer) -> str | None:
    """What is wrong with an answer, whatever was asked."""
    if answer.status >= 500:
        return "a failure of the server"
    if FAILED.search(answer.body):
        return "a failure inside the answer"
    if "x-request-id" not in answer.headers:
        return "no request id"
    if answer.status < 400 or case.method == "HEAD":
        return None
    try:
        error = json.loads(answer.body)["error"]
    except (ValueError, KeyError, TypeError):
        return "an error without its object"
    expected = {"type", "message"} if case.target.startswith("/v1/messages") else {"type", "message", "param", "code"}
    return None if expected <= set(error) and error["message"] else "an error object that lacks something"

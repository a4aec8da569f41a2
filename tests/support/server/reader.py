"""Somebody who reads a stream while a test looks at what else happens."""

from __future__ import annotations

import contextlib
import json
import threading

import httpx2 as httpx
import psutil

from tests.support.server.process import MODEL, ServerProcess

LONG = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True, "temperature": 0, "stream": True}


class Reader(threading.Thread):
    """Reads one streamed completion to its end on a thread of its own."""

    def __init__(self, server: ServerProcess, body: dict[str, object]) -> None:
        super().__init__(daemon=True)
        self.url, self.body = server.url, body
        self.events: list[str] = []
        self.failure: httpx.HTTPError | None = None
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream("POST", self.url + "/v1/completions", json=self.body, timeout=60) as response:
                assert response.status_code == 200, response.read()
                self.events.extend(line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: "))
        except httpx.HTTPError as error:
            self.failure = error

    @classmethod
    def reading(cls, server: ServerProcess, **changed: object) -> Reader:
        """One that has got its first tokens."""
        reader = cls(server, {**LONG, **changed})
        server.eventually(lambda: len(reader.events) > 3, "the first tokens")
        return reader

    def finished(self, limit_s: float = 30.0) -> list[str]:
        self.join(limit_s)
        assert not self.is_alive(), "the stream has not ended"
        return self.events

    def error(self, limit_s: float = 30.0) -> dict[str, str]:
        """The error event that the stream ends with."""
        events = [event for event in self.finished(limit_s) if event != "[DONE]"]
        error: dict[str, str] = json.loads(events[-1])["error"]
        return error


def gone(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    return True

"""Schemas that are made to be expensive cost a request of their own, and nobody else."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import httpx2 as httpx
import psutil
import pytest

from tests.support.server.process import MODEL, ServerProcess

Schema = dict[str, Any]
LIMIT_CPU_S: Final = 20.0  # of the processes that prepare, since a busy machine stretches every wait; what is measured is 4 s at most
LIMIT_BYTES: Final = 2 << 30  # of all processes that prepare; one request may take 1 GiB


def nested(levels: int, inner: Schema, key: str = "a") -> Schema:
    for _ in range(levels):
        inner = {"type": "object", "properties": {key: inner}, "required": [key]}
    return inner


def halves(levels: int) -> Schema:
    """Two references to the next level each: written out it has 2 ** levels parts."""
    parts: dict[str, Schema] = {
        f"l{level}": {"anyOf": [{"type": "array", "items": {"$ref": f"#/$defs/l{level + 1}"}}, {"$ref": f"#/$defs/l{level + 1}"}]}
        for level in range(levels)
    }
    return {"type": "object", "properties": {"a": {"$ref": "#/$defs/l0"}}, "$defs": {**parts, f"l{levels}": {"type": "string"}}}


def any_of(levels: int) -> Schema:
    """Choices of 20 choices each."""
    return {"anyOf": [any_of(levels - 1) if levels > 1 else {"enum": [str(number)]} for number in range(20)]}


def product(keyword: str, rows: int = 30) -> Schema:
    """An `allOf` of choices: multiplied out it has 6 ** rows of them."""
    choices = [[{"properties": {f"a{row}{at}": {}}, "required": [f"a{row}{at}"]} for at in range(6)] for row in range(rows)]
    return {"type": "object", "allOf": [{keyword: choice} for choice in choices]}


def text(**more: Any) -> Schema:
    return {"type": "object", "properties": {"a": {"type": "string", **more}}, "required": ["a"]}


HOSTILE: Final[dict[str, Callable[[], Schema]]] = {
    "a reference to itself": lambda: {"type": "object", "$ref": "#"},
    "references in a circle": lambda: {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/b"}},
        "$defs": {"b": {"allOf": [{"$ref": "#/$defs/c"}]}, "c": {"allOf": [{"$ref": "#/$defs/b"}, {"$ref": "#/$defs/b"}]}},
    },
    "references that double": lambda: halves(60),
    "400 levels": lambda: nested(400, {}),
    "300 levels of long names, and 200,000 properties below them": lambda: nested(
        300, {"properties": {str(number): {} for number in range(200_000)}}, "k" * 100
    ),
    "names of 30,000 characters": lambda: nested(50, {"properties": {str(number): {} for number in range(5000)}}, "k" * 30_000),
    "300,000 properties": lambda: {"type": "object", "properties": {str(number): {} for number in range(300_000)}},
    "a product of anyOf": lambda: product("anyOf"),
    "a product of oneOf": lambda: product("oneOf"),
    "anyOf in anyOf": lambda: nested(1, any_of(3)),
    "500,000 values": lambda: nested(1, {"enum": list(range(500_000))}),
    "9,000 long values": lambda: nested(1, {"enum": ["x" * 200 + str(number) for number in range(9000)]}),
    "a pattern that backtracks": lambda: text(pattern="^(a+)+$"),
    "a pattern of many states": lambda: text(pattern="^(.*a){40}.{60}$"),
    "patterns that meet": lambda: {"type": "object", "allOf": [text(pattern=f"^(.*{sign}.{{30}}.*)*$") for sign in "abcdefgh"]},
    "a repetition of repetitions": lambda: text(pattern="^((([a-z]{1,99}){1,99}){1,99}){1,99}$"),
    "parentheses": lambda: text(pattern="(" * 1000 + "a" + ")" * 1000),
    "a million items": lambda: nested(1, {"type": "array", "minItems": 1_000_000, "items": text(maxLength=1_000_000)}),
}  # fmt: skip


@pytest.fixture(scope="module")
def served(server: ServerProcess) -> Iterator[tuple[ServerProcess, Callable[[], int]]]:
    """A server, and how many tokens of another client's streams have come."""
    over, seen = threading.Event(), [0]

    def read() -> None:
        body = {"model": MODEL, "prompt": "a", "max_tokens": 1900, "ignore_eos": True, "stream": True}
        while not over.is_set():
            with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as stream:
                for line in stream.iter_lines():
                    seen[0] += line.startswith("data: {")
                    if over.is_set():
                        return

    thread = threading.Thread(target=read)
    thread.start()
    yield server, lambda: seen[0]
    over.set()
    thread.join()


class Cost:
    """What the processes which prepare have taken: the most memory that they had, all together, and the processors' time."""

    def __init__(self, server: ServerProcess) -> None:
        self._zygote = server.zygote
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._cpu_s: dict[int, float] = {}  # what each has used, though it may have ended
        self.bytes = 0

    @property
    def cpu_s(self) -> float:
        return sum(self._cpu_s.values())

    def _watch(self) -> None:
        before: dict[int, float] = {}
        while not self._over.wait(0.05):
            total = 0
            for process in self._zygote.children(recursive=True):
                try:
                    total += process.memory_info().rss
                    used = sum(process.cpu_times()[:2])
                except psutil.NoSuchProcess:
                    continue
                self._cpu_s[process.pid] = used - before.setdefault(process.pid, used)
            self.bytes = max(self.bytes, total)

    def __enter__(self) -> Cost:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


@pytest.mark.matrix(gate=3)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_is_answered_or_refused_while_others_are_served(
    served: tuple[ServerProcess, Callable[[], int]], name: str
) -> None:
    server, tokens = served
    schema = HOSTILE[name]()
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    function = {"name": "f", "parameters": schema}
    bodies: list[dict[str, Any]] = [
        {"tools": [{"type": "function", "function": function}]},
        {"tools": [{"type": "function", "function": function}], "tool_choice": "required"},
        {"tools": [{"type": "function", "function": {**function, "strict": True}}], "tool_choice": "required"},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}},
    ]
    for body in bodies:
        before = tokens()
        with Cost(server) as cost:
            raw = json.dumps({**chat, **body})
            answer = httpx.post(server.url + "/v1/chat/completions", content=raw, headers={"content-type": "application/json"}, timeout=90)
        assert answer.status_code in (200, 400), answer.text[:300]
        assert answer.status_code == 200 or len(answer.json()["error"]["message"]) <= 400
        assert cost.cpu_s < LIMIT_CPU_S
        assert cost.bytes < LIMIT_BYTES
        server.eventually(lambda: tokens() > before, "tokens of the other stream")  # noqa: B023
    assert server.status("/readyz") == 200

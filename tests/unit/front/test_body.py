"""What bodies may take together, over the application behind the real HTTP: whatever way a request ends, its share is given back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest

from banyan_runtime.config import ServerConfig
from banyan_runtime.front.app import create_app
from banyan_runtime.front.body import FREE_BYTES, BodyBudget, decode_object
from banyan_runtime.front.context import Context
from banyan_runtime.front.errors import ApiError
from banyan_runtime.front.metrics import Metrics
from banyan_runtime.front.plan import AnswerPlan, Endpoint
from banyan_runtime.front.state import ServerState
from banyan_runtime.server.connection import Limits
from tests.support.server.raw import RawClient, eventually, head, post, refused, serving

LIMIT = 1 << 20
LARGE = {"text": "x" * (900 << 10)}
JSON = "Content-Type: application/json"
PATH = "/tokenize"
HALF = b"%x\r\n%b\r\n" % (512 << 10, b" " * (512 << 10))


class Patient:
    """Plans nothing before it is let."""

    def __init__(self) -> None:
        self.planning = 0
        self.release = threading.Event()

    async def plan(self, endpoint: Endpoint, body: bytes | bytearray, request_id: str) -> AnswerPlan:
        self.planning += 1
        await asyncio.to_thread(self.release.wait)
        return AnswerPlan(body=b"{}")


@pytest.fixture
def preparer() -> Patient:
    return Patient()


@pytest.fixture
def context(preparer: Patient) -> Context:
    state = ServerState("x", phase="ready")
    nothing: Any = object()
    made = Context(ServerConfig(model_path="x"), nothing, nothing, Metrics("x", state), state, preparer)
    made.bodies = BodyBudget(LIMIT)
    return made


@pytest.fixture
def url(context: Context, preparer: Patient) -> Iterator[str]:
    with serving(create_app(context)) as url:
        yield url
        preparer.release.set()


def begun(url: str) -> RawClient:
    """A client that has sent a half MiB of a body that goes on."""
    client = RawClient(url)
    client.send(head("POST", PATH, JSON, "Transfer-Encoding: chunked") + HALF)
    return client


def test_what_is_received_and_waits_to_be_prepared_is_counted_until_its_plan_is_made(url: str, context: Context, preparer: Patient) -> None:
    with RawClient(url) as first:
        first.send(post(PATH, LARGE))
        eventually(lambda: preparer.planning == 1)
        assert context.bodies.left < LIMIT - (800 << 10)
        refusal = httpx.post(url + PATH, json=LARGE)
        assert (refusal.status_code, refusal.json()["error"]["code"]) == (503, "server_overloaded")
        assert (refusal.headers["retry-after"], refusal.headers["connection"]) == ("5", "close")
        preparer.release.set()
        assert first.until(b"{}").startswith(b"HTTP/1.1 200")
    assert context.bodies.left == LIMIT
    assert httpx.post(url + PATH, json=LARGE).status_code == 200


def test_a_client_that_goes_away_gives_its_share_back(url: str, context: Context, preparer: Patient) -> None:
    with begun(url):
        eventually(lambda: context.bodies.left == LIMIT - (512 << 10) + FREE_BYTES)
    eventually(lambda: context.bodies.left == LIMIT)
    with RawClient(url) as gone:
        gone.send(post(PATH, LARGE))
        eventually(lambda: preparer.planning == 1)
    eventually(lambda: context.bodies.left == LIMIT)


def test_a_body_that_takes_too_long_gives_its_share_back(context: Context) -> None:
    with serving(create_app(context), Limits(body_s=1.0)) as url, begun(url) as slow:
        eventually(lambda: context.bodies.left < LIMIT)
        status, error = refused(slow.rest())
        assert (status, error["code"]) == (408, "request_timeout")
    eventually(lambda: context.bodies.left == LIMIT)


def test_a_body_that_finds_no_room_while_it_comes_gives_its_share_back(url: str, context: Context) -> None:
    with begun(url), begun(url) as second:
        eventually(lambda: context.bodies.left == 2 * FREE_BYTES)
        second.send(HALF)
        status, error = refused(second.rest())
        assert (status, error["code"]) == (503, "server_overloaded")
        eventually(lambda: context.bodies.left == LIMIT - (512 << 10) + FREE_BYTES)


def test_what_is_only_announced_takes_nothing_and_small_bodies_need_no_room(url: str, context: Context, preparer: Patient) -> None:
    preparer.release.set()
    context.bodies.left = 0
    assert httpx.post(url + PATH, json={"text": "x" * (FREE_BYTES - 100)}).status_code == 200
    context.bodies.left = LIMIT
    with RawClient(url) as idle:
        idle.send(head("POST", PATH, JSON, f"Content-Length: {900 << 10}"))
        assert httpx.post(url + PATH, json=LARGE).status_code == 200


@pytest.mark.parametrize(
    ("body", "param", "found"),
    [
        (b'{"seed":NaN}', None, "byte 8"),
        (b'{"a":{"b":[1,-Infinity]}}', None, "byte 14"),
        (b'{"a":bad}', None, "byte 5"),
        (b'{"n":1,"seed":' + b"7" * 3_000_000 + b"}", "seed", "'seed'"),
        (b'{"a":[{"b":-' + b"7" * 5000 + b"}]}", "a", "'a'"),
        (b'{"temperature":1e999}', "temperature", "1e999"),
        (b'{"' + b"x" * 500 + b'":1e999}', "x" * 64, "1e999"),
    ],
    ids=range(7),
)
def test_a_number_that_is_none_or_too_large_is_named_in_few_words(body: bytes, param: str | None, found: str) -> None:
    with pytest.raises(ApiError) as refused:
        decode_object(body)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert found in refused.value.message
    assert len(refused.value.message) < 200

"""Waiting for the server that a batch is to talk to."""

from __future__ import annotations

import asyncio
import socket

import pytest
from aiohttp import web

from banyan_runtime.batch.display import Lines
from banyan_runtime.batch.errors import ServerNotReady
from banyan_runtime.batch.server import wait_ready


class Gateway:
    """Answers every path: with `status`, and with 200 to those that have its key."""

    def __init__(self, status: int, key: str | None = None) -> None:
        self.status = status
        self.key = key

    async def answer(self, request: web.BaseRequest) -> web.Response:
        known = self.key is not None and request.headers.get("Authorization") == f"Bearer {self.key}"
        return web.json_response({"state": "loading"}, status=200 if known else self.status)

    def waited_for(self, api_key: str | None = None) -> bool:
        """Whether it is taken for ready."""

        async def run() -> bool:
            runner = web.ServerRunner(web.Server(self.answer))
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            try:
                await wait_ready(f"http://127.0.0.1:{runner.addresses[0][1]}", Lines(), patience_s=0.0, api_key=api_key)
            except ServerNotReady:
                return False
            finally:
                await runner.cleanup()
            return True

        return asyncio.run(run())


def test_the_key_is_shown_to_whoever_says_whether_the_server_is_ready() -> None:
    assert Gateway(503, key="secret").waited_for("secret")
    assert not Gateway(503, key="secret").waited_for("other")


@pytest.mark.parametrize("status", [401, 403, 404, 405])
def test_who_does_not_say_whether_it_is_ready_is_a_server_all_the_same(status: int) -> None:
    assert Gateway(status).waited_for()


@pytest.mark.parametrize("status", [500, 502, 503])
def test_a_server_that_fails_is_not_ready(status: int) -> None:
    assert not Gateway(status).waited_for()


def test_why_there_is_no_answer_is_told() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        with pytest.raises(ServerNotReady, match=url):
            asyncio.run(wait_ready(url, Lines(), patience_s=0.0))

"""A client that waits for an interim answer before it sends its body, and behaves badly meanwhile."""

from __future__ import annotations

import asyncio
import threading

from starlette.types import Message, Receive, Scope, Send

from tests.support.server.raw import RawClient, head, serving


def test_a_body_that_is_asked_for_after_the_connection_was_refused_is_a_client_that_has_gone() -> None:
    asked, refused, done = threading.Event(), threading.Event(), threading.Event()
    told: list[Message | Exception] = []

    async def late(scope: Scope, receive: Receive, send: Send) -> None:
        asked.set()
        await asyncio.to_thread(refused.wait, 10)
        try:
            told.append(await receive())
        except Exception as error:
            told.append(error)
        done.set()

    with serving(late) as url, RawClient(url) as client:
        client.send(head("POST", "/", "Transfer-Encoding: chunked", "Expect: 100-continue"))
        assert asked.wait(10)
        client.send(b"no length\r\n\r\n")
        client.until(b" 400 ")  # not its end: then the connection would be gone
        refused.set()
        assert done.wait(10)
    assert told == [{"type": "http.disconnect"}]

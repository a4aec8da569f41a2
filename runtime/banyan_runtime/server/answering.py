"""What surrounds the application while it answers one request of a connection."""

from __future__ import annotations

from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from banyan_runtime.front import errors


async def answered(cycle: RequestResponseCycle, app: Any, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer, and let go of what holds the request and is held by it: garbage is looked for too rarely to hold a body in it."""
    try:
        await app(scope, receive, send)
    finally:
        scope["extensions"].clear()
        cycle.body = bytearray()


def without_chunks(cycle: RequestResponseCycle, app: Any) -> ASGIApp:
    """For a client of HTTP/1.0, which reads chunks as text: a body without a length ends with the connection."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        unframed = False

        async def send_plain(message: Message) -> None:
            nonlocal unframed
            if message["type"] == "http.response.start":
                unframed = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
                if unframed:
                    cycle.chunked_encoding = False
            elif unframed:
                cycle.expected_content_length = len(message.get("body", b""))  # which uvicorn counts down
            await send(message)

        await app(scope, receive, send_plain)

    return answer


async def too_crowded(scope: Scope, receive: Receive, send: Send) -> None:
    await errors.too_many_connections().response()(scope, receive, send)

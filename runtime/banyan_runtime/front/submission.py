"""A request in the engine, from its submission to its end, as the front sees it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

import msgspec

from banyan_runtime import wire
from banyan_runtime.front.logprobs import Row

log = logging.getLogger("banyan")


class EngineError(Exception):
    """A request that cannot be answered. `code` is a row of the HTTP error table (queue_full, unavailable, internal_error ...);
    `engine_died`: the whole engine is gone, and the message says why."""

    def __init__(self, code: str, message: str, again_s: float = 0.0) -> None:
        """`again_s`: in which it may be tried again; 0: as its code says."""
        super().__init__(message)
        self.code = code
        self.message = message
        self.again_s = again_s


class Tokens(msgspec.Struct, frozen=True, gc=False):
    """What one request got since its listener was last told. `finish` comes with the last of a request, whose `ids` may be empty."""

    ids: list[int]
    finish: wire.Finish | None = None
    logprobs: Sequence[Row] = ()  # of each of `ids`, where the request asked for them
    prompt_logprobs: Sequence[wire.PromptLogprobs] = ()
    vector: bytes = b""  # float32, with the `finish` of a request for one


class Listener(Protocol):
    """Who waits for one request. Called on the event loop, from within the client: it must not wait, and may abort or submit.

    After the Tokens with `finish`, or after `on_failure`, nothing more comes.
    """

    def on_tokens(self, tokens: Tokens) -> None: ...

    def on_failure(self, error: EngineError) -> None: ...


class Requests(Protocol):
    """Where submissions are open."""

    def abort(self, submission: Submission) -> None: ...

    def forget(self, submission: Submission) -> None: ...


class Submission:
    """One request in the engine. After `abort()` its listener still hears of the end: a `Finish` (code ABORT, or the end it just
    reached), which tells what was cached and how long it waited."""

    __slots__ = (
        "_client",
        "_listener",
        "error",
        "finish",
        "first_token",
        "id",
        "ids",
        "last_token",
        "logprobs",
        "may_be_refused",
        "prompt_logprobs",
        "size",
        "untimed",
        "vector",
    )

    def __init__(self, client: Requests, request_id: int, listener: Listener, size: int, may_be_refused: bool) -> None:
        self.id = request_id
        self.may_be_refused = may_be_refused  # the engine's queue may be full
        self.size = size  # prompt tokens
        self.first_token: float | None = None  # monotonic seconds
        self.last_token = 0.0  # monotonic seconds, of the last one that the listener was told of
        self.untimed = 0  # tokens behind that one
        self._client = client
        self._listener = listener
        self.ids: list[int] = []  # from here on: what the listener has not been told yet
        self.finish: wire.Finish | None = None
        self.error: EngineError | None = None
        self.logprobs: list[Row] | None = None
        self.prompt_logprobs: list[wire.PromptLogprobs] | None = None
        self.vector = b""

    def abort(self) -> None:
        """End the request in the engine, unless it has ended. Never waits, never raises."""
        self._client.abort(self)

    def deliver(self) -> None:
        """Tell the listener. A listener that fails costs its own request, no other."""
        try:
            self._tell()
        except Exception:
            log.exception("what the engine sent for a request could not be handled")
            self._client.abort(self)
            self._client.forget(self)
            with contextlib.suppress(Exception):
                self._listener.on_failure(EngineError("internal_error", "Internal server error"))

    def _tell(self) -> None:
        ids, finish = self.ids, self.finish
        if ids or finish is not None or self.prompt_logprobs is not None:
            tokens = Tokens(ids, finish, self.logprobs or (), self.prompt_logprobs or (), self.vector)
            self.ids, self.logprobs, self.prompt_logprobs = [], None, None
            self._listener.on_tokens(tokens)
        if self.error is not None:
            error, self.error = self.error, None
            self._listener.on_failure(error)


class Stream:
    """The tokens of one request, for who only wants to read them: an async iterator of `Tokens`, to be read by one task.

    Raises EngineError when the request fails. Use it as `async with client.generate(...) as stream`; leaving the block early
    aborts.
    """

    def __init__(self) -> None:
        self._news: asyncio.Queue[Tokens | EngineError] = asyncio.Queue()
        self._over = False
        self.submission: Submission | None = None

    @property
    def id(self) -> int:
        assert self.submission is not None
        return self.submission.id

    def on_tokens(self, tokens: Tokens) -> None:
        self._news.put_nowait(tokens)

    def on_failure(self, error: EngineError) -> None:
        self._news.put_nowait(error)

    def abort(self) -> None:
        assert self.submission is not None
        self.submission.abort()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Tokens:
        if self._over:
            raise StopAsyncIteration
        news = await self._news.get()
        if isinstance(news, EngineError):
            self._over = True
            raise news
        self._over = news.finish is not None
        return news

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.abort()


class Unstarted:
    """Requests without a token yet, and their prompt tokens: those of the engine's queue and some more."""

    def __init__(self) -> None:
        self._requests = 0
        self._tokens = 0

    def add(self, tokens: int) -> None:
        self._requests += 1
        self._tokens += tokens

    def remove(self, tokens: int) -> None:
        self._requests -= 1
        self._tokens -= tokens

    def may_fill(self, info: wire.EngineInfo, tokens: int, clients: int = 1) -> bool:
        """Whether the queue may have no room for one more, of so many tokens, where so many clients fill it. Each knows its own part
        alone: as long as none has more than its share, there is room. A queue that is known to be empty takes any prompt."""
        known_empty = not self._requests and clients == 1
        too_large = not known_empty and (self._tokens + tokens) * clients > info.max_queued_tokens
        return self._requests >= info.max_queued_requests // clients or too_large

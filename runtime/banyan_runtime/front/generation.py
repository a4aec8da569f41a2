"""The one path of every generation: prompt → engine → detokenizer → stop strings → reasoning parser → pieces.

Chat, completions and /generate, streamed or whole, alone or several at once, all read `Generation`s; they differ in what they
make of the pieces.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Self

from banyan_runtime import wire
from banyan_runtime.front.chat.events import Event, OutputParser, Reasoning
from banyan_runtime.front.context import Context
from banyan_runtime.front.engine_client import EngineError, Stream
from banyan_runtime.front.errors import ApiError, of_engine
from banyan_runtime.front.metrics import RequestRecord
from banyan_runtime.front.text.detokenizer import Detokenizer
from banyan_runtime.front.text.stops import StopMatcher

log = logging.getLogger("banyan.requests")

FinishReason = Literal["stop", "length", "abort"]
_REFUSALS: Final = frozenset({"queue_full", "unavailable", "context_length_exceeded"})
_REASONS: Final[dict[wire.FinishCode, FinishReason]] = {
    wire.FinishCode.STOP: "stop",
    wire.FinishCode.LENGTH: "length",
    wire.FinishCode.ABORT: "abort",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One sequence to generate, ready for the engine."""

    token_ids: list[int]
    sampling: wire.Sampling  # max_new_tokens 0: nothing is generated, the prompt alone is answered
    detokenizer: Detokenizer | None  # None: token ids only
    stops: Sequence[str] = ()
    include_stop: bool = False  # keep the stop string or stop token in the text
    parser: OutputParser | None = None
    group: int = 0  # tokens per piece; 0: as many as have come
    priority: int = 0
    salt: str = ""
    endpoint: str = "other"
    streaming: bool = False
    param: str = "prompt"  # the request's field that the prompt came from, for errors
    request_id: str = ""
    received: float = 0.0  # monotonic seconds


@dataclass(slots=True)
class Finished:
    """The end of one sequence."""

    reason: FinishReason
    matched: int | str | None  # the stop token's id or the stop string; None for length and abort
    cached_tokens: int
    retractions: int


@dataclass(slots=True)
class Piece:
    """What became certain since the last piece. Text may lag behind its tokens, never the other way round."""

    content: str
    reasoning: str
    token_ids: list[int]
    completion_tokens: int  # so far
    finished: Finished | None = None


@dataclass(slots=True)
class _Pending:
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


class Generation:
    """One sequence in the engine: an async iterator of lists of pieces, the last piece of all `finished`.

    Raises ApiError when the engine refuses or fails it. `close()` ends it wherever it is and must be called by whoever
    started it.
    """

    def __init__(self, context: Context, job: Job) -> None:
        """Submit the job. Raises ApiError when the engine is not there or too busy."""
        self.job = job
        self.completion_tokens = 0
        self._context = context
        self._stops = StopMatcher(job.stops, include=job.include_stop) if job.stops else None
        self._parser = job.parser
        self._pending = _Pending()
        self._over = False
        self._stream: Stream | None = None
        if job.sampling.max_new_tokens > 0:
            try:
                self._stream = context.client.generate(job.token_ids, job.sampling, priority=job.priority, salt=job.salt)
            except EngineError as error:
                raise of_engine(error, job.param) from error
        context.live.setdefault(job.request_id, []).append(self)

    @property
    def prompt_tokens(self) -> int:
        return len(self.job.token_ids)

    @property
    def reasoning_tokens(self) -> int | None:
        """None where nothing looks for reasoning."""
        return None if self.job.parser is None else self.job.parser.reasoning_tokens

    def __aiter__(self) -> AsyncIterator[list[Piece]]:
        return self

    async def __anext__(self) -> list[Piece]:
        if self._over:
            raise StopAsyncIteration
        if self._stream is None:
            return [self._finish("length", None, None)]
        try:
            tokens = await anext(self._stream)
        except EngineError as error:
            self._failed(error)
            raise of_engine(error, self.job.param) from error
        finish = tokens.finish
        stop_id = tokens.ids[-1] if finish is not None and finish.code is wire.FinishCode.STOP and tokens.ids else None
        pieces = self._take(tokens.ids, silent_last=stop_id is not None and not self.job.include_stop, over=finish is not None)
        if finish is not None or self._matched is not None:
            self._end_text()
        if self._matched is not None:
            pieces.append(self._finish("stop", self._matched, finish or await self._ended(self._stream)))
        elif finish is not None:
            pieces.append(self._finish(_REASONS[finish.code], stop_id, finish))
        return pieces

    def abort(self) -> None:
        """End it in the engine; whoever reads it sees it finish with reason abort."""
        if self._stream is not None:
            self._stream.abort()

    def close(self) -> None:
        """Nobody reads it any longer."""
        if not self._over:
            self.abort()
            self._record("abort", None)

    @property
    def _matched(self) -> str | None:
        return None if self._stops is None else self._stops.matched

    def _take(self, ids: Sequence[int], *, silent_last: bool, over: bool) -> list[Piece]:
        """Turn tokens into pieces. `silent_last`: the last token is a stop token, which has no text; `over`: it is the last of
        all, and its text goes with the end."""
        pieces: list[Piece] = []
        group = self.job.group
        spoken = len(ids) - silent_last
        if group == 0 and self._stops is None and self._parser is None:
            self._pending.token_ids += ids
            self.completion_tokens += len(ids)
            self._say(self._detokenize(ids[:spoken]), ids)
        else:
            for position, token_id in enumerate(ids):
                self._pending.token_ids.append(token_id)
                self.completion_tokens += 1
                if position < spoken:
                    self._say(self._detokenize((token_id,)), (token_id,))
                if self._matched is not None:
                    return pieces  # what the engine computed beyond the stop string is nobody's business
                if group and len(self._pending.token_ids) >= group and not (over and position == len(ids) - 1):
                    pieces.append(self._flush())
        if group == 0 and self._pending.token_ids and not over:
            pieces.append(self._flush())
        return pieces

    def _detokenize(self, ids: Sequence[int]) -> str:
        return "" if self.job.detokenizer is None else self.job.detokenizer.feed(ids)

    def _say(self, text: str, ids: Sequence[int]) -> None:
        """Send text on its way: stop strings see it first, then the parser."""
        if self._stops is not None:
            text = self._stops.feed(text, allowed=self.completion_tokens >= self.job.sampling.min_new_tokens)
        if self._parser is None:
            if text:
                self._pending.content.append(text)
            return
        try:
            self._sort(self._parser.feed(text, ids))
        except Exception:
            log.exception("the output parser failed on request %s; the rest is passed on as it is", self.job.request_id)
            self._parser = None
            self._pending.content.append(text)

    def _end_text(self) -> None:
        """Release what the detokenizer, the stop strings and the parser held back."""
        if self.job.detokenizer is not None and self._matched is None:
            self._say(self.job.detokenizer.finish(), ())
        rest = "" if self._stops is None or self._matched is not None else self._stops.finish()
        if self._parser is None:
            self._pending.content.append(rest)
            return
        self._sort([*self._parser.feed(rest, ()), *self._parser.finish()])

    def _sort(self, events: Sequence[Event]) -> None:
        for event in events:
            (self._pending.reasoning if isinstance(event, Reasoning) else self._pending.content).append(event.text)

    def _flush(self, finished: Finished | None = None) -> Piece:
        pending, self._pending = self._pending, _Pending()
        return Piece("".join(pending.content), "".join(pending.reasoning), pending.token_ids, self.completion_tokens, finished)

    async def _ended(self, stream: Stream) -> wire.Finish | None:
        """After a stop string: stop the engine, and wait for its last word on this request."""
        stream.abort()
        try:
            async for tokens in stream:
                if tokens.finish is not None:
                    return tokens.finish
        except EngineError:
            log.debug("request %s failed in the engine after its stop string", self.job.request_id)
        return None

    def _finish(self, reason: FinishReason, matched: int | str | None, finish: wire.Finish | None) -> Piece:
        self._record(reason, finish)
        cached, retractions = (0, 0) if finish is None else (finish.cached_tokens, finish.retractions)
        return self._flush(Finished(reason, matched, cached, retractions))

    def _failed(self, error: EngineError) -> None:
        if error.code in _REFUSALS and self.completion_tokens == 0:
            self._leave()  # never admitted: counted as a rejection where the answer is made
        else:
            self._record("error", None)

    def _record(self, reason: str, finish: wire.Finish | None) -> None:
        """Exactly once for every request that was admitted: one line, one count."""
        self._leave()
        job, now = self.job, time.monotonic()
        first = None if self._stream is None else self._stream.first_token
        record = RequestRecord(
            endpoint=job.endpoint,
            streaming=job.streaming,
            finish_reason=reason,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=0 if finish is None else finish.cached_tokens,
            completion_tokens=self.completion_tokens,
            received=job.received,
            first_token=first,
            finished=now,
            queue_s=0.0 if finish is None else finish.queue_s,
            prefill_s=0.0 if finish is None else finish.prefill_s,
        )
        self._context.metrics.request_finished(record)
        log.info(
            "Finished %s. endpoint: %s, reason: %s, #prompt-token: %d, #cached-token: %d, #output-token: %d, queue: %.3f s, "
            "first token: %.3f s, total: %.3f s",
            job.request_id,
            job.endpoint,
            reason,
            record.prompt_tokens,
            record.cached_tokens,
            record.completion_tokens,
            record.queue_s,
            (first or now) - job.received,
            now - job.received,
        )

    def _leave(self) -> None:
        self._over = True
        siblings = self._context.live.get(self.job.request_id, [])
        if self in siblings:
            siblings.remove(self)
        if not siblings:
            self._context.live.pop(self.job.request_id, None)


class Batch:
    """The generations of one HTTP request, read as one: yields (index, pieces) as they come.

    Use it as `async with`: leaving the block ends in the engine what has not ended.
    """

    def __init__(self, context: Context, jobs: Sequence[Job]) -> None:
        """Submit all jobs. Raises ApiError when one of them is refused; then none runs."""
        self.generations: list[Generation] = []
        self._pumps: list[asyncio.Task[None]] = []
        self._head: tuple[int, list[Piece]] | None = None
        try:
            for job in jobs:
                self.generations.append(Generation(context, job))
        except ApiError:
            self.close()
            raise
        self._items = self._single() if len(jobs) == 1 else self._merged()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for pump in self._pumps:
            pump.cancel()
        for generation in self.generations:
            generation.close()

    async def admitted(self) -> None:
        """Wait for the first sign of the engine. Raises ApiError if it is a refusal: the answer's status is still open."""
        self._head = await anext(self._items, None)

    async def __aiter__(self) -> AsyncIterator[tuple[int, list[Piece]]]:
        if self._head is not None:
            head, self._head = self._head, None
            yield head
        async for item in self._items:
            yield item

    async def _single(self) -> AsyncGenerator[tuple[int, list[Piece]], None]:
        async for pieces in self.generations[0]:
            yield 0, pieces

    async def _merged(self) -> AsyncGenerator[tuple[int, list[Piece]], None]:
        queue: asyncio.Queue[tuple[int, list[Piece]] | BaseException | None] = asyncio.Queue()

        async def pump(index: int) -> None:
            try:
                async for pieces in self.generations[index]:
                    queue.put_nowait((index, pieces))
                queue.put_nowait(None)
            except Exception as error:  # carried to the reader, who raises it
                queue.put_nowait(error)

        self._pumps = [asyncio.create_task(pump(index)) for index in range(len(self.generations))]
        for _ in self._pumps:
            while (item := await queue.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item

"""The one path of every generation: prompt → engine → detokenizer → stop strings → reasoning parser → deltas.

Chat, completions and /generate, streamed or whole, alone or several at once, all read `Generation`s; they differ in what they
make of the deltas.
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
class GenerateRequest:
    """One sequence to generate, ready for the engine."""

    token_ids: list[int]
    sampling: wire.Sampling  # max_new_tokens 0: nothing is generated, the prompt alone is answered
    detokenizer: Detokenizer | None  # None: token ids only
    stops: Sequence[str] = ()
    include_stop: bool = False  # keep the stop string or stop token in the text
    parser: OutputParser | None = None
    group: int = 0  # tokens per delta; 0: as many as have come
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
class Delta:
    """What became certain since the last delta. Text may lag behind its tokens, never the other way round."""

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
    """One sequence in the engine: an async iterator of lists of deltas, the last delta of all `finished`.

    Raises ApiError when the engine refuses or fails it. `close()` ends it wherever it is and must be called by whoever
    started it.
    """

    def __init__(self, context: Context, request: GenerateRequest) -> None:
        """Submit the request. Raises ApiError when the engine is not there or too busy."""
        self.request = request
        self.completion_tokens = 0
        self._context = context
        self._stops = StopMatcher(request.stops, include=request.include_stop) if request.stops else None
        self._parser = request.parser
        self._pending = _Pending()
        self._over = False
        self._stream: Stream | None = None
        if request.sampling.max_new_tokens > 0:
            try:
                self._stream = context.client.generate(request.token_ids, request.sampling, priority=request.priority, salt=request.salt)
            except EngineError as error:
                raise of_engine(error, request.param) from error
        context.live.setdefault(request.request_id, []).append(self)

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.token_ids)

    @property
    def reasoning_tokens(self) -> int | None:
        """None where nothing looks for reasoning."""
        return None if self.request.parser is None else self.request.parser.reasoning_tokens

    def __aiter__(self) -> AsyncIterator[list[Delta]]:
        return self

    async def __anext__(self) -> list[Delta]:
        if self._over:
            raise StopAsyncIteration
        if self._stream is None:
            return [self._finish("length", None, None)]
        try:
            tokens = await anext(self._stream)
        except EngineError as error:
            self._failed(error)
            raise of_engine(error, self.request.param) from error
        finish = tokens.finish
        stop_id = tokens.ids[-1] if finish is not None and finish.code is wire.FinishCode.STOP and tokens.ids else None
        deltas = self._take(tokens.ids, silent_last=stop_id is not None and not self.request.include_stop, over=finish is not None)
        if finish is not None or self._matched is not None:
            self._end_text()
        if self._matched is not None:
            deltas.append(self._finish("stop", self._matched, finish or await self._ended(self._stream)))
        elif finish is not None:
            deltas.append(self._finish(_REASONS[finish.code], stop_id, finish))
        return deltas

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

    def _take(self, ids: Sequence[int], *, silent_last: bool, over: bool) -> list[Delta]:
        """Turn tokens into deltas. `silent_last`: the last token is a stop token, which has no text; `over`: it is the last of
        all, and its text goes with the end."""
        deltas: list[Delta] = []
        group = self.request.group
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
                    return deltas  # what the engine computed beyond the stop string is nobody's business
                if group and len(self._pending.token_ids) >= group and not (over and position == len(ids) - 1):
                    deltas.append(self._flush())
        if group == 0 and self._pending.token_ids and not over:
            deltas.append(self._flush())
        return deltas

    def _detokenize(self, ids: Sequence[int]) -> str:
        return "" if self.request.detokenizer is None else self.request.detokenizer.feed(ids)

    def _say(self, text: str, ids: Sequence[int]) -> None:
        """Send text on its way: stop strings see it first, then the parser."""
        if self._stops is not None:
            text = self._stops.feed(text, allowed=self.completion_tokens >= self.request.sampling.min_new_tokens)
        if self._parser is None:
            if text:
                self._pending.content.append(text)
            return
        try:
            self._sort(self._parser.feed(text, ids))
        except Exception:
            log.exception("the output parser failed on request %s; the rest is passed on as it is", self.request.request_id)
            self._parser = None
            self._pending.content.append(text)

    def _end_text(self) -> None:
        """Release what the detokenizer, the stop strings and the parser held back."""
        if self.request.detokenizer is not None and self._matched is None:
            self._say(self.request.detokenizer.finish(), ())
        rest = "" if self._stops is None or self._matched is not None else self._stops.finish()
        if self._parser is None:
            self._pending.content.append(rest)
            return
        self._sort([*self._parser.feed(rest, ()), *self._parser.finish()])

    def _sort(self, events: Sequence[Event]) -> None:
        for event in events:
            (self._pending.reasoning if isinstance(event, Reasoning) else self._pending.content).append(event.text)

    def _flush(self, finished: Finished | None = None) -> Delta:
        pending, self._pending = self._pending, _Pending()
        return Delta("".join(pending.content), "".join(pending.reasoning), pending.token_ids, self.completion_tokens, finished)

    async def _ended(self, stream: Stream) -> wire.Finish | None:
        """After a stop string: stop the engine, and wait for its last word on this request."""
        stream.abort()
        try:
            async for tokens in stream:
                if tokens.finish is not None:
                    return tokens.finish
        except EngineError:
            log.debug("request %s failed in the engine after its stop string", self.request.request_id)
        return None

    def _finish(self, reason: FinishReason, matched: int | str | None, finish: wire.Finish | None) -> Delta:
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
        request, now = self.request, time.monotonic()
        first = None if self._stream is None else self._stream.first_token
        record = RequestRecord(
            endpoint=request.endpoint,
            streaming=request.streaming,
            finish_reason=reason,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=0 if finish is None else finish.cached_tokens,
            completion_tokens=self.completion_tokens,
            received=request.received,
            first_token=first,
            finished=now,
            queue_s=0.0 if finish is None else finish.queue_s,
            prefill_s=0.0 if finish is None else finish.prefill_s,
        )
        self._context.metrics.request_finished(record)
        log.info(
            "Finished %s. endpoint: %s, reason: %s, #prompt-token: %d, #cached-token: %d, #output-token: %d, queue: %.3f s, "
            "first token: %.3f s, total: %.3f s",
            request.request_id,
            request.endpoint,
            reason,
            record.prompt_tokens,
            record.cached_tokens,
            record.completion_tokens,
            record.queue_s,
            (first or now) - request.received,
            now - request.received,
        )

    def _leave(self) -> None:
        self._over = True
        siblings = self._context.live.get(self.request.request_id, [])
        if self in siblings:
            siblings.remove(self)
        if not siblings:
            self._context.live.pop(self.request.request_id, None)


class GenerationGroup:
    """The generations of one HTTP request, read as one: yields (index, deltas) as they come.

    Use it as `async with`: leaving the block ends in the engine what has not ended.
    """

    def __init__(self, context: Context, requests: Sequence[GenerateRequest]) -> None:
        """Submit all requests. Raises ApiError when one of them is refused; then none runs."""
        self.generations: list[Generation] = []
        self._pumps: list[asyncio.Task[None]] = []
        self._head: tuple[int, list[Delta]] | None = None
        try:
            for request in requests:
                self.generations.append(Generation(context, request))
        except ApiError:
            self.close()
            raise
        self._items = self._single() if len(requests) == 1 else self._merged()

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

    async def __aiter__(self) -> AsyncIterator[tuple[int, list[Delta]]]:
        if self._head is not None:
            head, self._head = self._head, None
            yield head
        async for item in self._items:
            yield item

    async def _single(self) -> AsyncGenerator[tuple[int, list[Delta]], None]:
        async for deltas in self.generations[0]:
            yield 0, deltas

    async def _merged(self) -> AsyncGenerator[tuple[int, list[Delta]], None]:
        queue: asyncio.Queue[tuple[int, list[Delta]] | BaseException | None] = asyncio.Queue()

        async def pump(index: int) -> None:
            try:
                async for deltas in self.generations[index]:
                    queue.put_nowait((index, deltas))
                queue.put_nowait(None)
            except Exception as error:  # carried to the reader, who raises it
                queue.put_nowait(error)

        self._pumps = [asyncio.create_task(pump(index)) for index in range(len(self.generations))]
        for _ in self._pumps:
            while (item := await queue.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item

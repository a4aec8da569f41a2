"""The one path of every generation: prompt → engine → detokenizer → stop strings → reasoning parser → deltas.

Chat, completions and /generate, streamed or whole, alone or several at once, are `GenerationGroup`s; they differ in the
consumer that takes the deltas. Nothing here waits: the engine's client calls in, and the consumer is called.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

import msgspec

from banyan_runtime import wire
from banyan_runtime.front.chat.events import Event, OutputParser, Reasoning
from banyan_runtime.front.chat.reasoning import Start
from banyan_runtime.front.context import Context
from banyan_runtime.front.engine_client import EngineError, Submission, Tokens
from banyan_runtime.front.errors import ApiError, of_engine
from banyan_runtime.front.logprobs import Row
from banyan_runtime.front.metrics import RequestRecord
from banyan_runtime.front.plan import GenerateRequest
from banyan_runtime.front.text.detokenizer import Detokenizer
from banyan_runtime.front.text.stops import StopMatcher
from banyan_runtime.front.text.text import Text
from banyan_runtime.front.turns import in_turns

log = logging.getLogger("banyan.requests")

FinishReason = Literal["stop", "length", "abort"]
_REFUSALS: Final = frozenset({"queue_full", "unavailable", "context_length_exceeded"})
_REASONS: Final[dict[wire.FinishCode, FinishReason]] = {
    wire.FinishCode.STOP: "stop",
    wire.FinishCode.LENGTH: "length",
    wire.FinishCode.ABORT: "abort",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One HTTP request that generates."""

    endpoint: str  # one of metrics.ENDPOINTS
    streaming: bool
    received: float  # monotonic seconds
    group_id: str | None = None  # the client's id for all sequences together, where each has one of its own


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of one sequence."""

    reason: FinishReason
    matched: int | str | None  # the stop token's id or the stop string; None for length and abort
    cached_tokens: int
    retractions: int
    reasoning_tokens: int | None  # None where nothing looks for reasoning


class Delta(msgspec.Struct, gc=False):
    """What became certain since the last delta. Text may lag behind its tokens, never the other way round."""

    content: str
    reasoning: str
    token_ids: list[int]
    completion_tokens: int  # so far
    logprobs: Sequence[Row] = ()  # of `token_ids`, where the request asked for them
    prompt_logprobs: Sequence[wire.PromptLogprobs] = ()  # with the first delta, where the request asked for them
    finished: Finished | None = None


class Consumer(Protocol):
    """Who makes the answer out of deltas. Called on the event loop; it must not wait."""

    def add(self, index: int, delta: Delta) -> None:
        """The next delta of one sequence; its last one is `finished`."""
        ...

    def end(self, error: ApiError | None) -> None:
        """All sequences have finished, or one of them has failed and the others are given up. Called once, last of all."""
        ...


class _State(enum.Enum):
    RUNNING = enum.auto()
    MATCHED = enum.auto()  # a stop string was found; the engine's last word on the request is awaited
    CLOSED = enum.auto()  # nobody reads it any longer; the engine's last word is awaited for the record
    OVER = enum.auto()


class Generation:
    """One sequence, from its submission to its record: a listener of the engine that gives deltas to its group."""

    def __init__(self, context: Context, call: Call, request_id: str, request: GenerateRequest, group: GenerationGroup, index: int) -> None:
        """Submit the request, whose token ids are not kept. Raises ApiError when the engine is not there or too busy."""
        text = context.text
        assert text is not None
        self._context = context
        self._call = call
        self._id = request_id
        self._group = group
        self._index = index
        self._prompt_tokens = request.prompt_tokens
        self._param = request.param
        self._include_stop = request.include_stop
        self._interval = request.stream_interval
        self._min_new_tokens = request.sampling.min_new_tokens
        self._parser = _parser(text, request)
        self._detokenizer = _detokenizer(text, request, call)
        self._stops = StopMatcher(request.stops, include=request.include_stop) if request.stops else None
        self._plain = self._parser is None and self._stops is None
        self._completion_tokens = 0
        self._content: list[str] = []  # from here on: what no delta has taken along yet
        self._reasoning: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[Row] = []
        self._prompt_logprobs: list[wire.PromptLogprobs] = []
        self._state = _State.RUNNING
        self._submission: Submission | None = None
        if request.sampling.max_new_tokens > 0 or (request.logprobs is not None and request.logprobs.prompt_from > 0):
            try:
                self._submission = context.client.submit(
                    self, request.token_ids, request.sampling, logprobs=request.logprobs, priority=request.priority, salt=request.salt
                )
            except EngineError as error:
                raise of_engine(error, request.param) from error
        else:
            asyncio.get_running_loop().call_soon(self._prompt_alone)
        context.live.add(request_id, self, call.received)

    def abort(self) -> None:
        """End it in the engine; its consumer sees it finish with reason abort."""
        if self._submission is not None:
            self._submission.abort()

    def close(self) -> None:
        """Nobody reads it any longer. It is recorded when the engine has confirmed its end."""
        if self._state is _State.OVER:
            return
        self._context.live.remove(self._id, self)
        self._state = _State.CLOSED
        if self._submission is None:
            self._record("abort", None)
        else:
            self._submission.abort()

    # --- what the engine says ---

    def on_tokens(self, tokens: Tokens) -> None:
        finish = tokens.finish
        if self._state is not _State.RUNNING:
            if finish is not None:
                self._end_late(finish)
            return
        ids, logprobs = tokens.ids, tokens.logprobs
        if tokens.prompt_logprobs:
            self._prompt_logprobs += tokens.prompt_logprobs
        if finish is None:
            self._take(ids, logprobs, len(ids), over=False)
            if self._stops is not None and self._stops.matched is not None:
                self._state = _State.MATCHED
                self.abort()
            return
        stop_id = ids[-1] if finish.code is wire.FinishCode.STOP and ids else None
        silent = stop_id is not None and not self._include_stop
        self._take(ids, logprobs, len(ids) - silent, over=True)
        if self._matched is not None:
            self._finish("stop", self._matched, finish)
        else:
            self._finish(_REASONS[finish.code], stop_id, finish)

    def on_failure(self, error: EngineError) -> None:
        if self._state is _State.RUNNING:
            if error.code in _REFUSALS and self._completion_tokens == 0:
                self._leave()  # never admitted: counted as a rejection where the answer is made
            else:
                self._record("error", None)
            self._group.failed(of_engine(error, self._param))
        elif self._state is not _State.OVER:
            self._end_late(None)

    def _end_late(self, finish: wire.Finish | None) -> None:
        """The end that a stop string or a reader who left has waited for."""
        if self._state is _State.MATCHED:
            self._finish("stop", self._matched, finish)
        elif self._state is _State.CLOSED:
            self._record("abort", finish)

    # --- from tokens to deltas ---

    @property
    def _matched(self) -> str | None:
        return None if self._stops is None else self._stops.matched

    def _take(self, ids: list[int], logprobs: Sequence[Row], spoken: int, *, over: bool) -> None:
        """Turn tokens into deltas. Only the first `spoken` ones have a text; `over`: they are the last of all, and what is left
        of them goes with the end."""
        interval, number = self._interval, len(ids)
        if self._plain and (interval == 0 or interval == number == 1):  # the frequent case: nothing is held back, nothing cut up
            self._completion_tokens += number
            text = "" if self._detokenizer is None else self._detokenizer.feed(ids if spoken == number else ids[:spoken])
            if over:
                self._content.append(text)
                self._token_ids += ids
                self._logprobs += logprobs
            elif number:
                self._group.add(self._index, Delta(text, "", ids, self._completion_tokens, logprobs, self._prompt_once()))
            return
        for position, token_id in enumerate(ids):
            self._token_ids.append(token_id)
            self._completion_tokens += 1
            if logprobs:
                self._logprobs.append(logprobs[position])
            if position < spoken:
                one = (token_id,)
                self._say("" if self._detokenizer is None else self._detokenizer.feed(one), one)
            if self._matched is not None:
                return  # what the engine computed beyond the stop string is nobody's business
            if interval and len(self._token_ids) >= interval and not (over and position == number - 1):
                self._flush()
        if not interval and ids and not over:
            self._flush()

    def _say(self, text: str, ids: Sequence[int]) -> None:
        """Send text on its way: stop strings see it first, then the parser."""
        if self._stops is not None:
            text = self._stops.feed(text, allowed=self._completion_tokens >= self._min_new_tokens)
        if self._parser is None:
            if text:
                self._content.append(text)
            return
        try:
            self._sort(self._parser.feed(text, ids))
        except Exception:
            log.exception("the output parser failed on request %s; the rest is passed on as it is", self._id)
            self._parser = None
            self._content.append(text)

    def _end_text(self) -> None:
        """Release what the detokenizer, the stop strings and the parser held back."""
        if self._detokenizer is not None and self._matched is None:
            self._say(self._detokenizer.finish(), ())
        rest = "" if self._stops is None or self._matched is not None else self._stops.finish()
        if self._parser is None:
            self._content.append(rest)
            return
        self._sort([*self._parser.feed(rest, ()), *self._parser.finish()])

    def _sort(self, events: Sequence[Event]) -> None:
        for event in events:
            (self._reasoning if isinstance(event, Reasoning) else self._content).append(event.text)

    def _flush(self, finished: Finished | None = None) -> None:
        delta = Delta(
            "".join(self._content),
            "".join(self._reasoning),
            self._token_ids,
            self._completion_tokens,
            self._logprobs,
            self._prompt_once(),
            finished,
        )
        self._content, self._reasoning, self._token_ids, self._logprobs = [], [], [], []
        self._group.add(self._index, delta)

    def _prompt_once(self) -> Sequence[wire.PromptLogprobs]:
        if not self._prompt_logprobs:
            return ()
        parts, self._prompt_logprobs = self._prompt_logprobs, []
        return parts

    # --- the end ---

    def _prompt_alone(self) -> None:
        """The answer to a request for no tokens."""
        if self._state is _State.RUNNING:
            self._finish("length", None, None)

    def _finish(self, reason: FinishReason, matched: int | str | None, finish: wire.Finish | None) -> None:
        self._end_text()
        self._record(reason, finish)
        cached, retractions = (0, 0) if finish is None else (finish.cached_tokens, finish.retractions)
        thought = None if self._parser is None else self._parser.reasoning_tokens
        self._flush(Finished(reason, matched, cached, retractions, thought))

    def _record(self, reason: str, finish: wire.Finish | None) -> None:
        """Exactly once for every request that was admitted: one line, one count."""
        call, now = self._call, time.monotonic()
        first = None if self._submission is None else self._submission.first_token
        self._leave()
        record = RequestRecord(
            endpoint=call.endpoint,
            streaming=call.streaming,
            finish_reason=reason,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=0 if finish is None else finish.cached_tokens,
            completion_tokens=self._completion_tokens,
            received=call.received,
            first_token=first,
            finished=now,
            queue_s=None if finish is None else finish.queue_s,
            prefill_s=None if finish is None else finish.prefill_s,
        )
        self._context.metrics.request_finished(record)
        log.info(
            "Finished %s. endpoint: %s, reason: %s, #prompt-token: %d, #cached-token: %d, #output-token: %d, queue: %s, "
            "first token: %.3f s, total: %.3f s",
            self._id,
            call.endpoint,
            reason,
            record.prompt_tokens,
            record.cached_tokens,
            record.completion_tokens,
            "-" if record.queue_s is None else f"{record.queue_s:.3f} s",
            (first or now) - call.received,
            now - call.received,
        )

    def _leave(self) -> None:
        self._state = _State.OVER
        self._context.live.remove(self._id, self)
        self._submission = None  # it holds its listener: no cycle for the garbage collector


def _parser(text: Text, request: GenerateRequest) -> OutputParser | None:
    if request.reasoning is None or text.reasoning is None:
        return None
    return text.reasoning.parser(Start(request.reasoning), stream=request.stream_reasoning)


def _detokenizer(text: Text, request: GenerateRequest, call: Call) -> Detokenizer | None:
    """None where only token ids are served. A chat that wants its reasoning unparsed wants its markers too, special or not."""
    if text.tokenizer is None:
        return None
    keep = text.reasoning.marker_ids if text.reasoning is not None and call.endpoint == "chat" else frozenset()
    return text.tokenizer.detokenizer(skip_special_tokens=request.skip_special_tokens, keep=keep)


class GenerationGroup:
    """The generations of one HTTP request. Whoever made it closes it; closing ends in the engine what has not ended."""

    def __init__(self, context: Context, call: Call, requests: Sequence[GenerateRequest], ids: Sequence[str], consumer: Consumer) -> None:
        """Submit all requests, known to clients by `ids`: as many at once as a turn has time for, the others in further turns.
        The consumer hears of them later, never from within this call. Raises ApiError when one of the first is refused; then
        none runs."""
        self._context = context
        self._call = call
        self._consumer = consumer
        self._generations: list[Generation] = []
        self._waiting = deque(enumerate(zip(ids, requests, strict=True)))
        self._left = len(requests)
        self._aborted = False
        self._begun = False
        try:
            in_turns(self._submitted())
        except BaseException:
            self.close()
            raise
        self._begun = True
        if call.group_id is not None:
            context.live.add(call.group_id, self, call.received)

    def _submitted(self) -> Iterator[None]:
        while self._waiting:
            index, (request_id, request) = self._waiting.popleft()
            try:
                generation = Generation(self._context, self._call, request_id, request, self, index)
            except ApiError as error:
                if not self._begun:
                    raise
                self.failed(error)
                return
            self._generations.append(generation)
            if self._aborted:
                generation.abort()
            yield

    def abort(self) -> None:
        """End all sequences in the engine; the consumer sees them finish with reason abort."""
        self._aborted = True
        in_turns(map(Generation.abort, tuple(self._generations)))

    def close(self) -> None:
        """End what has not ended, of very many some in further turns; the consumer hears nothing more. May be called again."""
        self._over()
        self._waiting.clear()
        generations, self._generations = self._generations, []
        in_turns(map(Generation.close, generations))

    def _over(self) -> None:
        self._left = 0
        if self._call.group_id is not None:
            self._context.live.remove(self._call.group_id, self)

    # --- called by its generations ---

    def add(self, index: int, delta: Delta) -> None:
        if not self._left:
            return
        self._consumer.add(index, delta)
        if delta.finished is not None:
            self._left -= 1
            if not self._left:
                self._over()
                self._consumer.end(None)

    def failed(self, error: ApiError) -> None:
        if self._left:
            self.close()
            self._consumer.end(error)

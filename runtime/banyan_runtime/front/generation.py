"""The one path of every generation: prompt → engine → what it says → deltas.

Chat, completions and /generate, streamed or whole, alone or several at once, are groups of `Generation`s; they differ in the
consumer that takes the deltas. Nothing here waits: the engine's client calls in, and the consumer is called.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from banyan_runtime import wire
from banyan_runtime.front.context import Context
from banyan_runtime.front.current import current
from banyan_runtime.front.deltas import Delta, Finished, FinishReason
from banyan_runtime.front.errors import ApiError, bad_grammar, of_engine
from banyan_runtime.front.logprobs import Row
from banyan_runtime.front.metrics import RequestRecord
from banyan_runtime.front.plan import GenerateRequest
from banyan_runtime.front.speech import Speech
from banyan_runtime.front.submission import EngineError, Submission, Tokens

log = logging.getLogger("banyan.requests")

_REFUSALS: Final = frozenset({"queue_full", "unavailable", "context_length_exceeded"})
_REASONS: Final[dict[wire.FinishCode, FinishReason]] = {
    wire.FinishCode.STOP: "stop",
    wire.FinishCode.LENGTH: "length",
    wire.FinishCode.ABORT: "abort",
    wire.FinishCode.COMPLETE: "stop",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One HTTP request that generates."""

    endpoint: str  # one of metrics.ENDPOINTS
    streaming: bool
    received: float  # monotonic seconds
    group_id: str | None = None  # the client's id for all sequences together, where each has one of its own
    key: str | None = None  # whose key it came with, "" for one without a name; None: none was asked for


class Group(Protocol):
    """Who has begun a generation, maybe beside others, and hears of it."""

    def add(self, index: int, delta: Delta) -> None: ...

    def failed(self, error: ApiError) -> None:
        """It was taken on, and cannot go on."""
        ...

    def refused(self, error: ApiError) -> None:
        """It was not taken on."""
        ...


class _State(enum.Enum):
    RUNNING = enum.auto()
    MATCHED = enum.auto()  # a stop string was found, or the one call is complete; the engine's last word on the request is awaited
    CLOSED = enum.auto()  # nobody reads it any longer; the engine's last word is awaited for the record
    OVER = enum.auto()


class Generation:
    """One sequence, from its submission to its record: a listener of the engine that gives deltas to its group."""

    def __init__(self, context: Context, call: Call, request_id: str, request: GenerateRequest, group: Group, index: int) -> None:
        """Submit the request, whose token ids are not kept. Raises ApiError when the engine is not there or too busy."""
        text = context.text
        assert text is not None
        self._context = context
        self._call = call
        self._current = current()
        self._id = request_id
        self._group = group
        self._index = index
        self._prompt_tokens = request.prompt_tokens
        self._told_tokens = request.told_tokens
        priority = context.config.priority(request.priority)
        self._background = priority < 0
        self._param = request.param
        self._constraint = request.constraint
        self._include_stop = request.include_stop
        self._interval = request.stream_interval
        self._speech = Speech(text, request, call.endpoint, request_id)
        self._completion_tokens = 0
        self._token_ids: list[int] = []  # from here on: what no delta has taken along yet
        self._logprobs: list[Row] = []
        self._prompt_logprobs: list[wire.PromptLogprobs] = []
        self._state = _State.RUNNING
        self._vector = b""
        self._submission: Submission | None = None
        if request.computed:
            try:
                self._submission = context.client.submit(
                    self,
                    request.token_ids,
                    request.sampling,
                    logprobs=request.logprobs,
                    priority=priority,
                    salt=request.salt,
                    constraint=request.constraint,
                    pooling=request.pooling,
                )
            except EngineError as error:
                raise of_engine(error, request.param) from error
        else:
            asyncio.get_running_loop().call_soon(self._prompt_alone)
        context.live.add(request_id, self, call.received)
        self._current.trace.begun()

    @property
    def may_be_refused(self) -> bool:
        """Whether the engine may have no room for it, as far as one could tell when it was submitted, or no grammar."""
        return self._submission is not None and (self._submission.may_be_refused or self._constraint is not None)

    @property
    def begun(self) -> bool:
        """Whether it has a token."""
        return self._completion_tokens > 0

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

    def withdraw(self) -> None:
        """The request that it belongs to is refused: it is ended, and counts as never taken on unless it has begun."""
        if self._state is not _State.RUNNING or self.begun:
            self.close()
            return
        self.abort()
        self._refuse()

    # --- what the engine says ---

    def on_tokens(self, tokens: Tokens) -> None:
        finish = tokens.finish
        if self._state is not _State.RUNNING:
            if finish is not None:
                self._end_late(finish)
            return
        ids, logprobs = tokens.ids, tokens.logprobs
        if ids and not self.begun:
            self._count_first_token()
        if tokens.prompt_logprobs:
            self._prompt_logprobs += tokens.prompt_logprobs
        if finish is None:
            self._take(ids, logprobs, len(ids), over=False)
            if self._speech.over:
                self._state = _State.MATCHED
                self.abort()
            return
        self._vector = tokens.vector
        stop_id = ids[-1] if finish.code is wire.FinishCode.STOP and ids else None
        silent = stop_id is not None and not self._include_stop
        self._take(ids, logprobs, len(ids) - silent, over=True)
        if self._speech.over or self._vector:
            self._finish("stop", self._speech.matched, finish)
        else:
            self._finish(_REASONS[finish.code], stop_id, finish)

    def _count_first_token(self) -> None:
        first = None if self._submission is None else self._submission.first_token
        if first is not None and not self._background:
            self._context.metrics.first_token(first - self._call.received, streaming=self._call.streaming)

    def on_failure(self, error: EngineError) -> None:
        if self._state is _State.RUNNING:
            asked = self._constraint if error.code == "invalid_grammar" else None
            answer = of_engine(error, self._param) if asked is None else bad_grammar(asked.param, asked.what, asked.name, error.message)
            if error.code in _REFUSALS and not self.begun:
                self._refuse()
                self._group.refused(answer)
            else:
                self._record("error", None)
                self._fail(answer)
        elif self._state is _State.OVER:
            self._fail(of_engine(error, self._param))  # its end could not be told
        else:
            self._end_late(None)

    def _fail(self, error: ApiError) -> None:
        error.taken_on = True
        self._group.failed(error)

    def _refuse(self) -> None:
        """It was never taken on: counted as a rejection where the answer is made."""
        self._leave()
        self._current.trace.ended(None)

    def _end_late(self, finish: wire.Finish | None) -> None:
        """The end that a stop string or a reader who left has waited for."""
        if self._state is _State.MATCHED:
            self._finish("stop", self._speech.matched, finish)
        elif self._state is _State.CLOSED:
            self._record("abort", finish)

    # --- from tokens to deltas ---

    def _take(self, ids: list[int], logprobs: Sequence[Row], spoken: int, *, over: bool) -> None:
        """Turn tokens into deltas. Only the first `spoken` ones have a text; `over`: they are the last of all, and what is left
        of them goes with the end."""
        interval, number, speech = self._interval, len(ids), self._speech
        if speech.plain and interval <= 1:  # the frequent case: nothing is held back, nothing cut up
            self._completion_tokens += number
            text = speech.text(ids if spoken == number else ids[:spoken])
            if over:
                speech.content.append(text)
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
                speech.feed(token_id, self._completion_tokens)
            if speech.over:
                return  # what the engine computed beyond the end is nobody's business
            if interval > 1 and len(self._token_ids) >= interval and not (over and position == number - 1):
                self._flush()
        if interval <= 1 and ids and not over:
            self._flush()

    def _flush(self, finished: Finished | None = None) -> None:
        content, reasoning, tools, said = self._speech.take()
        ids, logprobs, self._token_ids, self._logprobs = self._token_ids, self._logprobs, [], []
        number, prompt = self._completion_tokens, self._prompt_once()
        delta = Delta(content, reasoning, ids, number, logprobs, prompt, finished, tools, said, self._vector)
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
        self._speech.finish(self._completion_tokens)
        if self._speech.matched is not None and reason != "abort":  # maybe in what was held back
            reason, matched = "stop", self._speech.matched
        self._record(reason, finish)
        cached, retractions = (0, 0) if finish is None else (finish.cached_tokens, finish.retractions)
        self._flush(Finished(reason, matched, cached, retractions, self._speech.reasoning_tokens))

    def _record(self, reason: str, finish: wire.Finish | None) -> None:
        """Exactly once for every request that was admitted: one line, one count."""
        call, now = self._call, time.monotonic()
        first = None if self._submission is None else self._submission.first_token
        self._leave()
        record = RequestRecord(
            endpoint=call.endpoint,
            streaming=call.streaming,
            finish_reason="tool_calls" if reason == "stop" and self._speech.calls else reason,
            prompt_tokens=self._prompt_tokens,
            told_tokens=self._told_tokens,
            cached_tokens=0 if finish is None else finish.cached_tokens,
            completion_tokens=self._completion_tokens,
            received=call.received,
            first_token=first,
            finished=now,
            background=self._background,
            reasoning_tokens=self._speech.reasoning_tokens,
            queue_s=None if finish is None else finish.queue_s,
            prefill_s=None if finish is None else finish.prefill_s,
            key=call.key,
        )
        self._context.metrics.request_finished(record)
        self._current.trace.ended(record)
        log.info(
            "Finished %s. request: %s, endpoint: %s, reason: %s, #prompt-token: %d, #cached-token: %d, #output-token: %d, queue: %s, "
            "first token: %s, total: %.3f s%s",
            self._id,
            self._current.id or "-",
            call.endpoint,
            record.finish_reason,
            record.prompt_tokens,
            record.cached_tokens,
            record.completion_tokens,
            "-" if record.queue_s is None else f"{record.queue_s:.3f} s",
            "-" if first is None else f"{first - call.received:.3f} s",
            now - call.received,
            f", key: {call.key}" if call.key else "",
            extra=self._current.log_fields(),
        )

    def _leave(self) -> None:
        self._state = _State.OVER
        self._context.live.remove(self._id, self)
        self._submission = None  # it holds its listener: no cycle for the garbage collector

"""The sequences of a request: one for each choice of each prompt. Chat, completions and /generate all make theirs here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from banyan_runtime import wire
from banyan_runtime.config import ServerConfig
from banyan_runtime.front.errors import invalid
from banyan_runtime.front.parsing import shown
from banyan_runtime.front.plan import GenerateRequest, ReasoningStart, ToolUse
from banyan_runtime.front.prepare.constraints import Constraints
from banyan_runtime.front.prepare.prompts import check_ids, fit
from banyan_runtime.front.sampling import SamplingParams
from banyan_runtime.front.text.text import Text

MAX_SEQUENCES: Final = 1024  # choices of all prompts together
MAX_LOGPROBS: Final = 4_000_000  # of all sequences together: 32 MB while they are packed, up to 300 MB in JSON
LEAST_SCORED: Final = 1024  # tokens: a client that set no limit rather hears of the bound than gets an answer that ends before
MAX_ID: Final = 128
MAX_SALT: Final = 1024
_NUMBERS: Final = ("n", "best_of")


@dataclass(frozen=True)
class Served:
    """What is served, and how: all that a plan depends on beside the request."""

    config: ServerConfig
    text: Text
    info: wire.EngineInfo
    constraints: Constraints


@dataclass(frozen=True, slots=True)
class Scores:
    """Which log probabilities are asked for."""

    top: int = -1  # likeliest tokens beside each; -1: none at all
    prompt_from: int = -1  # first prompt position to score; -1: generated tokens alone
    named: tuple[int, ...] = ()  # token ids told beside each, however likely

    def request(self, prompt_tokens: int, max_new_tokens: int) -> wire.LogprobRequest | None:
        """What of it the engine has to do. Nothing comes before a prompt's first token, so that one has no probability."""
        first = max(1, self.prompt_from) if self.top >= 0 <= self.prompt_from else -1
        first = first if first < prompt_tokens else -1
        output = self.top if max_new_tokens > 0 else -1
        if first < 0 and output < 0:
            return None
        top = max(self.top, 0) if first > 0 else 0
        return wire.LogprobRequest(output_top=output, prompt_from=first, prompt_top=top, named=wire.pack_ids(list(self.named)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What the sequences of one request share."""

    param: str  # the field that prompts come from, for errors
    default_max_tokens: int | None  # None: the rest of the context
    stream: bool
    priority: int = 0
    salt: str = ""
    reasoning: ReasoningStart | None = None
    separate_reasoning: bool = True
    stream_reasoning: bool = True
    tools: ToolUse | None = None
    constraint: wire.Constraint | None = None


def sequences(
    served: Served, frame: Frame, ids: list[int], params: SamplingParams, *, seed_id: str, scores: Scores = Scores(), interval: int = 0
) -> list[GenerateRequest]:
    """One for each choice of one prompt. `interval`: the request's own tokens per streamed delta.

    Raises ApiError for a prompt without tokens, for ids outside the vocabulary and for what does not fit into the context.
    """
    config, info = served.config, served.info
    if not ids:
        raise invalid(frame.param, f"Prompt cannot be empty: '{frame.param}' makes no tokens.", "empty_array")
    check_ids(ids, info, frame.param)
    limit, default = params.max_tokens_name, frame.default_max_tokens
    max_new = fit(len(ids), params.max_tokens, default, info, frame.param, limit=limit)
    packed = wire.pack_ids(ids)
    logprobs = scores.request(len(ids), max_new)
    late = frame.reasoning in ("reasoning", "optional")  # the client's stop tokens count behind that, which the engine cannot see
    stop_ids = tuple(set(params.stop_token_ids).difference(params.end_ids)) if late else ()
    return [
        GenerateRequest(
            token_ids=packed,
            sampling=params.sampling(max_new, seed_id, config.random_seed, index, ends_alone=late),
            logprobs=logprobs,
            stops=params.stops,
            stop_ids=stop_ids,
            include_stop=params.include_stop,
            skip_special_tokens=params.skip_special_tokens,
            reasoning=frame.reasoning,
            separate_reasoning=frame.separate_reasoning,
            stream_reasoning=frame.stream_reasoning,
            tools=frame.tools,
            constraint=frame.constraint,
            stream_interval=(interval or config.stream_interval) if frame.stream else 0,
            priority=frame.priority,
            salt=frame.salt,
            param=frame.param,
            told_tokens=0 if index else None,
        )
        for index in range(params.n)
    ]


def check_sequences(prompts: int, choices: int) -> None:
    """Raises ApiError for more sequences than one request may have."""
    if prompts * choices > MAX_SEQUENCES:
        message = f"at most {MAX_SEQUENCES} choices of all prompts together are allowed, got {prompts} x {choices}."
        raise invalid("n", message, "integer_above_max_value")


def check_room(info: wire.EngineInfo, requests: Sequence[GenerateRequest], param: str) -> None:
    """Raises ApiError for more sequences in one request than the server takes at once, however idle it is. `param`: the field that
    asks for so many."""
    number, most = sum(request.computed for request in requests), info.most_requests
    if number > most:
        message = (
            f"'{param}' asks for {number} sequences; this server takes at most {most} at once (--max-running-requests "
            f"{info.max_running_requests}, --max-queued-requests {info.max_queued_requests}). Ask for fewer, or send several requests."
        )
        raise invalid(param, message, "integer_above_max_value" if param in _NUMBERS else "array_above_max_length")


def within_logprobs(requests: Sequence[GenerateRequest]) -> Sequence[GenerateRequest]:
    """The requests of a client that set no limit to their tokens, each with as many at most as one answer can hold the log probabilities
    of. They are as they were where that would be fewer than LEAST_SCORED, or than a request's min_tokens."""
    most = _most_scored(requests)
    if most is None or most < max(LEAST_SCORED, *(request.sampling.min_new_tokens for request in requests)):
        return requests
    replace = msgspec.structs.replace
    return [
        replace(request, sampling=replace(request.sampling, max_new_tokens=min(request.sampling.max_new_tokens, most)))
        for request in requests
    ]


def check_logprobs(requests: Sequence[GenerateRequest], param: str, limit: str) -> None:
    """Raises ApiError for more log probabilities than one answer can hold. `param`: the field that says how many for each token; `limit`:
    the one that says how many tokens."""
    cells = sum(_cells_of_prompt(request) + _cells_each(request) * request.sampling.max_new_tokens for request in requests)
    if cells > MAX_LOGPROBS:
        most = _most_scored(requests) or 0
        fewer = f"Set {limit} to at most {most}, ask" if most > 0 else "Ask"
        message = (
            f"The answer could have {cells} log probabilities, of all choices together; at most {MAX_LOGPROBS} are allowed. "
            f"{fewer} for a lower {param}, fewer prompts or choices, or send several requests."
        )
        raise invalid(param, message, "integer_above_max_value", beside=[limit])


def _most_scored(requests: Sequence[GenerateRequest]) -> int | None:
    """How many tokens each of them may have, for the log probabilities of all to fit into one answer; None: however many."""
    each = sum(map(_cells_each, requests))
    return (MAX_LOGPROBS - sum(map(_cells_of_prompt, requests))) // each if each else None


def _cells_each(request: GenerateRequest) -> int:
    """Log probabilities of each token that is generated."""
    asked = request.logprobs
    return 0 if asked is None or asked.output_top < 0 else 1 + asked.output_top + len(asked.named) // 4


def _cells_of_prompt(request: GenerateRequest) -> int:
    asked = request.logprobs
    if asked is None or asked.prompt_from <= 0:
        return 0
    return (1 + asked.prompt_top + len(asked.named) // 4) * (request.prompt_tokens - asked.prompt_from)


def check_id(request_id: str, param: str) -> None:
    """Raises ApiError for an id of a client's own that cannot be written into logs and answers."""
    if len(request_id) > MAX_ID or not request_id.isprintable():
        raise invalid(param, f"{param} must be at most {MAX_ID} printable characters.")


def priority_of(given: int | None) -> int:
    """Higher goes first; below 0 is background, which runs in what online requests leave. Raises ApiError for a priority out of the
    range that there is."""
    if given is not None and abs(given) > wire.PRIORITY_AT_MOST:
        message = f"priority must be in [{-wire.PRIORITY_AT_MOST}, {wire.PRIORITY_AT_MOST}], got {shown(given)}."
        raise invalid("priority", message)
    return given or 0

"""What becomes of an HTTP request before anything runs: checked, rendered, tokenized, and turned into plain data.

A plan is made by a pure function from (endpoint, body) in a process beside the event loop (`prepare/`), because parsing,
templates and tokenizers take milliseconds to seconds and hold Python's lock. It crosses back as msgpack. Chat, completions
and /generate each plan `GenerateRequest`s; the one path of `generation.py` runs them, and the endpoint's writer makes the
answer from the rest of its plan.
"""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from banyan_runtime import wire

ReasoningStart = Literal["reasoning", "optional", "content"]
"""Where an output begins: inside reasoning, before it, or behind it."""


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate, ready for the engine."""

    token_ids: bytes  # wire.pack_ids of the prompt
    sampling: wire.Sampling  # max_new_tokens 0 and no logprobs: the prompt alone is answered, without the engine
    logprobs: wire.LogprobRequest | None = None
    stops: tuple[str, ...] = ()
    include_stop: bool = False  # keep the stop string or stop token in the text
    skip_special_tokens: bool = True
    reasoning: ReasoningStart | None = None  # None: the text is passed on as it is
    stream_reasoning: bool = True
    stream_interval: int = 0  # tokens per delta; 0: as many as have come
    priority: int = 0
    salt: str = ""
    param: str = "prompt"  # the request's field that the prompt came from, for errors

    @property
    def prompt_tokens(self) -> int:
        return len(self.token_ids) // 4


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """What an OpenAI answer says, and how it is sent, whatever is generated."""

    model: str  # as the client wrote it, or the canonical name
    own_id: str | None = None  # the client's rid, without prefix
    own_id_param: str = "rid"
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    ignored: tuple[str, ...] = ()  # fields without effect, for X-Banyan-Ignored


class _OpenAiPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What chat completions and completions have in common."""

    envelope: Envelope
    requests: tuple[GenerateRequest, ...]  # choice by choice; of several prompts, all choices of the first come first
    choices_per_prompt: int
    top_logprobs: int  # likeliest tokens shown beside each token; -1: no logprobs in the answer


class ChatPlan(_OpenAiPlan, frozen=True, kw_only=True, tag="chat"):
    include_reasoning: bool
    turn_end: tuple[int, ...] = ()  # tokens that end a turn in the chat template, which the front does not read


class CompletionPlan(_OpenAiPlan, frozen=True, kw_only=True, tag="completion"):
    echoes: tuple[str, ...]  # the prompt's text, a choice each; "" without echo
    echo_logprobs: bool  # whether the prompt's tokens have logprobs too


class NativePlan(msgspec.Struct, frozen=True, kw_only=True, tag="native"):
    """/generate."""

    requests: tuple[GenerateRequest, ...]
    rids: tuple[str | None, ...]  # the client's, one for each request: choices of one prompt share theirs
    group_rid: str | None = None  # the client's for the whole list, where `rids` are made of it
    listed: bool  # the answer is a list
    stream: bool
    top_logprobs: tuple[int, ...]  # by request; -1: return_logprob is off
    logprobs_from: tuple[int, ...]  # by request: first prompt position told of, itself without a probability; -1: output alone
    text_in_logprobs: bool  # return_text_in_logprobs
    ignored: tuple[str, ...] = ()  # as in the other plans


class AnswerPlan(msgspec.Struct, frozen=True, kw_only=True, tag="answer"):
    """A JSON body that is complete without the engine (/tokenize, /detokenize)."""

    body: bytes
    ignored: tuple[str, ...] = ()


class RefusalPlan(msgspec.Struct, frozen=True, kw_only=True, tag="refusal"):
    """An error for the client, as `errors.ApiError`."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    headers: dict[str, str] = {}


Plan = ChatPlan | CompletionPlan | NativePlan | AnswerPlan | RefusalPlan

Endpoint = Literal["chat", "completions", "generate", "tokenize", "detokenize"]


class Preparer(Protocol):
    """Makes plans beside the event loop."""

    async def plan(self, endpoint: Endpoint, body: bytes | bytearray, request_id: str) -> Plan:
        """The plan of one request. `request_id` seeds the sampling of a request that brings neither a seed nor an id.

        Raises ApiError (never returns a RefusalPlan), also when it takes too long; the event loop is never held up meanwhile.
        """
        ...

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


class ToolUse(msgspec.Struct, frozen=True, kw_only=True):
    """How an output's calls of tools are read."""

    format: str  # in which they are written: a name of `chat.tools.registry`, or "" for a JSON array
    schemas: bytes  # JSON: of each tool's name the schema of its parameters
    limited: bool = False  # calls of tools that are not in `schemas` are text
    parallel: bool = True  # False: the output ends with its first call
    required: bool = False  # the output can be nothing but calls: what is no whole one at its end is dropped
    calls_before: int = 0  # in the conversation so far: some formats number them


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate, ready for the engine."""

    token_ids: bytes  # wire.pack_ids of the prompt
    sampling: wire.Sampling  # max_new_tokens 0 and no logprobs: the prompt alone is answered, without the engine
    logprobs: wire.LogprobRequest | None = None
    stops: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()  # tokens that end it behind its reasoning, of which the engine knows nothing
    include_stop: bool = False  # keep the stop string or stop token in the text
    skip_special_tokens: bool = True
    reasoning: ReasoningStart | None = None  # None: nobody looks for reasoning
    separate_reasoning: bool = True  # False: it stays in the content, with its markers
    tools: ToolUse | None = None  # None: calls of tools are passed on as the text they are
    constraint: wire.Constraint | None = None
    stream_reasoning: bool = True
    stream_interval: int = 0  # tokens per delta; 0 and 1: as many as have come
    priority: int = 0
    salt: str = ""
    param: str = "prompt"  # the request's field that the prompt came from, for errors
    pooling: int = 0  # of wire.POOLINGS: a vector is wanted and no token; 0: none
    told_tokens: int | None = None  # of its prompt's, those that usage counts for it: each prompt once, with its first choice; None: all

    @property
    def prompt_tokens(self) -> int:
        return len(self.token_ids) // 4

    @property
    def computed(self) -> bool:
        """Whether the engine has anything to do."""
        scored = self.logprobs is not None and self.logprobs.prompt_from > 0
        return self.sampling.max_new_tokens > 0 or scored or self.pooling > 0


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """What an OpenAI answer says, and how it is sent, whatever is generated."""

    model: str  # as the client wrote it, or the canonical name
    own_id: str | None = None  # the client's rid, without prefix
    own_id_param: str = "rid"
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    ignored: tuple[str, ...] = ()  # fields without effect, for X-Banyan-Ignored
    tier: str | None = None  # service_tier


class _OpenAiPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What chat completions and completions have in common."""

    envelope: Envelope
    requests: tuple[GenerateRequest, ...]  # choice by choice; of several prompts, all choices of the first come first
    choices_per_prompt: int
    top_logprobs: int  # likeliest tokens shown beside each token; -1: no logprobs in the answer
    tokens_as_ids: bool = False  # in its logprobs tokens are written as token_id:123


class ChatPlan(_OpenAiPlan, frozen=True, kw_only=True, tag="chat"):
    include_reasoning: bool
    turn_end: tuple[int, ...] = ()  # tokens that end a turn in the chat template, which the front does not read
    unshown: tuple[str, ...] = ()  # fields that the model is shown nothing of, or not held to: they are among those ignored


class Called(msgspec.Struct, frozen=True, kw_only=True):
    """How a response tells of the calls of a tool."""

    kind: str  # the tool's type
    name: str
    namespace: str | None = None


class ResponsePlan(ChatPlan, frozen=True, kw_only=True, tag="response"):
    """/v1/responses: a chat completion of one choice, told in items. JSON is kept as bytes, which nobody reads but the client."""

    id: str
    settings: bytes  # JSON object: what the answer repeats of the request
    items: bytes  # JSON array: the request's input items
    messages: bytes  # JSON array: the conversation, with this input and without instructions
    store: bool
    background: bool
    previous: str | None
    called: dict[str, Called] = {}  # by the name that the model knows a tool by; the others are plain functions


class CompletionPlan(_OpenAiPlan, frozen=True, kw_only=True, tag="completion"):
    echoes: tuple[str, ...]  # the prompt's text, a choice each; "" without echo
    echo_logprobs: bool  # whether the prompt's tokens have logprobs too
    kept: int = 0  # choices of each prompt that the answer has: the likeliest ones, where more are generated; 0: all


class NativePlan(msgspec.Struct, frozen=True, kw_only=True, tag="native"):
    """/generate."""

    requests: tuple[GenerateRequest, ...]
    rids: tuple[str | None, ...]  # the client's, one for each request: choices of one prompt share theirs
    group_rid: str | None = None  # the client's for the whole list, where `rids` are made of it
    listed: bool  # the answer is a list
    stream: bool
    top_logprobs: tuple[int, ...]  # by request; -1: return_logprob is off
    named: tuple[int, ...]  # by request: tokens whose log probabilities are told beside each one, by name
    logprobs_from: tuple[int, ...]  # by request: first prompt position told of, itself without a probability; -1: output alone
    text_in_logprobs: bool  # return_text_in_logprobs
    ignored: tuple[str, ...] = ()  # as in the other plans


class PooledPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What the endpoints have in common that answer with numbers instead of text."""

    envelope: Envelope
    requests: tuple[GenerateRequest, ...]


class EmbeddingPlan(PooledPlan, frozen=True, kw_only=True, tag="embedding"):
    dimensions: int = 0  # of each vector, the first ones; 0: all
    base64: bool = False


class ScorePlan(PooledPlan, frozen=True, kw_only=True, tag="score"):
    """/v1/score by similarity."""

    pairs: tuple[tuple[int, int], ...]  # of requests that are compared


class LabelScorePlan(PooledPlan, frozen=True, kw_only=True, tag="labels"):
    """/v1/score by the probabilities of label tokens. Each request is a prompt with one label behind it, whose probability is
    wanted; those of an item follow one another."""

    labels: int  # of each item
    softmax: bool  # over the labels instead of the vocabulary
    temperature: float


class RerankPlan(PooledPlan, frozen=True, kw_only=True, tag="rerank"):
    """The first request is the query, the others are documents."""

    top_n: int
    documents: tuple[bytes, ...] = ()  # JSON, where they are returned


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


Generating = ChatPlan | ResponsePlan | CompletionPlan | NativePlan
Plan = Generating | EmbeddingPlan | ScorePlan | LabelScorePlan | RerankPlan | AnswerPlan | RefusalPlan

Endpoint = Literal[
    "chat", "responses", "previous", "input_tokens", "messages", "count_tokens", "completions", "generate", "tokenize", "detokenize",
    "embeddings", "score", "rerank",
]  # fmt: skip


class Preparer(Protocol):
    """Makes plans beside the event loop."""

    async def plan(self, endpoint: Endpoint, body: bytes | bytearray, request_id: str) -> Plan:
        """The plan of one request. `request_id` seeds the sampling of a request that brings neither a seed nor an id.

        Raises ApiError (never returns a RefusalPlan), also when it takes too long; the event loop is never held up meanwhile.
        """
        ...

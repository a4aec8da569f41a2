"""The messages between the front process (HTTP and text) and the engine process (scheduling and model).

What both sides import, with `link.py`, which carries it. Messages are msgspec structs, sent as msgpack over one Unix socket
in a private folder; nothing is ever pickled. Token ids travel as little-endian int32 bytes, because (measured) a
100,000-token prompt then costs 0.02 ms to decode instead of 15 ms. One `StepOutput` carries a whole step's tokens.
"""

from __future__ import annotations

import enum
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]
_INT32: Final = np.dtype("<i4")
POOLINGS: Final = {"last": 1, "mean": 2, "cls": 3}  # `Submit.pooling` by name: the values of step.Pooling
CLIENT_BITS: Final = 40  # ids of requests, and numbers of what is asked, are below this in each client's own range: `client_of`
PRIORITY_AT_MOST: Final = 1000  # and -1000 at least: levels enough for everybody, few enough to look at all of them in a turn


def pack_ids(ids: TokenIds | list[int]) -> bytes:
    """Token ids as little-endian int32 bytes."""
    return np.asarray(ids, dtype=_INT32).tobytes()


def unpack_ids(raw: bytes) -> TokenIds:
    """The inverse of `pack_ids`: int32[len(raw) / 4], read-only."""
    return np.frombuffer(raw, dtype=_INT32)


def client_of(number: int) -> int:
    """Which of an engine's clients gave this id to a request, or this number to what it asks: 0 is the first API process."""
    return number >> CLIENT_BITS


def pack_floats(values: list[float]) -> bytes:
    """Numbers as little-endian float32 bytes."""
    return np.asarray(values, dtype="<f4").tobytes()


class FinishCode(enum.IntEnum):
    """Why the engine stopped a request by itself."""

    STOP = 1  # the last token is one of the request's stop_token_ids
    LENGTH = 2  # max_new_tokens reached, or the context is full
    ABORT = 3  # the front asked for it
    COMPLETE = 4  # its grammar is complete: nothing may follow, not even a stop token is needed


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How one request is sampled. The front has validated every field and filled in every default."""

    max_new_tokens: int  # 0: the prompt is computed (and scored, where asked), nothing is generated
    min_new_tokens: int = 0
    temperature: float = 1.0  # below 1e-6: greedy, the filters are off
    top_k: int = -1  # -1: all
    top_p: float = 1.0  # (0, 1]
    min_p: float = 0.0  # [0, 1]
    frequency_penalty: float = 0.0  # [-2, 2]; counts generated tokens
    presence_penalty: float = 0.0  # [-2, 2]; counts generated tokens
    repetition_penalty: float = 1.0  # (0, 2]; counts prompt and generated tokens
    seed: int = 0  # uint64; always set: the noise is a function of (seed, position, token id)
    stop_token_ids: tuple[int, ...] = ()  # already united with the EOS set, unless the request ignores EOS
    bias_ids: bytes = b""  # pack_ids: tokens whose logits are raised or lowered
    bias_values: bytes = b""  # little-endian float32, one for each


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """A language that an output must be of."""

    kind: str  # the notation: json_schema, json_object, regex, choice, ebnf, lark, ...
    text: str
    whitespace: str = "bounded"  # between the parts of JSON: "bounded" (at most one blank run in a gap) | "any" | "none"


class Constraint(msgspec.Struct, frozen=True, array_like=True):
    """What a request's output must be, and from where on."""

    grammar: Grammar
    after: int = -1  # the token behind which it begins (the end of reasoning); -1: at once
    opens: int = -1  # with `after`: the token with which an output may begin, and has then reasoning up to `after`; one that begins
    # otherwise is bound from its first token. -1: the reasoning has begun in the prompt.
    param: str = ""  # the client's field that it came from, for errors; and what was written there
    what: str = "schema"
    name: str = ""  # of a schema
    kind: str = ""  # of the grammar that was asked for, where it is a part of this one


class LogprobRequest(msgspec.Struct, frozen=True, array_like=True):
    """Which log probabilities a request wants. Each comes with that of the token itself and those of the likeliest ones."""

    output_top: int = -1  # likeliest tokens beside each generated one; -1: nothing about generated tokens
    prompt_from: int = -1  # first prompt position to score, >= 1 (nothing comes before position 0); -1: none
    prompt_top: int = 0  # likeliest tokens beside each scored prompt token
    named: bytes = b""  # pack_ids: further tokens beside each of them all, told last and in this order


# --- front -> engine ---


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """One sequence to generate. Of n > 1 choices each is a Submit of its own; the prefix cache shares their prompt."""

    id: int  # unique among live requests; strings (rid) stay in the front
    token_ids: bytes  # pack_ids of the prompt, at least one token
    sampling: Sampling
    priority: int = 0  # higher first, up to PRIORITY_AT_MOST either way; below 0: background, which runs in what online requests leave
    salt: str = ""  # requests of different salts never share cached prefixes
    prefix_ids: bytes = b""  # what the prefix cache compares instead of token_ids, as many ids (images: a hash in place of placeholders)
    logprobs: LogprobRequest | None = None
    held: bool = False  # waits for its `Proceed`, and holds nobody up meanwhile
    constraint: Constraint | None = None  # the engine holds the request until its grammar is compiled
    pooling: int = 0  # of step.Pooling: a vector is wanted instead of tokens


class Proceed(msgspec.Struct, frozen=True, tag="proceed"):
    """What a held request waited for is there: it joins the queue at the place of its arrival. Unknown ids are ignored."""

    id: int


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End this request at once, in whatever phase it is. Unknown ids are ignored: it may just have finished."""

    id: int


class Flush(msgspec.Struct, frozen=True, tag="flush"):
    """Empty the prefix cache. Answered by `Flushed`; refused while any request runs or waits."""

    seq: int


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Answered by `Pong` from the engine's own loop, so an old Pong means that the loop hangs."""

    seq: int


class Join(msgspec.Struct, frozen=True, tag="join"):
    """Another API process is to be heard from now on, over the socket that comes with this message. The first one alone says so, never
    one number twice."""

    client: int


class Left(msgspec.Struct, frozen=True, tag="left"):
    """What a client had asked for is to be aborted: it is gone."""

    client: int


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Leave the loop and exit 0. The front drains first; what still runs is dropped."""


FrontMessage = Submit | Proceed | Abort | Flush | Ping | Join | Left | Shutdown

# --- engine -> front ---


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine found out while it started; constant afterwards."""

    architecture: str  # for example Qwen2ForCausalLM
    model_type: str
    dtype: str  # for example bfloat16
    device: str
    attention_backend: str
    vocab_size: int
    context_len: int  # tokens, prompt and output together, that the model is served with
    max_model_len: int  # tokens of the longest sequence that can really run: context_len, or what the KV pool holds
    page_size: int
    max_total_tokens: int  # KV pool, tokens
    max_req_input_len: int  # tokens of the longest prompt; what is generated must fit beside it into max_model_len
    max_running_requests: int
    max_queued_requests: int = 10_000  # that may wait, and as many of background
    max_queued_tokens: int = 16 << 20  # of their prompts, likewise
    weights_bytes: int
    kv_bytes: int
    available_bytes: int = 0  # free device (or host) memory after everything was allocated
    graph_bytes: int = 0  # of captured CUDA graphs
    batch_invariant: bool = False  # whether greedy text does not depend on what else runs
    features: tuple[str, ...] = ()  # of step.Feature
    phase_seconds: dict[str, float] = {}
    software: dict[str, str] = {}  # versions of what computes: torch, cuda, flashinfer; "" for what is not there

    @property
    def most_requests(self) -> int:
        """That may be there at once, running and waiting; those of background are counted apart."""
        return self.max_running_requests + self.max_queued_requests


class StartupProgress(msgspec.Struct, frozen=True, tag="startup"):
    """Start-up progress, before `Ready`."""

    name: str  # downloading | loading | warming
    percent: int  # 0..100 of this phase
    detail: str = ""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    info: EngineInfo


class Finish(msgspec.Struct, frozen=True, array_like=True):
    """The end of one request. Times are seconds on the engine's monotonic clock, as durations."""

    id: int
    code: FinishCode
    cached_tokens: int  # prompt tokens that came from the prefix cache at first admission
    queue_s: float | None  # received -> first admitted; None: it never was
    prefill_s: float | None  # first admitted -> first token; None: there was none
    retractions: int


class LogprobColumns(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities of N tokens, and of the `width` likeliest ones beside each (its request may have asked for fewer)."""

    values: bytes  # float32 [N]
    width: int
    top_ids: bytes  # int32 [N, width], likeliest first
    top_values: bytes  # float32 [N, width]


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities of consecutive prompt tokens of one request; one message for each chunk of its prompt."""

    id: int
    start: int  # position of the first token scored
    columns: LogprobColumns


class Vector(msgspec.Struct, frozen=True, array_like=True):
    """The pooled vector of one request (embeddings)."""

    id: int
    values: bytes  # float32 [hidden_size]


class StepOutput(msgspec.Struct, frozen=True, tag="step"):
    """What one step produced. Request `ids[i]` got `counts[i]` of the tokens (one each where `counts` is empty), which lie one
    after another in `token_ids`; an id occurs at most once.

    A request that ends appears in `finished`, in the same message as its last token (or alone, when aborted).
    """

    ids: list[int]
    token_ids: bytes  # pack_ids
    finished: list[Finish] = []
    counts: list[int] = []
    scored: bytes = b""  # int32: which of the tokens have log probabilities, indices in token_ids, ascending
    logprobs: LogprobColumns | None = None  # of the scored tokens
    prompt_logprobs: list[PromptLogprobs] = []
    vectors: list[Vector] = []


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """One request cannot go on; all others do. `code` is a row of the HTTP error table (queue_full, kv_exhausted,
    context_length_exceeded, internal_error, ...)."""

    id: int
    code: str
    message: str
    again_s: float = 0.0  # in which it may be tried again; 0: as its code says


LATENCY_BUCKETS: Final = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
STEP_SECONDS_BUCKETS: Final = (
    0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5,
    1.0, 2.5, 5.0, 10.0, 40.0,
)  # fmt: skip
STEP_TOKENS_BUCKETS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000)


SCHEDULER_STAGES: Final = ("recv", "schedule", "launch", "wait_device", "output", "idle")


class HistogramCounts(msgspec.Struct):
    """A histogram without labels: `counts` has one cell per bucket and one for +Inf, not cumulative."""

    counts: list[int]
    sum: float = 0.0


class StepStats(msgspec.Struct):
    """Counters of one kind of step."""

    steps: int
    seconds: HistogramCounts  # over STEP_SECONDS_BUCKETS
    tokens: HistogramCounts  # over STEP_TOKENS_BUCKETS
    replayed: int = 0  # steps that a captured graph computed


class Stats(msgspec.Struct, tag="stats", kw_only=True):
    """A snapshot for /metrics and /livez. Counters are totals since the engine started."""

    running: int
    waiting: int
    background_running: int = 0  # those of `running` with a priority below 0
    background_waiting: int = 0
    retracted: int = 0  # those of `waiting` that have run before
    held: int  # wait for something other than memory
    queued_tokens: int = 0  # prompt tokens of those that wait and were never admitted
    kv_used: int  # tokens held by running requests (locked or private)
    kv_evictable: int
    kv_free: int
    last_step_unix: float
    prompt_tokens_computed: int
    prompt_tokens_cached: int
    generation_tokens: int
    preemptions: int
    preempted_tokens: int
    out_of_memory_steps: int = 0  # that the device had no memory for
    evicted_tokens: int
    gen_throughput: float  # tokens/s of the last decode log line; 0 while nobody asks for anything
    draft_tokens: int = 0  # guesses that were computed
    draft_tokens_accepted: int = 0  # those of them that were right
    prefill: StepStats
    decode: StepStats
    cpu_seconds: float
    resident_bytes: int
    grammar_seconds: HistogramCounts | None = None  # from a request with a grammar to its automaton, over LATENCY_BUCKETS
    scheduler_seconds: list[float] = []  # what the loop spent its time on, by SCHEDULER_STAGES; empty where nobody looks


class Flushed(msgspec.Struct, frozen=True, tag="flushed"):
    seq: int
    ok: bool


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    seq: int


class Fatal(msgspec.Struct, frozen=True, tag="fatal"):
    """The engine is about to exit. `exit_code` is the one the server should end with: 64 bad configuration, 65 bad model
    files, 70 internal. The others are those of a UserError."""

    message: str
    exit_code: int
    code: str
    field: str = ""
    value: str = ""


EngineMessage = StartupProgress | Ready | StepOutput | Failed | Stats | Flushed | Pong | Fatal

_encoder = msgspec.msgpack.Encoder()
_front_decoder = msgspec.msgpack.Decoder(FrontMessage)
_engine_decoder = msgspec.msgpack.Decoder(EngineMessage)


def encode(message: FrontMessage | EngineMessage) -> bytes:
    return _encoder.encode(message)


def decode_front(raw: bytes | memoryview) -> FrontMessage:
    """Decode what the front sent (used by the engine)."""
    message: FrontMessage = _front_decoder.decode(raw)
    return message


def decode_engine(raw: bytes | memoryview) -> EngineMessage:
    """Decode what the engine sent (used by the front)."""
    message: EngineMessage = _engine_decoder.decode(raw)
    return message

"""The seam between the engine (decides) and the model (computes): one `Step` in, one `StepResult` out.

Plain numpy on both sides, so the engine runs without torch (tests drive it with a fake model on a fake clock) and the
model without the engine (parity tests build steps by hand). A step says everything by value: nothing in it is edited after
it was launched, and what a runner keeps between steps (the slot table, token counts, last tokens) it can build from the
steps alone. So a device, another process or a C++ library can follow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

import numpy as np
import numpy.typing as npt

I8 = npt.NDArray[np.int8]
I32 = npt.NDArray[np.int32]
U32 = npt.NDArray[np.uint32]
F32 = npt.NDArray[np.float32]
U64 = npt.NDArray[np.uint64]
Bool = npt.NDArray[np.bool_]

PADDING_SLOT: Final = 0
"""KV slot 0 belongs to nobody: padded rows of a captured graph write there."""

MOST_GUESSES: Final = 768
"""Drafts of a step, of all its sequences together: a token is drawn behind each, and their logits take memory."""

Feature = Literal["bias", "mask", "pooling", "drafts", "embeddings", "adapters"]
"""What a step may ask for that not every runner has; `RunnerInfo.features` names those it has."""


@dataclass(frozen=True, slots=True)
class Ragged:
    """n lists of int32 as two flat arrays: list i is values[offsets[i] : offsets[i + 1]]."""

    values: I32
    offsets: I32  # [n + 1], ascending from 0

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> I32:
        return self.values[self.offsets[index] : self.offsets[index + 1]]


@dataclass(frozen=True, slots=True)
class RowUpdates:
    """What changed in the slot table since the step before, beside what that step wrote itself.

    To be made in this order before the step: table[rows[i], starts[i] : starts[i] + len(slots[i])] = slots[i]. A row's first
    update starts at position 0 when it was given to another request whose beginning is cached; one without cached tokens has
    none. What a row held beyond the positions that a step names is left over and never read.
    """

    rows: I32  # [n]; a row may occur several times
    starts: I32  # [n] positions
    slots: Ragged  # n lists of KV slots


@dataclass(frozen=True, slots=True)
class Histories:
    """The tokens that penalties of some rows count, given once: with the first step that samples for a row after its admission.

    From then on the runner counts the tokens that it samples for the row itself, until the row gets another history.
    """

    rows: I32  # [n]
    tokens: Ragged  # n lists: prompt, then output so far
    prompt_lens: I32  # [n] how many of them are prompt


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """One cell per sequence of the step; the meaning of the fields is that of `wire.Sampling`.

    The same object comes with every step over the same rows in the same order, so a device need not be sent it again.
    """

    temperature: F32
    top_k: I32
    top_p: F32
    min_p: F32
    frequency_penalty: F32
    presence_penalty: F32
    repetition_penalty: F32
    seed: U64


@dataclass(frozen=True, slots=True)
class TokenBiases:
    """logit_bias: added to the logits of some token ids, a list for each sequence."""

    ids: Ragged  # B lists
    values: F32  # [len(ids.values)]


@dataclass(frozen=True, slots=True)
class TokenMask:
    """Grammars: the token ids that may come next, as bits. Token t of mask m is allowed if words[m, t // 32] >> (t % 32) & 1."""

    words: U32  # [m, ceil(vocab_size / 32)]
    masks: I32  # [B] which mask a sequence obeys; -1: none


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Positions of the step at which the log probability of the prompt's next token is wanted."""

    at: I32  # [P] index among the step's T tokens, ascending
    targets: I32  # [P] the token that follows in the prompt
    top: I32  # [P] likeliest tokens wanted beside it, >= 0


@dataclass(frozen=True, slots=True)
class InputEmbeddings:
    """Vectors that stand in for the embeddings of some tokens (images)."""

    at: I32  # [E] index among the step's T tokens
    values: F32  # [E, hidden_size]


class Pooling:
    """Values of `Step.pooling`: which vector of a sequence is wanted, made of hidden states that are normalised as for the head.

    A sequence has the same value in all steps that its prompt is computed in. Each of these steps gives a vector over what was
    computed so far; the first begins at position 0, unless the last token's is wanted.
    """

    NONE: Final = 0
    LAST: Final = 1  # the last token's
    MEAN: Final = 2
    CLS: Final = 3  # the first token's


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass over B sequences with T = sum(query_lens) new tokens, laid out one after another.

    Sequence b computes the tokens at positions kv_lens[b] - query_lens[b] ... kv_lens[b] - 1 and attends to its positions
    0 ... kv_lens[b] - 1. Their KV slots are table[rows[b], :kv_lens[b]], where the table is what the runner has built from the
    `updates` of all steps and from what steps write: table[row of token t, positions[t]] = out_slots[t], for every token of
    every step. What lies before a sequence's own tokens was computed by earlier steps, whoever shares it. A prefill
    may start behind a cached prefix, and may end before the prompt does (a chunk), in which case samples[b] is 0.
    Columns that nobody in the step asks for are None.

    Drafts: with samples[b] > 1, in either mode, the last samples[b] - 1 tokens of the sequence are guesses of its text. A token
    is drawn behind each of them too, at that token's own position, with the columns of the sequence as they are: it has no
    penalties, and its banned ids are the same at all these positions. What is drawn behind a wrong guess means nothing, and the
    slots of wrong guesses are written again by later steps. No step with the row is launched before the result is known.

    Late masks: what a grammar admits behind a token that is still in flight is known only when that token is. A decode step may be
    launched before, with `mask_later`: everything is computed up to its logits, and `Handle.draw` says the mask. So may a mixed one,
    whose prompts' masks are said then, too.
    """

    mode: Literal["prefill", "decode", "mixed"]  # prompts; a token each, or guesses behind it; prompts, then a token each
    token_ids: I32  # [T]; negative: the token that the step still in flight samples for this row
    positions: I32  # [T] absolute positions
    out_slots: I32  # [T] KV slot each token writes
    rows: I32  # [B] row of the request, constant while it runs; below the number of rows of `TableShape`
    query_lens: I32  # [B] >= 1
    kv_lens: I32  # [B] tokens in the cache once this step is done
    samples: I32  # [B] how many of the last positions a token is drawn from: 0 (chunk), 1, or more (drafts)
    sampling: SamplingColumns
    updates: RowUpdates | None = None
    histories: Histories | None = None
    banned: Ragged | None = None  # B lists: token ids forbidden in this step (stop ids before min_new_tokens)
    bias: TokenBiases | None = None
    mask: TokenMask | None = None
    mask_later: bool = False  # `Handle.draw` says it
    top_logprobs: I32 | None = None  # [B] likeliest tokens wanted beside the drawn one; -1: no log probabilities at all
    prompt_scores: PromptScores | None = None
    named: I32 | None = None  # [B, A] further tokens wanted beside drawn and scored ones; who wants fewer has them in the last columns
    pooling: I8 | None = None  # [B] of `Pooling`
    embeddings: InputEmbeddings | None = None
    adapters: I32 | None = None  # [B] adapter (LoRA) of each sequence; -1: none
    page_size: int = 1  # slots of a page are consecutive: slot = page * page_size + offset


@dataclass(frozen=True, slots=True)
class TableShape:
    """How large the slot table can become; given to a runner before the first step."""

    rows: int
    positions: int  # context and slack


@dataclass(slots=True)
class TokenLogprobs:
    """Log probabilities of N tokens: log_softmax of the raw logits in fp32, before penalties, bans, masks and temperature.

    A token whose probability rounds to 0 gets a finite, very small number: JSON has no infinity.
    """

    values: F32  # [N] of the tokens themselves
    top_ids: I32  # [N, K + A] likeliest first, equal ones by id; K is the most that any of them asked for. Then those of Step.named
    top_values: F32  # [N, K + A]


@dataclass(slots=True)
class StepResult:
    """The tokens drawn, S = sum(samples) of them, one sequence after another.

    A row with NaN or no admissible logits is marked failed; it fails alone, and its token is -1. So is one whose vector is not
    finite. A row with drafts fails with the first token drawn; another one that cannot be drawn does not count.
    """

    token_ids: I32  # [S]
    failed: Bool  # [B]
    accepted: I32 | None = None  # [B] how many of its drawn tokens count: 1, and those after right drafts; None: all
    logprobs: TokenLogprobs | None = None  # of the drawn tokens of the sequences with top_logprobs >= 0, in the step's order
    prompt_logprobs: TokenLogprobs | None = None  # of prompt_scores
    vectors: F32 | None = None  # [sequences with pooling, hidden_size], not normalised to length 1
    replayed: bool = False  # whether a captured graph computed the step


class OutOfMemory(Exception):
    """The device has no memory for a step. What it says of the slot table has been taken in, and nothing else is known of its sequences:
    no other step may go on with them. Steps launched before it hold, and others may be launched."""


class Handle(Protocol):
    """A launched step."""

    def draw(self, mask: TokenMask | None) -> None:
        """The mask of a step with `mask_later`, whose tokens are drawn now. Called once, before any other step is launched. Raises
        OutOfMemory: the step has no result."""

    def result(self) -> StepResult:
        """Wait for the step and give its tokens. Called once."""


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """What the engine must know of the model it drives."""

    architecture: str
    model_type: str
    vocab_size: int
    context_len: int  # tokens; the model's limit or --context-length
    pool_tokens: int  # KV slots that may be given out, a multiple of the page size; slot 0 comes on top
    dtype: str
    device: str
    attention_backend: str
    weights_bytes: int
    kv_bytes: int
    available_bytes: int  # free device (or host) memory after everything was allocated
    graph_bytes: int = 0  # of captured graphs
    batch_invariant: bool = False  # whether a request's greedy tokens do not depend on what else runs
    features: frozenset[Feature] = frozenset()
    phase_seconds: dict[str, float] = field(default_factory=dict)


class Runner(Protocol):
    """Computes steps. Steps are launched in order, and each is computed as if the one before were done.

    A step that asks for a feature that is not in `info.features` is a mistake of the engine's and raises `UnsupportedStep`.
    One that there is no memory for raises `OutOfMemory`.
    """

    @property
    def info(self) -> RunnerInfo: ...

    def prepare(self, shape: TableShape) -> None:
        """Allocate what depends on the number of rows and warm up: after this no step allocates memory that it keeps."""

    def launch(self, step: Step) -> Handle: ...


class UnsupportedStep(AssertionError):
    """A step asks for what its runner does not have."""


Pulse = Callable[[], None]
"""Called by a runner again and again while it computes a step (at least once a layer), so that whoever watches the process
can tell a long step from one that hangs. Costs next to nothing."""

"""The seam between the engine (decides) and the model (computes): one `Step` in, one `StepResult` out.

Plain numpy on both sides, so the engine runs without torch (tests drive it with a fake model on a fake clock) and the
model without the engine (parity tests build steps by hand).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]
U64 = npt.NDArray[np.uint64]
Bool = npt.NDArray[np.bool_]

PADDING_SLOT = 0
"""KV slot 0 belongs to nobody: padded rows of a captured graph write there."""


@dataclass(frozen=True, slots=True)
class History:
    """The tokens that a row's penalties count. Views into the request's own buffers; read before the step returns."""

    prompt: I32
    output: I32


@dataclass(slots=True)
class SamplingColumns:
    """One cell per sequence of the step; the meaning of the fields is that of `wire.Sampling`."""

    temperature: F32
    top_k: I32
    top_p: F32
    min_p: F32
    frequency_penalty: F32
    presence_penalty: F32
    repetition_penalty: F32
    seed: U64
    histories: list[History | None]  # None where no penalty is on
    banned: list[I32 | None]  # token ids forbidden in this step (stop ids before min_new_tokens)


@dataclass(slots=True)
class Step:
    """One forward pass over B sequences with T = sum(query_lens) new tokens, laid out one after another.

    Sequence b computes the tokens at positions kv_lens[b] - query_lens[b] ... kv_lens[b] - 1 and attends to its positions
    0 ... kv_lens[b] - 1, whose KV slots are table[rows[b], :kv_lens[b]]. A prefill may start behind a cached prefix, and
    may end before the prompt does (a chunk), in which case samples[b] is False.
    """

    mode: Literal["prefill", "decode"]
    token_ids: I32  # [T]; negative: the token that the step still in flight samples for this row
    positions: I32  # [T] absolute positions
    out_slots: I32  # [T] KV slot each token writes; equals table[row, position]
    rows: I32  # [B] row of the request in `table`; constant while the request runs
    query_lens: I32  # [B] >= 1
    kv_lens: I32  # [B] tokens in the cache once this step is done
    samples: Bool  # [B] whether a token is drawn from the last position; its absolute position is kv_lens[b]
    sampling: SamplingColumns
    table: I32  # [max rows, context + slack]: the engine's persistent slot table, not a copy
    page_size: int = 1  # slots of a page are consecutive: slot = page * page_size + offset


@dataclass(slots=True)
class StepResult:
    """The tokens drawn. A row with NaN or no admissible logits is marked failed; it fails alone."""

    token_ids: I32  # [B]; -1 where nothing was sampled
    failed: Bool  # [B]


class Handle(Protocol):
    """A launched step."""

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
    graphs: bool = False  # whether decode steps replay captured graphs
    phase_seconds: dict[str, float] = field(default_factory=dict)


class Runner(Protocol):
    """Computes steps. Steps are launched in order; with one step in flight its table rows may still be read by it."""

    @property
    def info(self) -> RunnerInfo: ...

    def launch(self, step: Step) -> Handle: ...

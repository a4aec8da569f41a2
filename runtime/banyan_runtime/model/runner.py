"""The torch runner: computes steps with the decoder, behind `step.Runner`. It is the reference on every device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from banyan_runtime.model import device as devices
from banyan_runtime.model import edits, logprobs, sampler
from banyan_runtime.model.attention import Attention
from banyan_runtime.model.choice import Choice
from banyan_runtime.model.decoder import Decoder
from banyan_runtime.model.layers import PackedKernels, PlainKernels
from banyan_runtime.model.penalties import Penalties
from banyan_runtime.model.pool import KvPool
from banyan_runtime.model.rope import Rope
from banyan_runtime.model.table import SlotTable
from banyan_runtime.step import Feature, Pulse, RunnerInfo, SamplingColumns, Step, StepResult, TableShape, UnsupportedStep

I64 = npt.NDArray[np.int64]


class TorchModel:
    """Weights in the form that torch computes with. Takes them over."""

    name = "torch"

    def __init__(self, choice: Choice, weights: dict[str, Tensor], pulse: Pulse) -> None:
        self._choice = choice
        self._pulse = pulse
        packed = choice.device.type == "cpu" and PackedKernels.supports(choice.dtype)
        rope = Rope(choice.spec, choice.dtype, choice.device)
        self._decoder = Decoder(choice.spec, weights, PackedKernels(pulse) if packed else PlainKernels(pulse), rope, pulse)

    def runner(self, info: RunnerInfo, page_size: int, report: Callable[[str], None]) -> TorchRunner:
        choice = self._choice
        pool = KvPool(choice.spec, info.pool_tokens, page_size, choice.dtype, choice.device)
        attention = choice.attention(choice.spec, pool, self._pulse)
        info = replace(
            info,
            kv_bytes=pool.bytes,
            available_bytes=devices.available_bytes(choice.device),
            batch_invariant=self._decoder.batch_invariant and attention.batch_invariant,
            features=TorchRunner.FEATURES,
        )
        return TorchRunner(self._decoder, attention, pool, info, report)


class TorchRunner:
    """Computes steps in the order in which they are launched. `report` is told of every row without usable logits."""

    FEATURES: Final[frozenset[Feature]] = frozenset({"bias", "mask"})

    def __init__(self, decoder: Decoder, attention: Attention, pool: KvPool, info: RunnerInfo, report: Callable[[str], None]) -> None:
        self.info = info
        self._report = report
        self._decoder = decoder
        self._attention = attention
        self._pool = pool
        self._rows: _Rows | None = None

    @torch.inference_mode()
    def prepare(self, shape: TableShape) -> None:
        self._decoder.rope.reserve(shape.positions)
        self._rows = _Rows(shape, self.info.vocab_size, self._pool.device)

    @torch.inference_mode()
    def launch(self, step: Step) -> _Launched:
        """Start a step. On the CPU it is done when this returns; on CUDA its kernels are queued."""
        refuse(step, self.info.features)
        rows = self._rows
        assert rows is not None, "prepare comes first"
        rows.table.apply(step)
        if step.histories is not None:
            rows.penalties.begin(step.histories)
        self._attention.plan(step, rows.table)
        hidden = self._decoder.hidden(self._token_ids(step, rows), self._tensor(step.positions), self._attention)
        prompt = None
        if step.prompt_scores is not None:
            prompt = logprobs.of_prompt(hidden, self._decoder.logits, self.info.vocab_size, step.prompt_scores)
        drawn = self._draw(step, rows, hidden) if (picked := np.flatnonzero(step.samples)).size else None
        return _Launched(self._report, self._pool.device, step, picked, drawn, prompt)

    def _draw(self, step: Step, rows: _Rows, hidden: Tensor) -> _Drawn:
        picked = np.flatnonzero(step.samples)
        logits = self._decoder.logits(hidden.index_select(0, self._tensor((np.cumsum(step.query_lens) - 1)[picked])))
        columns = _cells(step.sampling, picked)
        raw = None
        if step.top_logprobs is not None:
            scored = np.flatnonzero(step.top_logprobs[picked] >= 0)
            raw = logprobs.raw(logits.index_select(0, self._tensor(scored)), int(step.top_logprobs.max(initial=0)))
        if step.bias is not None:
            edits.add_biases(logits, step.bias, picked)
        rows.penalties.apply(logits, step.rows[picked], columns)
        if step.banned is not None:
            edits.forbid(logits, step.banned, picked)
        if step.mask is not None:
            edits.allow(logits, step.mask, picked)
        tokens, failed = sampler.sample(logits, columns, step.kv_lens[picked])
        rows.penalties.count(step.rows[picked], tokens)
        rows.latest.index_copy_(0, self._tensor(step.rows[picked]), tokens)
        return _Drawn(tokens, failed, None if raw is None else raw.of(tokens.index_select(0, self._tensor(scored))))

    def _token_ids(self, step: Step, rows: _Rows) -> Tensor:
        """The step's tokens; a negative one is the latest token of its row."""
        ids = self._tensor(step.token_ids)
        if (step.token_ids < 0).any():
            ids = torch.where(ids < 0, rows.latest.index_select(0, self._tensor(np.repeat(step.rows, step.query_lens))), ids)
        return ids

    def _tensor(self, column: npt.NDArray[np.signedinteger]) -> Tensor:
        return devices.tensor(column, self._pool.device)


class _Rows:
    """What is kept between steps, by row of the slot table."""

    def __init__(self, shape: TableShape, vocab_size: int, device: torch.device) -> None:
        self.table = SlotTable(shape)
        self.penalties = Penalties(shape, vocab_size, device)
        # The last token sampled for each row, on the device: a step may be launched before the engine knows the tokens of the
        # step before.
        self.latest = torch.zeros(shape.rows, dtype=torch.int64, device=device)


@dataclass(frozen=True, slots=True)
class _Drawn:
    """Of the sequences that a token is drawn for."""

    tokens: Tensor  # int64 [S]
    failed: Tensor  # bool [S]
    scores: logprobs.Scores | None = None  # of those that asked

    def to_host(self) -> _Drawn:
        scores = None if self.scores is None else self.scores.to_host()
        return _Drawn(self.tokens.to("cpu", non_blocking=True), self.failed.to("cpu", non_blocking=True), scores)


class _Launched:
    """The handle of a step. On CUDA the results travel to the host behind the step's kernels."""

    def __init__(
        self,
        report: Callable[[str], None],
        device: torch.device,
        step: Step,
        picked: I64,
        drawn: _Drawn | None,
        prompt: logprobs.Scores | None,
    ) -> None:
        self._report = report
        self._step = step
        self._picked = picked
        self._drawn = None if drawn is None else drawn.to_host()
        self._prompt = None if prompt is None else prompt.to_host()
        self._done = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

    def result(self) -> StepResult:
        """Wait for the step and give its tokens. Called once."""
        if self._done is not None:
            self._done.synchronize()
        result = StepResult(np.empty(0, dtype=np.int32), np.zeros(len(self._step.rows), dtype=np.bool_))
        if self._prompt is not None:
            result.prompt_logprobs = self._prompt.numpy()
        if self._drawn is not None:
            failed = self._drawn.failed.numpy()
            result.failed[self._picked] = failed
            result.token_ids = np.where(failed, -1, self._drawn.tokens.numpy()).astype(np.int32)
            if self._drawn.scores is not None:
                result.logprobs = self._drawn.scores.numpy()
            for row, length in zip(self._step.rows[result.failed].tolist(), self._step.kv_lens[result.failed].tolist(), strict=True):
                self._report(f"The logits of row {row} at position {length} hold NaN or nothing admissible; its request fails alone.")
        return result


def refuse(step: Step, features: frozenset[Feature]) -> None:
    """Raise `UnsupportedStep` for what the runner does not have."""
    asked: dict[Feature, bool] = {
        "bias": step.bias is not None,
        "mask": step.mask is not None,
        "pooling": step.pooling is not None,
        "drafts": bool((step.samples > 1).any()),
        "embeddings": step.embeddings is not None,
        "adapters": step.adapters is not None,
    }
    for feature, wanted in asked.items():
        if wanted and feature not in features:
            raise UnsupportedStep(feature)


def _cells(columns: SamplingColumns, rows: I64) -> SamplingColumns:
    """The cells of some rows."""
    if len(rows) == len(columns.temperature):
        return columns
    return SamplingColumns(
        temperature=columns.temperature[rows],
        top_k=columns.top_k[rows],
        top_p=columns.top_p[rows],
        min_p=columns.min_p[rows],
        frequency_penalty=columns.frequency_penalty[rows],
        presence_penalty=columns.presence_penalty[rows],
        repetition_penalty=columns.repetition_penalty[rows],
        seed=columns.seed[rows],
    )

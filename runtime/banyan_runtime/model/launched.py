"""Steps on their way: where their tokens are drawn, and the handles behind which their results come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from banyan_runtime.model import device as devices
from banyan_runtime.model import logprobs
from banyan_runtime.model.pooling import Vectors
from banyan_runtime.model.post import Arriving
from banyan_runtime.step import I32, Step, StepResult, TokenMask

I64 = npt.NDArray[np.int64]
Drawing = Callable[[TokenMask | None], "Drawn"]
"""Draws a step's tokens under a mask."""


class Draws:
    """Where the S tokens of a step are drawn."""

    def __init__(self, step: Step) -> None:
        self._of = step.rows, step.query_lens, step.samples
        self._owners: Tensor | None = None
        counts, ends = step.samples, np.cumsum(step.samples)
        self.sequences: I64 = np.repeat(np.arange(len(counts)), counts)  # [S] for which of the step's sequences
        self._behind = (ends[self.sequences] - np.arange(len(self.sequences)) - 1).astype(np.int32)  # how many more are drawn for it
        self.at: I64 = np.cumsum(step.query_lens)[self.sequences] - 1 - self._behind  # [S] behind which of the step's T tokens
        self.firsts: I64 = (ends - counts)[counts > 0]  # where the tokens of each sequence that draws begin
        self.counts: I32 = counts[counts > 0]  # how many they are
        self.drafts = len(self.firsts) < len(self.sequences)  # whether a sequence draws several
        self.one_each = not self.drafts and len(self.sequences) == len(step.token_ids)  # one behind each token: a plain decode step

    def fit(self, step: Step) -> bool:
        """Whether the draws of `step` are these, but for their positions."""
        rows, query_lens, samples = self._of
        return self.one_each and step.rows is rows and step.query_lens is query_lens and step.samples is samples

    def positions(self, step: Step) -> I32:
        """[S] of the tokens drawn."""
        return step.kv_lens if self.one_each else step.kv_lens[self.sequences] - self._behind

    def owners(self, step: Step, device: torch.device) -> Tensor:
        """The rows of those that draw, int64."""
        if self._owners is None:
            self._owners = devices.tensor(step.rows[self.sequences[self.firsts]], device)
        return self._owners


@dataclass(frozen=True, slots=True)
class Drawn:
    """Of the sequences that tokens are drawn for."""

    tokens: Tensor  # int64 [S]
    failed: Tensor  # bool [S]
    accepted: Tensor | None  # int64, one for each sequence: how many of its tokens count; None: the one that it has
    scores: logprobs.Scores | None  # of those that asked
    arriving: Arriving | None = None  # the tokens, and -1 of those that failed, where they are on their way to the host already

    def to_host(self) -> Drawn:
        if self.tokens.device.type == "cpu":
            return self
        there = self.arriving is not None
        return Drawn(
            self.tokens if there else self.tokens.to("cpu", non_blocking=True),
            self.failed if there else self.failed.to("cpu", non_blocking=True),
            None if self.accepted is None else self.accepted.to("cpu", non_blocking=True),
            None if self.scores is None else self.scores.to_host(),
            self.arriving,
        )

    def numbers(self) -> tuple[I32, npt.NDArray[np.bool_]]:
        """When they have arrived: int32 [S] tokens, -1 of those that failed, and which did."""
        if self.arriving is not None:
            tokens = self.arriving()
            return tokens, tokens < 0
        tokens, failed = self.tokens.numpy().astype(np.int32), self.failed.numpy()
        if failed.any():
            tokens[failed] = -1
        return tokens, failed


class Launched:
    """The handle of a step. On CUDA the results travel to the host behind the step's kernels."""

    def __init__(
        self,
        device: torch.device,
        step: Step,
        draws: Draws,
        prompt: logprobs.Scores | None,
        vectors: Vectors | None,
        replayed: bool,
    ) -> None:
        self._device = device
        self._step = step
        self._replayed = replayed
        self._draws = draws
        self._drawn: Drawn | None = None
        self._prompt = None if prompt is None else prompt.to_host()
        self._vectors = None if vectors is None else vectors.to_host()
        self._later: Callable[[TokenMask | None], None] | None = None
        self._plain = False
        self._done: torch.cuda.Event | None = None

    def draws_later(self, draw: Callable[[TokenMask | None], None]) -> None:
        """When its mask is told, by what ends in `arrive`."""
        self._later = draw

    @torch.inference_mode()
    def draw(self, mask: TokenMask | None) -> None:
        draw, self._later = self._later, None
        assert draw is not None, "its tokens are drawn already"
        draw(mask)

    def arrive(self, drawn: Drawn | None) -> None:
        """That is all; on its way."""
        self._drawn = None if drawn is None else drawn.to_host()
        # One token for each row and nothing beside it, as in most steps.
        extras = self._prompt is not None or self._vectors is not None
        self._plain = self._draws.one_each and drawn is not None and drawn.scores is None and not extras
        if self._device.type == "cuda":
            self._done = torch.cuda.current_stream(self._device).record_event()

    def result(self) -> StepResult:
        """Wait for the step and give its tokens. Called once."""
        assert self._later is None, "its tokens are drawn when its mask is told"
        if self._done is not None:
            self._done.synchronize()
        if self._plain:
            return self._one_each()
        result = StepResult(np.empty(0, dtype=np.int32), np.zeros(len(self._step.rows), dtype=np.bool_), replayed=self._replayed)
        if self._prompt is not None:
            result.prompt_logprobs = self._prompt.numpy()
        if self._vectors is not None:
            result.vectors = self._vectors.values.numpy()
            broken = self._vectors.sequences[~np.isfinite(result.vectors).all(axis=1)]
            result.failed[broken] = True
        if self._drawn is not None:
            (tokens, failed), firsts = self._drawn.numbers(), self._draws.firsts
            drawing = self._draws.sequences[firsts]
            result.failed[drawing] = failed[firsts]
            result.token_ids = tokens
            if self._drawn.accepted is not None:
                result.accepted = np.zeros(len(self._step.rows), dtype=np.int32)
                result.accepted[drawing] = self._drawn.accepted.numpy()
            if self._drawn.scores is not None:
                result.logprobs = self._drawn.scores.numpy()
        return result

    def _one_each(self) -> StepResult:
        assert self._drawn is not None
        tokens, failed = self._drawn.numbers()
        return StepResult(tokens, failed, replayed=self._replayed)

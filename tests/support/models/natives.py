"""The native runner of a small model, and the hidden states of its steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch

from banyan_runtime.model.native.forward import NativeForward
from banyan_runtime.model.runner import ModelRunner
from banyan_runtime.step import Step
from tests.support.models.driver import Driver, Request
from tests.support.models.tiny import VOCAB, TinyModel

Models = Callable[[str], TinyModel]
DTYPES: Final = ("float32", "bfloat16")


def native(model: TinyModel, **options: Any) -> ModelRunner:
    runner = model.load(**({"runner": "native"} | options))
    assert isinstance(runner.forward, NativeForward)
    return runner


def some(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


class Listening:
    """Notes the hidden states that each step gives, by the request that its tokens belong to."""

    def __init__(self, runner: ModelRunner) -> None:
        self.states: dict[int, list[torch.Tensor]] = {}
        self._hidden = runner.forward.hidden
        runner.forward.hidden = self._listen  # type: ignore[method-assign]

    def _listen(self, step: Step, *rest: Any) -> torch.Tensor:
        hidden = self._hidden(step, *rest)
        for row, part in zip(step.rows.tolist(), torch.split(hidden, step.query_lens.tolist()), strict=True):
            self.states.setdefault(row, []).append(part.clone())
        return hidden

    def of(self, row: int) -> torch.Tensor:
        return torch.cat(self.states[row])


def states(runner: ModelRunner, requests: list[Request], chunk: int = 1 << 30, context: int = 256) -> Listening:
    heard = Listening(runner)
    Driver(runner, rows=8, context=context).run(requests, chunk)
    return heard

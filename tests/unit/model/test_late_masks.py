"""Grammars over real runners with a step in flight: what is said does not depend on when their masks come."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import numpy as np
import pytest

from banyan_runtime.config import ServerConfig
from banyan_runtime.engine.limits import EngineLimits
from banyan_runtime.engine.loop import Engine
from banyan_runtime.step import Runner
from banyan_runtime.wire import FinishCode, LogprobRequest, Sampling, Submit, pack_ids
from tests.support.models.tiny import DEVICES, VOCAB, TinyModel
from tests.unit.engine.grammars import Rule, Rules, constraint
from tests.unit.engine.outputs import served
from tests.unit.model.test_engine_parity import Watched

pytestmark = pytest.mark.usefixtures("either_runner")


def some_requests() -> list[Submit]:
    random, found = np.random.default_rng(4), []
    wishes = [{}, {"temperature": 0.0}, {"top_p": 0.9, "top_k": 40}, {"repetition_penalty": 1.3}, {"presence_penalty": 1.0}]
    for id in range(24):
        prompt = random.integers(0, VOCAB, int(random.integers(1, 40))).tolist()
        sampling = Sampling(
            max_new_tokens=int(random.integers(1, 30)), min_new_tokens=int(random.choice([0, 0, 5])), seed=int(random.integers(0, 1 << 60)),
            stop_token_ids=tuple(random.integers(0, VOCAB, 3).tolist()), **wishes[id % len(wishes)],
        )  # fmt: skip
        rule = constraint(int(random.integers(0, 1 << 20))) if id % 3 else None
        scores = LogprobRequest(2, -1, 0, b"") if id % 4 == 1 else None
        found.append(Submit(id=id, token_ids=pack_ids(prompt), sampling=sampling, constraint=rule, logprobs=scores))
    return found


def said(runner: Runner, overlap: bool, requests: list[Submit]) -> tuple[dict[int, list[int]], dict[int, object], int]:
    """Tokens and ends by request, and the steps whose masks came later."""
    watched = Watched(runner)
    limits = EngineLimits.of(ServerConfig(model_path="x", max_running_requests=8), runner.info)
    limits = dataclasses.replace(limits, overlap=overlap, pool_tokens=160)  # some are sent back to the queue
    engine = Engine(watched, limits, time.monotonic, lambda line: None, Rules(VOCAB))
    return *served(engine, requests, 2), watched.masked_later


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_said_does_not_depend_on_when_masks_come(tiny_model: Callable[[str], TinyModel], device: str) -> None:
    model, requests = tiny_model("qwen3"), some_requests()
    runs = [said(model.load(device=device, max_total_tokens=160), overlap, requests) for overlap in (False, True)]
    (text, ends, none), (later_text, later_ends, later) = runs
    assert none == 0
    assert later > 20
    assert (later_text, later_ends) == (text, ends) or not model.load(device=device).info.batch_invariant
    for request in requests:
        if request.constraint is None or isinstance(later_ends[request.id], str):
            continue
        rule, tokens = Rule(int(request.constraint.grammar.text), VOCAB), later_text[request.id]
        stopped = later_ends[request.id] is FinishCode.STOP
        assert all(rule.accept(token) for token in tokens[: len(tokens) - stopped])
        assert rule.is_terminated == (later_ends[request.id] is FinishCode.COMPLETE) or stopped
    assert {FinishCode.COMPLETE, FinishCode.LENGTH} <= set(later_ends.values())

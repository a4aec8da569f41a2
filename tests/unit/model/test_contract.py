"""The step's contract, held by every runner there is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from banyan_runtime.config import ServerConfig
from banyan_runtime.model import runners
from banyan_runtime.model.attention.backends import BACKENDS
from banyan_runtime.step import Feature, InputEmbeddings, Runner, Step, TokenBiases, TokenMask, UnsupportedStep
from tests.support.models.contract import Play, Settings, check
from tests.support.models.driver import Driver, Request, ragged
from tests.support.models.tiny import ON_A_GPU, VOCAB, TinyModel, gate, make

Factory = Callable[..., Runner]  # (folder of a model, **options)
GRAPHS: dict[str, Any] = {"cuda_graph_max_tokens": 48, "chunked_prefill_size": 64, "max_running_requests": 8}
"""That are captured in little time. Some prompts go without."""
POISON = VOCAB - 1


def started(name: str, **given: Any) -> Factory:
    def start(folder: Path, **options: Any) -> Runner:
        settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_total_tokens": 2048, "runner": name} | given | options
        if settings["device"] != "cpu":
            settings |= GRAPHS
        return runners.load(ServerConfig(model_path=str(folder), **settings), folder, lambda *_: None)

    return start


# FlashInfer computes neither float32 nor heads as small as these models'.
ON_GPU = [
    pytest.param({"device": "cuda", "attention_backend": name}, id=f"cuda-{name}", marks=ON_A_GPU)
    for name in BACKENDS
    if name != "flashinfer"
]


@pytest.fixture(params=[*runners.RUNNERS, *ON_GPU])
def factory(request: pytest.FixtureRequest) -> Factory:
    return started(request.param) if isinstance(request.param, str) else started("torch", **request.param)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """With a token whose embedding is NaN. Head and embeddings are apart, so only who reads it fails."""
    made = make(tmp_path_factory.mktemp("poisoned"), "qwen3")
    with torch.no_grad():
        made.reference.model.embed_tokens.weight[POISON] = float("nan")
    made.reference.save_pretrained(made.folder)
    return made


@pytest.mark.parametrize("overlap", gate([True, False]))
@pytest.mark.parametrize("page_size", gate([16, 1]))
@pytest.mark.parametrize("seed", gate([2, 3, 7, 10]))
def test_any_schedule_gives_the_texts_and_scores_of_a_plain_computation(
    factory: Factory, model: TinyModel, seed: int, page_size: int, overlap: bool
) -> None:
    play = Play(factory(model.folder, page_size=page_size), Settings(seed, page_size, overlap, poison=POISON))
    play.play()

    @torch.inference_mode()
    def logits(tokens: list[int]) -> torch.Tensor:
        found: torch.Tensor = model.reference(torch.tensor([tokens])).logits[0]
        return found

    for request in play.done:
        assert POISON not in request.prompt
        check(request, logits)
    assert len(play.poisoned) == sum(POISON in request.tokens for request in play.poisoned) > 0
    assert len(play.done) + len(play.poisoned) == play.settings.requests
    assert not unseen(play) - {"accepted", "refused"}, "a play that does not do it proves nothing about it"

    known = {request.seed: request.output for request in [*play.done, *play.poisoned]}
    drafted = Play(factory(model.folder, page_size=page_size), Settings(seed, page_size, overlap, poison=POISON), known)
    drafted.play()
    for request in drafted.done:
        check(request, logits)
        assert request.output == known[request.seed] or not drafted.runner.info.batch_invariant
    assert len(drafted.poisoned) == len(play.poisoned)
    assert not unseen(drafted) & {"accepted", "refused"}, "a play that does not do it proves nothing about it"


def unseen(play: Play) -> set[str]:
    """What a play should have done and did not."""
    happened = {name for name, count in play.events.items() if count}
    never = set() if play.settings.overlap else {"ahead", "later"}
    return set(play.events) - happened - never - {"retracted", "exchanged"}


def one_token(driver: Driver) -> Step:
    return driver.build([(Request([5], new_tokens=1, row=0), 1)])


@pytest.mark.parametrize("feature", get_args(Feature))
def test_what_a_runner_does_not_have_is_refused_without_a_trace(factory: Factory, model: TinyModel, feature: str) -> None:
    runner = factory(model.folder)
    driver = Driver(runner, rows=2, context=64)
    step = one_token(driver)
    asking: dict[str, Step] = {
        "bias": dataclasses.replace(step, bias=TokenBiases(ragged([[1]]), np.ones(1, np.float32))),
        "mask": dataclasses.replace(step, mask=TokenMask(np.full((1, -(-VOCAB // 32)), 0xFFFFFFFF, np.uint32), np.zeros(1, np.int32))),
        "pooling": dataclasses.replace(step, pooling=np.ones(1, np.int8)),
        "drafts": driver.build([(Request([5], new_tokens=2, row=0, drafts=[6]), 1)]),
        "embeddings": dataclasses.replace(step, embeddings=InputEmbeddings(np.zeros(1, np.int32), np.zeros((1, 96), np.float32))),
        "adapters": dataclasses.replace(step, adapters=np.zeros(1, np.int32)),
    }
    expected = runner.launch(step).result().token_ids.tolist()
    if feature in runner.info.features:
        runner.launch(asking[feature]).result()
    else:
        with pytest.raises(UnsupportedStep, match=feature):
            runner.launch(asking[feature])
    assert runner.launch(step).result().token_ids.tolist() == expected


def test_a_row_whose_every_token_is_banned_fails_alone(factory: Factory, model: TinyModel) -> None:
    driver = Driver(factory(model.folder), rows=2, context=64)
    none, some = Request([5, 6], new_tokens=1, row=0, banned=tuple(range(VOCAB))), Request([7, 8, 9], new_tokens=1, row=1)
    step = driver.build([(none, 2), (some, 3)])
    result = driver.runner.launch(step).result()
    assert result.failed.tolist() == [True, False]
    assert result.token_ids[0] == -1
    assert result.token_ids[1] == model.generate([7, 8, 9], 1)[0]


@pytest.mark.parametrize("temperature", gate([0.7, 0.0]))
def test_a_row_that_fails_in_the_middle_keeps_what_it_drew(factory: Factory, model: TinyModel, tmp_path: Path, temperature: float) -> None:
    """And fails alone."""
    lost = Request([5, 6], new_tokens=6, row=0, temperature=temperature, seed=1)
    other = Request([7, 8, 9], new_tokens=6, row=1, temperature=temperature, seed=2)

    def run(runner: Runner) -> list[list[int]]:
        driver = Driver(runner, rows=2, context=64)
        requests = [dataclasses.replace(one, output=[]) for one in (lost, other)]
        driver.step([(request, len(request.prompt)) for request in requests])
        while any(not (request.done or request.failed) for request in requests):
            work = [(request, 1) for request in requests if not (request.done or request.failed)]
            step = driver.build(work)
            pending = driver.advance(work, step)
            driver.settle(pending, driver.runner.launch(step).result())
        return [request.output for request in requests]

    plain = run(factory(model.folder))
    fatal = plain[0][2]
    assert fatal not in [*plain[0][:2], *plain[1], *lost.prompt, *other.prompt], "another seed is needed"
    spoiled = make(tmp_path, "qwen3")
    with torch.no_grad():
        spoiled.reference.model.embed_tokens.weight[fatal] = float("nan")
    spoiled.reference.save_pretrained(spoiled.folder)
    assert run(factory(spoiled.folder)) == [[*plain[0][:3], -1], plain[1]]


def test_a_step_without_sequences_that_sample_gives_no_tokens(factory: Factory, model: TinyModel) -> None:
    driver = Driver(factory(model.folder), rows=1, context=64)
    result = driver.runner.launch(driver.build([(Request([5, 6, 7], new_tokens=1, row=0, top_logprobs=2), 2)])).result()
    assert result.token_ids.tolist() == []
    assert result.failed.tolist() == [False]

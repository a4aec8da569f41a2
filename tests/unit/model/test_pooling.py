"""Vectors equal transformers' hidden states, however their prompts are cut and whatever is computed beside them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from banyan_runtime.config import ServerConfig
from banyan_runtime.errors import ConfigError, ModelError
from banyan_runtime.model.runners import load
from banyan_runtime.step import Pooling, Runner, StepResult
from tests.support.models.driver import Driver, Request
from tests.support.models.tiny import DEVICES, VOCAB, TinyModel, gate, make

Models = Callable[[str], TinyModel]
pytestmark = pytest.mark.usefixtures("either_runner")
Work = list[tuple[Request, int]]
KINDS = {"last": Pooling.LAST, "mean": Pooling.MEAN, "cls": Pooling.CLS}
CLOSE = 1e-4


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB - 1, length).tolist()


def step(driver: Driver, work: Work, kinds: list[int]) -> StepResult:
    """Compute the next tokens of some prompts, of which vectors of these kinds are wanted; nothing is sampled for those."""
    built = driver.build(work)
    built = dataclasses.replace(built, pooling=np.array(kinds, np.int8), samples=np.where(kinds, 0, built.samples).astype(np.int32))
    result = driver.runner.launch(built).result()
    for request, count in work:
        request.computed += count
    return result


def pooled(driver: Driver, requests: list[Request], kind: int, chunk: int) -> np.ndarray:
    """The vectors of prompts that are computed side by side, at most `chunk` tokens of each in a step."""
    found: dict[int, np.ndarray] = {}
    while work := [(r, min(chunk, len(r.prompt) - r.computed)) for r in requests if r.computed < len(r.prompt)]:
        result = step(driver, work, [kind] * len(work))
        assert result.vectors is not None
        assert not result.failed.any()
        found |= {id(request): vector for (request, _), vector in zip(work, result.vectors, strict=True)}
    return np.stack([found[id(request)] for request in requests])


@torch.inference_mode()
def expected(reference: transformers.PreTrainedModel, tokens: list[int], kind: int) -> np.ndarray:
    hidden: torch.Tensor = reference(torch.tensor([tokens])).last_hidden_state[0]
    picked = {Pooling.LAST: hidden[-1], Pooling.MEAN: hidden.mean(0), Pooling.CLS: hidden[0]}
    found: np.ndarray = picked[kind].numpy()
    return found


def read(folder: Path) -> transformers.PreTrainedModel:
    model: transformers.PreTrainedModel = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    return model


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", gate(["llama", "qwen2", "qwen3", "mistral-window"]))
def test_vectors_equal_transformers_whatever_the_chunks(tiny_model: Models, family: str, kind: str, device: str) -> None:
    model = tiny_model(family)
    reference, runner = read(model.folder), model.load(device=device)
    prompts = [prompt(seed, length) for seed, length in enumerate((1, 2, 63, 130))]
    for chunk in (1 << 30, 50, 7):
        requests = [Request(tokens, new_tokens=1, row=row) for row, tokens in enumerate(prompts)]
        found = pooled(Driver(runner, rows=4, context=256), requests, KINDS[kind], chunk)
        for tokens, vector in zip(prompts, found, strict=True):
            np.testing.assert_allclose(vector, expected(reference, tokens, KINDS[kind]), atol=CLOSE)


@pytest.mark.long
@pytest.mark.real_model
def test_vectors_of_a_real_model_equal_transformers(smollm2: Path) -> None:
    runner = load(
        ServerConfig(model_path=str(smollm2), runner=TinyModel.runner, device="cpu", dtype="float32", max_total_tokens=1024),
        smollm2,
        lambda *_: None,
    )
    reference, tokens = read(smollm2), prompt(3, 90)
    for kind in KINDS.values():
        (found,) = pooled(Driver(runner, rows=1, context=128), [Request(tokens, new_tokens=1, row=0)], kind, chunk=40)
        np.testing.assert_allclose(found, expected(reference, tokens, kind), atol=CLOSE)


@pytest.mark.parametrize("either_runner", ["native"], indirect=True)
@pytest.mark.parametrize("kind", gate(KINDS))
def test_the_bits_of_a_vector_depend_neither_on_its_chunks_nor_on_the_batch(tiny_model: Models, kind: str) -> None:
    runner: Runner = tiny_model("qwen3-576").load()
    tokens = prompt(5, 150)
    alone = pooled(Driver(runner, rows=1, context=256), [Request(tokens, new_tokens=1, row=0)], KINDS[kind], 1 << 30)
    crowd = [Request(prompt(seed, 1 + 40 * seed), new_tokens=1, row=seed) for seed in range(4)]
    beside = pooled(Driver(runner, rows=5, context=256), [*crowd, Request(tokens, new_tokens=1, row=4)], KINDS[kind], 13)
    assert np.array_equal(alone[0], beside[4])


def test_vectors_and_tokens_come_from_one_step(tiny_model: Models) -> None:
    model = tiny_model("qwen3")
    driver = Driver(model.load(), rows=4, context=64)
    requests = [Request(prompt(seed, 9 + seed), new_tokens=1, row=seed) for seed in range(4)]
    work = [(request, len(request.prompt)) for request in requests]
    result = step(driver, work, [Pooling.NONE, Pooling.MEAN, Pooling.NONE, Pooling.LAST])
    assert result.token_ids.tolist() == [model.generate(requests[index].prompt, 1)[0] for index in (0, 2)]
    reference = read(model.folder)
    assert result.vectors is not None
    for vector, index, kind in zip(result.vectors, (1, 3), (Pooling.MEAN, Pooling.LAST), strict=True):
        np.testing.assert_allclose(vector, expected(reference, requests[index].prompt, kind), atol=CLOSE)


def test_a_row_that_changes_hands_keeps_nothing_of_the_prompt_before(tiny_model: Models) -> None:
    model = tiny_model("llama")
    driver = Driver(model.load(), rows=1, context=64)
    step(driver, [(Request(prompt(1, 30), new_tokens=1, row=0), 20)], [Pooling.MEAN])  # given up in the middle
    later = Request(prompt(2, 25), new_tokens=1, row=0)
    (found,) = pooled(driver, [later], Pooling.MEAN, chunk=10)
    np.testing.assert_allclose(found, expected(read(model.folder), later.prompt, Pooling.MEAN), atol=CLOSE)


def test_a_vector_behind_a_cached_prefix_is_the_last_tokens(tiny_model: Models) -> None:
    model = tiny_model("llama")
    driver = Driver(model.load(), rows=2, context=128)
    first = Request(prompt(1, 40), new_tokens=1, row=0)
    pooled(driver, [first], Pooling.LAST, chunk=40)
    second = Request(first.prompt[:30] + prompt(2, 8), new_tokens=1, row=1)
    driver.share(first, second, 30)
    (found,) = pooled(driver, [second], Pooling.LAST, chunk=40)
    np.testing.assert_allclose(found, expected(read(model.folder), second.prompt, Pooling.LAST), atol=CLOSE)


def test_a_vector_that_is_not_finite_fails_alone(tmp_path: Path) -> None:
    model = make(tmp_path, "qwen3")
    with torch.no_grad():
        model.reference.model.embed_tokens.weight[VOCAB - 1] = float("nan")
    model.reference.save_pretrained(tmp_path)
    driver = Driver(model.load(), rows=3, context=64)
    requests = [Request([*prompt(row, 6), VOCAB - 1] if row == 1 else prompt(row, 7), new_tokens=1, row=row) for row in range(3)]
    result = step(driver, [(request, 7) for request in requests], [Pooling.MEAN, Pooling.MEAN, Pooling.NONE])
    assert result.failed.tolist() == [False, True, False]
    assert len(result.token_ids) == 1
    assert result.token_ids[0] >= 0


@pytest.mark.parametrize("family", gate(["qwen3", "mistral"]))
def test_a_checkpoint_without_a_head_makes_vectors_and_no_text(tmp_path: Path, family: str) -> None:
    make(tmp_path / "whole", family)
    reference = read(tmp_path / "whole")
    model = TinyModel(tmp_path / "bare", reference)
    reference.save_pretrained(model.folder)
    (found,) = pooled(Driver(model.load(is_embedding=True), rows=1, context=64), [Request(prompt(1, 20), 1, 0)], Pooling.LAST, 20)
    np.testing.assert_allclose(found, expected(reference, prompt(1, 20), Pooling.LAST), atol=CLOSE)
    with pytest.raises(ConfigError, match="--is-embedding"):
        model.load()


def test_a_model_that_looks_ahead_is_refused(tmp_path: Path) -> None:
    make(tmp_path, "qwen2")
    overrides = '{"is_causal": false}'
    with pytest.raises(ModelError, match="is_causal=false"):
        TinyModel(tmp_path, None).load(is_embedding=True, json_model_override_args=overrides)

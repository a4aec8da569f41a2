"""The engine over the torch runner, in one process: whatever the schedule, greedy text equals transformers' token for token."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from banyan_runtime.config import ServerConfig
from banyan_runtime.engine.limits import EngineLimits
from banyan_runtime.engine.loop import Engine
from banyan_runtime.model.runners import load
from banyan_runtime.step import Handle, Runner, RunnerInfo, Step, TableShape
from banyan_runtime.wire import Failed, Finish, Sampling, StepOutput, Submit, pack_ids, unpack_ids
from tests.support.models.tiny import DEVICES, VOCAB, TinyModel, gate

Models = Callable[[str], TinyModel]
pytestmark = pytest.mark.usefixtures("either_runner")
FLIGHT = 32


@dataclass
class Watched:
    """The runner, and what the steps it was given looked like."""

    runner: Runner
    rows: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # of prefill steps
    chunks: int = 0  # sequences of a prefill step that did not sample
    masked_later: int = 0  # steps whose masks came behind their launch

    @property
    def info(self) -> RunnerInfo:
        return self.runner.info

    def prepare(self, shape: TableShape) -> None:
        self.runner.prepare(shape)

    def launch(self, step: Step) -> Handle:
        self.rows.append(len(step.rows))
        self.masked_later += step.mask_later
        if step.mode == "prefill":
            self.tokens.append(len(step.token_ids))
            self.chunks += int((step.samples == 0).sum())
        return self.runner.launch(step)


@dataclass
class Run:
    text: dict[int, list[int]]
    finished: dict[int, Finish]
    watched: Watched
    lines: list[str]


def serve(runner: Runner, config: ServerConfig, prompts: list[list[int]], sampling: Sampling, together: int = 8) -> Run:
    """All prompts at once but for a few turns between groups of them, until every request has ended."""
    watched, lines = Watched(runner), list[str]()
    engine = Engine(watched, EngineLimits.of(config, runner.info), time.monotonic, lines.append)
    text: dict[int, list[int]] = {i: [] for i in range(len(prompts))}
    finished: dict[int, Finish] = {}
    waiting = list(enumerate(prompts))
    while len(finished) < len(prompts):
        for i, prompt in waiting[:together]:
            engine.handle(Submit(id=i, token_ids=pack_ids(prompt), sampling=sampling))
        del waiting[:together]
        for message in engine.turn():
            assert not isinstance(message, Failed), message
            if isinstance(message, StepOutput):
                tokens = iter(unpack_ids(message.token_ids).tolist())
                for i, count in zip(message.ids, message.counts or [1] * len(message.ids), strict=True):
                    text[i] += itertools.islice(tokens, count)
                finished |= {finish.id: finish for finish in message.finished}
    return Run(text, finished, watched, lines)


def greedy(new_tokens: int) -> Sampling:
    return Sampling(max_new_tokens=new_tokens, temperature=0.0)


def prompts(count: int = FLIGHT) -> list[list[int]]:
    """Half of them share 40 tokens."""
    random = np.random.default_rng(11)
    common = random.integers(0, VOCAB, 40).tolist()
    return [(common if i % 2 else []) + random.integers(0, VOCAB, 3 + 7 * i % 61).tolist() for i in range(count)]


def config_of(model: TinyModel, **options: Any) -> ServerConfig:
    return ServerConfig(model_path=str(model.folder), dtype="float32", **({"device": "cpu", "max_total_tokens": 8192} | options))


def assert_equal(model: TinyModel, run: Run, asked: list[list[int]], new_tokens: int) -> None:
    for i, prompt in enumerate(asked):
        assert len(run.text[i]) == new_tokens
        assert run.text[i] == model.choices(prompt, run.text[i]), f"request {i}"


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_size", gate([16, 1]))
@pytest.mark.parametrize("radix", gate([True, False]))
@pytest.mark.parametrize("family", gate(["llama", "mistral", "qwen2", "qwen3"]))
def test_32_requests_in_flight_with_forced_chunks_equal_transformers(
    tiny_model: Models, family: str, radix: bool, page_size: int, device: str
) -> None:
    model = tiny_model(family)
    config = config_of(model, device=device, page_size=page_size, disable_radix_cache=not radix, chunked_prefill_size=48)
    run = serve(model.load(device=device, page_size=page_size), config, prompts(), greedy(64))
    assert_equal(model, run, prompts(), 64)
    assert max(run.watched.rows) == FLIGHT
    assert max(run.watched.tokens) <= 48
    assert run.watched.chunks > 3
    cached = sum(finish.cached_tokens for finish in run.finished.values())
    assert (cached > 200) if radix else cached == 0


@pytest.mark.matrix(gate=1)
@pytest.mark.parametrize("page_size", gate([1, 16]))
@pytest.mark.parametrize("radix", gate([True, False]))
@pytest.mark.parametrize("family", gate(["llama3-rope", "qwen3"]))
def test_requests_retracted_from_a_full_pool_continue_with_the_same_text(
    tiny_model: Models, family: str, radix: bool, page_size: int
) -> None:
    model = tiny_model(family)
    options: dict[str, Any] = {
        "page_size": page_size, "max_total_tokens": 1024, "disable_radix_cache": not radix, "schedule_conservativeness": 0.1,
    }  # fmt: skip
    run = serve(model.load(page_size=page_size, max_total_tokens=1024), config_of(model, **options), prompts(), greedy(64), together=5)
    assert_equal(model, run, prompts(), 64)
    assert sum(finish.retractions for finish in run.finished.values()) > 3
    assert any("Retract requests" in line for line in run.lines)


@pytest.mark.parametrize("either_runner", ["native"], indirect=True)
def test_a_seeded_request_has_the_same_text_alone_and_in_a_crowd(tiny_model: Models) -> None:
    model = tiny_model("qwen3")
    runner, asked = model.load(), prompts(12)
    sampling = Sampling(max_new_tokens=32, temperature=0.9, top_p=0.95, seed=1234, frequency_penalty=0.4, repetition_penalty=1.1)
    crowd = serve(runner, config_of(model), asked, sampling)
    for i, prompt in enumerate(asked):
        assert serve(runner, config_of(model), [prompt], sampling).text[0] == crowd.text[i]


QUESTIONS = [
    "What is Python?",
    "Name three primary colours.",
    "Write a haiku about the sea.",
    "Explain photosynthesis to a child in two sentences.",
    "How many legs does a spider have?",
    "What is 17 + 25?",
    "Translate 'good morning' into French.",
    "List the planets of the solar system.",
]


@pytest.mark.long
@pytest.mark.real_model
def test_smollm2_in_fp32_answers_as_transformers_does(smollm2: Path) -> None:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    reference = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    asked = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False)
        for text in QUESTIONS
    ]
    config = ServerConfig(
        model_path=str(smollm2),
        runner=TinyModel.runner,
        device="cpu",
        dtype="float32",
        max_total_tokens=640,
        chunked_prefill_size=32,
        schedule_conservativeness=0.1,
    )
    runner = load(config, smollm2, lambda *_: None)
    crowd = [asked[i % len(asked)] for i in range(FLIGHT)]
    run = serve(runner, config, crowd, greedy(24), together=4)
    answers = [TinyModel(smollm2, reference).generate(prompt, 24) for prompt in asked]
    for i in range(FLIGHT):
        answer = answers[i % len(asked)]
        assert run.text[i][: len(answer)] == answer, tokenizer.decode(run.text[i])
    assert max(run.watched.rows) > 8
    assert run.watched.chunks > 0
    assert sum(finish.retractions for finish in run.finished.values()) > 0


@pytest.mark.long
@pytest.mark.real_model
@pytest.mark.parametrize("either_runner", ["native"], indirect=True)
def test_smollm2_in_bf16_says_the_same_alone_and_in_a_crowd(smollm2: Path) -> None:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    asked = [tokenizer.encode(text) for text in QUESTIONS]
    config = ServerConfig(
        model_path=str(smollm2), runner=TinyModel.runner, device="cpu", dtype="bfloat16", max_total_tokens=2048, chunked_prefill_size=24
    )
    runner = load(config, smollm2, lambda *_: None)
    crowd = serve(runner, config, [asked[i % len(asked)] for i in range(16)], greedy(40))
    assert max(crowd.watched.rows) > 8
    for i in range(0, len(asked), 2):
        assert serve(runner, config, [asked[i]], greedy(40)).text[0] == crowd.text[i] == crowd.text[i + 8]

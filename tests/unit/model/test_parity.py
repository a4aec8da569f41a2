"""Greedy text equals transformers' token for token in fp32, in every schedule that the seam allows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.models.driver import Driver, Request
from tests.support.models.tiny import DEVICES, FAMILIES, MECHANISMS, VOCAB, TinyModel, gate, make

NEW = 64
Models = Callable[[str], TinyModel]
pytestmark = pytest.mark.usefixtures("either_runner")


ODD: dict[str, tuple[str, dict[str, Any]]] = {
    "one-head": ("llama", {
        "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 18, "hidden_size": 7,
        "intermediate_size": 3, "vocab_size": 17,
    }),
    "65-share-a-head": ("mistral-window", {
        "num_attention_heads": 65, "num_key_value_heads": 1, "head_dim": 6, "hidden_size": 33, "sliding_window": 1, "vocab_size": 31,
    }),
    "7-share-a-head": ("qwen2-window", {
        "num_attention_heads": 21, "num_key_value_heads": 3, "head_dim": 10, "hidden_size": 50, "intermediate_size": 129,
        "sliding_window": 17, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "tie_word_embeddings": True,
    }),
    "none-share-heads": ("qwen3", {
        "num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 256, "hidden_size": 13, "intermediate_size": 31,
        "attention_bias": True, "vocab_size": 5003,
    }),
    "wide-heads": ("llama3-rope", {
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 100, "hidden_size": 34, "intermediate_size": 47, "vocab_size": 4097,
    }),
}  # fmt: skip
"""Sizes that fill no vector, panel, tile or slice."""


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def assert_greedy(model: TinyModel, requests: list[Request]) -> None:
    for request in requests:
        assert len(request.output) == request.new_tokens
        assert request.output == model.choices(request.prompt, request.output), f"row {request.row}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", gate(sorted(FAMILIES, key=lambda family: family not in MECHANISMS), len(MECHANISMS)))
def test_one_request_alone_equals_transformers(tiny_model: Models, family: str, device: str) -> None:
    model = tiny_model(family)
    requests = [Request(prompt(1, 90), new_tokens=NEW + 26, row=0)]  # crosses a chunk of 128 keys while decoding
    Driver(model.load(device=device), rows=1, context=256).run(requests)
    assert len(requests[0].output) == NEW + 26
    assert requests[0].output == model.choices(requests[0].prompt, requests[0].output)
    assert len(set(requests[0].output)) > 8, "a text of one token would prove nothing"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", gate(FAMILIES))
@pytest.mark.parametrize("page_size", gate([16, 1]))
def test_32_requests_with_staggered_arrivals_and_forced_chunks_equal_transformers(
    tiny_model: Models, family: str, device: str, page_size: int
) -> None:
    model = tiny_model(family)
    requests = [Request(prompt(i, 1 + 11 * (i % 16)), new_tokens=NEW, row=i, start=i // 3) for i in range(32)]
    driver = Driver(model.load(device=device, page_size=page_size), rows=32, context=512, page_size=page_size)
    driver.run(requests, chunk=16 if page_size == 16 else 13)
    assert_greedy(model, requests)


@pytest.mark.parametrize("shape", gate(ODD))
def test_odd_shapes_equal_transformers(tmp_path: Path, shape: str) -> None:
    family, changes = ODD[shape]
    model = make(tmp_path, family, **changes)
    vocabulary = model.reference.config.vocab_size
    requests = [Request([token % vocabulary for token in prompt(i, length)], new_tokens=20, row=i) for i, length in enumerate((150, 1, 20))]
    Driver(model.load(page_size=16), rows=3, context=256, page_size=16).run(requests, chunk=48)
    assert_greedy(model, requests)


@pytest.mark.parametrize("page_size", gate([16, 1]))
@pytest.mark.parametrize("family", gate(["llama", "qwen3", "mistral-window"]))
def test_a_request_that_starts_behind_a_cached_prefix_equals_transformers(tiny_model: Models, family: str, page_size: int) -> None:
    model = tiny_model(family)
    common = prompt(7, 140)
    first = Request(common + prompt(8, 9), new_tokens=NEW, row=0)
    others = [Request(common[: 30 * i] + prompt(20 + i, 5), new_tokens=NEW, row=i) for i in range(1, 5)]
    driver = Driver(model.load(page_size=page_size), rows=5, context=256, page_size=page_size)
    driver.run([first])
    for i, other in enumerate(others, 1):
        driver.share(first, other, 30 * i)
        assert other.computed >= 16
    driver.run(others)
    assert_greedy(model, [first, *others])


def test_a_token_still_in_flight_is_taken_from_the_step_before(tiny_model: Models) -> None:
    model = tiny_model("llama")
    runner = model.load()
    driver = Driver(runner, rows=3, context=64)
    request = Request(prompt(3, 12), new_tokens=6, row=2)
    handles = []
    for count in (12, 1, 1, 1, 1, 1):
        handles.append(runner.launch(driver.build([(request, count)])))
        request.computed += count
        request.output.append(-1)  # launched, not known
    assert [int(handle.result().token_ids[0]) for handle in handles] == model.generate(request.prompt, 6)

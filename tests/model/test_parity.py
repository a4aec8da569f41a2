"""Greedy text equals transformers' token for token in fp32, in every schedule that the seam allows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from .conftest import DEVICES, FAMILIES, VOCAB, TinyModel
from .driver import Driver, Request

NEW = 64
Models = Callable[[str], TinyModel]
pytestmark = pytest.mark.usefixtures("either_runner")


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def assert_greedy(model: TinyModel, requests: list[Request]) -> None:
    for request in requests:
        assert len(request.output) == request.new_tokens
        assert request.output == model.choices(request.prompt, request.output), f"row {request.row}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_one_request_alone_equals_transformers(tiny_model: Models, family: str, device: str) -> None:
    model = tiny_model(family)
    requests = [Request(prompt(1, 90), new_tokens=NEW + 26, row=0)]  # crosses a chunk of 128 keys while decoding
    Driver(model.load(device=device), rows=1, context=256).run(requests)
    assert requests[0].output == model.generate(requests[0].prompt, NEW + 26)
    assert len(set(requests[0].output)) > 8, "a text of one token would prove nothing"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("page_size", [1, 16])
def test_32_requests_with_staggered_arrivals_and_forced_chunks_equal_transformers(
    tiny_model: Models, family: str, device: str, page_size: int
) -> None:
    model = tiny_model(family)
    requests = [Request(prompt(i, 1 + 11 * (i % 16)), new_tokens=NEW, row=i, start=i // 3) for i in range(32)]
    driver = Driver(model.load(device=device, page_size=page_size), rows=32, context=512, page_size=page_size)
    driver.run(requests, chunk=16 if page_size == 16 else 13)
    assert_greedy(model, requests)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral-window"])
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

"""That no request waits for Triton's compiler: whatever a step launches was launched before the first one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from banyan_runtime.model import fused, fused_products, torch_forward
from banyan_runtime.model.attention import triton_paged
from banyan_runtime.model.attention.triton_paged import TritonAttention
from banyan_runtime.model.kernels import paged_attention, products, rows
from tests.kernels.test_triton import DEVICE
from tests.support.models.driver import Driver, Request
from tests.support.models.tiny import VOCAB, TinyModel

KERNELS = {
    paged_attention: ("attend", "turn_and_attend", "join", "note"),
    products: ("product",),
    rows: ("begin", "rms_norm", "gated", "place"),
}
Variant = tuple[str, tuple[tuple[str, Any], ...], tuple[torch.dtype, ...]]


class Told:
    """A kernel, and with which constants and types it is launched. In the interpreter that is all: it takes minutes, and which of them
    come does not depend on numbers."""

    def __init__(self, name: str, kernel: Any, seen: set[Variant]) -> None:
        self._name, self._kernel, self._seen = name, kernel, seen

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def launch(*args: Any, **constants: Any) -> Any:
            types = tuple(arg.dtype for arg in args if isinstance(arg, torch.Tensor))
            self._seen.add((self._name, tuple(sorted(constants.items())), types))
            if DEVICE == "cuda":
                self._kernel[grid](*args, **constants)

        return launch


@pytest.mark.matrix(gate=2)
@pytest.mark.parametrize("family", ["llama", "gemma4-shared", "qwen3", "mistral-window", "gemma2", "gemma3", "cohere2", "starcoder2"])
def test_no_request_waits_for_a_compiler(tiny_model: Callable[[str], TinyModel], family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without graphs: prompts of one token, of a few, of many and in chunks, beside decode steps of one row, of two and of more, over
    contexts of one stretch and of several, even ones and others. Of the second model torch prepares heads, of unlike sizes."""
    monkeypatch.setattr(fused_products, "_OUTPUTS", 128)
    monkeypatch.setattr(fused, "supports", lambda *_: True)
    monkeypatch.setattr(torch_forward, "_MANY", 4)
    for name, value in {"KEYS": 16, "STRETCH": 32, "TOGETHER": 2, "PROGRAMS": 16, "ENOUGH": 8}.items():
        monkeypatch.setattr(triton_paged, name, value)
    monkeypatch.setattr(TritonAttention, "refusal", staticmethod(lambda *_: None))
    if DEVICE == "cpu":  # where nobody writes, there are numbers all the same
        monkeypatch.setattr(torch, "empty", torch.zeros)
        monkeypatch.setattr(torch, "empty_like", torch.zeros_like)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "none")
    seen: set[Variant] = set()
    for module, names in KERNELS.items():
        for name in names:
            monkeypatch.setattr(module, name, Told(name, getattr(module, name), seen))
    runner = tiny_model(family).load(device=DEVICE, runner="torch", disable_cuda_graph=True, dtype="float32")
    driver = Driver(runner, rows=5, context=192)
    before = set(seen)
    launched = {"attend", "join", "product"} | ({"turn_and_attend", "rms_norm", "place"} if family == "llama" else set())
    assert {name for name, *_ in before} >= launched
    for lengths in ([1], [2], [5, 1], [90, 3], [40, 41, 42, 43, 44], [120, 20, 30]):
        requests = [
            Request([(31 * row + 7 * i) % VOCAB for i in range(length)], new_tokens=6, row=row, start=2 * row)
            for row, length in enumerate(lengths)
        ]
        driver.run(requests, chunk=37)
    assert seen == before

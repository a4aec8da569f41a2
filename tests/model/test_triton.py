"""Triton's kernels in its interpreter, on the CPU: their numbers, not their speed."""

from __future__ import annotations

import pytest
import torch

from banyan_runtime.errors import ConfigError
from banyan_runtime.model.attention import backends, triton_paged
from banyan_runtime.model.attention.triton_paged import TritonAttention

from .test_attention import Room, spec


@pytest.fixture(autouse=True)
def _short_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A context of several stretches is short then."""
    monkeypatch.setattr(triton_paged, "KEYS", 16)
    monkeypatch.setattr(triton_paged, "STRETCH", 64)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("window", [None, 37, 100])
@pytest.mark.parametrize("dim", [16, 24, 64])
def test_prompts_equal_one_softmax_over_all_keys(window: int | None, page_size: int, dim: int) -> None:
    room = Room([150, 3, 64], window, page_size, kind=TritonAttention, dim=dim)
    found = room.attend([(row, 0, length) for row, length in enumerate(room.lengths)])
    for row, values in enumerate(found):
        close(values, room.expected(row))


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("window", [None, 37, 100])
def test_few_queries_over_a_context_in_stretches(window: int | None, page_size: int) -> None:
    """Decode steps, drafts and ends of prompts whose beginning is cached."""
    lengths = [150, 3, 64, 65, 200]
    room = Room(lengths, window, page_size, kind=TritonAttention)
    room.prefill()
    expected = [room.expected(row) for row in range(len(lengths))]
    for queries in (1, 2, 7):
        work = [(row, max(length - queries, 0), length) for row, length in enumerate(lengths)]
        for (row, start, end), values in zip(work, room.attend(work), strict=True):
            close(values, expected[row][start:end])


def test_a_prompt_in_chunks_beside_others() -> None:
    room = Room([180, 40], kind=TritonAttention)
    expected = [room.expected(row) for row in range(2)]
    for start in range(0, 180, 60):
        work = [(0, start, start + 60), (1, start // 5, start // 5 + 12)]
        for (row, begin, end), values in zip(work, room.attend(work), strict=True):
            close(values, expected[row][begin:end])


def test_a_decode_steps_bits_do_not_depend_on_company() -> None:
    room = Room([150, 90, 200, 20], kind=TritonAttention)
    room.prefill()
    alone = [room.attend([(row, length - 1, length)])[0] for row, length in enumerate(room.lengths)]
    together = room.attend([(row, length - 1, length) for row, length in enumerate(room.lengths)])
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one, other)


def test_a_broken_key_breaks_those_who_see_it_and_nobody_else() -> None:
    room = Room([40, 40], kind=TritonAttention)
    room.v[0][20] = float("nan")
    found = room.attend([(0, 0, 40), (1, 0, 40)])
    broken = [not torch.isfinite(values).all() for values in found[0]]
    assert broken == [False] * 20 + [True] * 20
    assert torch.isfinite(found[1]).all()


def test_on_the_cpu_it_is_refused() -> None:
    """The interpreter is for tests."""
    with pytest.raises(ConfigError, match="--attention-backend=triton: it computes on CUDA devices"):
        backends.choose("triton", spec(None), torch.device("cpu"), torch.float32)
    assert backends.choose(None, spec(None), torch.device("cpu"), torch.float32).name == "torch_native"

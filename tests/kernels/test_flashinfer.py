"""FlashInfer: that its plans say what a step means, with a double of the package anywhere and with the package itself on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from banyan_runtime.model.attention import Held, flashinfer_paged, most_sequences
from banyan_runtime.model.attention.flashinfer_paged import FlashInferAttention
from banyan_runtime.model.graphs import Sizes
from banyan_runtime.model.table import SlotTable
from banyan_runtime.model.torch_forward import TorchForward
from banyan_runtime.step import I32, PADDING_SLOT, Ragged, RowUpdates, Step, TableShape
from tests.support.models.driver import Again, Driver, Request, columns
from tests.support.models.flashinfer_double import install
from tests.support.models.replays import Replays
from tests.support.models.tiny import VOCAB, TinyModel
from tests.unit.model import test_attention
from tests.unit.model.test_attention import Room

pytestmark = pytest.mark.matrix(gate=1)
CLOSE = {torch.float32: (1e-4, 2e-5), torch.float16: (1e-2, 1e-2), torch.bfloat16: (5e-2, 5e-2)}


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


@pytest.fixture(params=["double", pytest.param("cuda", marks=(pytest.mark.gpu, pytest.mark.long))])
def device(request: pytest.FixtureRequest) -> str:
    """The CPU with a double, or a GPU with the package."""
    if request.param == "double":
        request.getfixturevalue("double")
        return "cpu"
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if find_spec("flashinfer") is None:
        pytest.skip("the package flashinfer-python is not installed")
    return "cuda"


def room(device: str, lengths: list[int], *options: Any, **named: Any) -> Room:
    return Room(lengths, *options, kind=FlashInferAttention, device=device, dim=64, **named)


def close(found: Tensor, expected: Tensor) -> None:
    rtol, atol = CLOSE[found.dtype]
    torch.testing.assert_close(found.double().cpu(), expected, rtol=rtol, atol=atol)


HALVES = [(37, torch.bfloat16), (None, torch.float16), (None, torch.bfloat16), (100, torch.bfloat16)]


@pytest.mark.parametrize("page_size", [16, 1])
@pytest.mark.parametrize(("window", "dtype"), HALVES)
def test_prompts_equal_one_softmax_over_all_keys(device: str, window: int | None, page_size: int, dtype: torch.dtype) -> None:
    texts = room(device, [150, 3, 64], window, page_size, dtype)
    found = texts.attend([(row, 0, length) for row, length in enumerate(texts.lengths)])
    for row, values in enumerate(found):
        close(values, texts.expected(row))


@pytest.mark.parametrize("page_size", [16, 1])
@pytest.mark.parametrize(("window", "dtype"), HALVES)
def test_decode_steps_drafts_and_ends_of_cached_prompts(device: str, window: int | None, page_size: int, dtype: torch.dtype) -> None:
    lengths = [150, 3, 64, 65, 200]
    texts = room(device, lengths, window, page_size, dtype)
    texts.prefill()
    expected = [texts.expected(row) for row in range(len(lengths))]
    for queries in (1, 2, 7, 40):
        work = [(row, max(length - queries, 0), length) for row, length in enumerate(lengths)]
        for (row, start, end), values in zip(work, texts.attend(work), strict=True):
            close(values, expected[row][start:end])


def test_scores_are_scaled_and_capped_as_the_model_says(device: str) -> None:
    """Of prompts, and of decode steps that are replayed."""
    texts = room(device, [150, 20], 37, dtype=torch.bfloat16, soft_cap=3.0, scale=0.25)
    replays = Replays(texts, rows=(2,))
    for row, values in enumerate(texts.prefill()):
        close(values, texts.expected(row))
    for row, values in enumerate(replays.attend([(0, 149, 150), (1, 19, 20)])):
        close(values, texts.expected(row)[-1:])


def test_a_prompt_in_chunks_beside_decode_steps_of_others(device: str) -> None:
    texts = room(device, [180, 40], dtype=torch.bfloat16)
    expected = [texts.expected(row) for row in range(2)]
    for start in range(0, 180, 60):
        work = [(0, start, start + 60), (1, start // 60, start // 60 + 1)]
        for (row, begin, end), values in zip(work, texts.attend(work), strict=True):
            close(values, expected[row][begin:end])


def test_a_broken_key_breaks_those_who_see_it_and_nobody_else(device: str) -> None:
    texts = room(device, [40, 40], dtype=torch.bfloat16)
    texts.v[0][20] = float("nan")
    found = texts.attend([(0, 0, 40), (1, 0, 40)])
    broken = [not torch.isfinite(values).all() for values in found[0]]
    assert broken == [False] * 20 + [True] * 20
    assert torch.isfinite(found[1]).all()


@pytest.mark.parametrize("heads", [6, 14])  # three and seven for each KV head: the former without tensor cores
@pytest.mark.parametrize("window", [37, None])
def test_steps_that_are_replayed_follow_their_texts(device: str, window: int | None, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of four rows and of two, each replayed for fewer and over contexts that grow; of drafts, which are of two and four tokens
    each; and of pieces of prompts beside them."""
    monkeypatch.setattr(test_attention, "HEADS", heads)
    lengths = [150, 20, 64]
    texts = room(device, lengths, window, dtype=torch.bfloat16)
    expected = [texts.expected(row) for row in range(3)]
    replays = Replays(texts, rows=(4, 2), tokens=(12, 40))
    texts.prefill()
    for back in range(15, 0, -1):
        rows = [2, 0, 1] if back % 3 else [1]
        for counts in ((1, 1, 1), (2, 4, 2), (30, 1, 9))[: 1 + back % 3]:
            work = [
                (row, max(0, lengths[row] - back + 1 - count), lengths[row] - back + 1) for row, count in zip(rows, counts, strict=False)
            ]
            for (row, start, end), values in zip(work, replays.attend(work), strict=True):
                close(values, expected[row][start:end])


def over_shared_prefixes(chance: np.random.Generator, rows: I32, query_lens: I32, longest: int, page_size: int) -> Step:
    """A step whose rows come anew, each behind cached pages of which the first are those of others."""
    kv_lens = chance.integers(query_lens, longest + 1).astype(np.int32)
    alike = chance.integers(1, 50, -(-longest // page_size))
    slots = []
    for length in kv_lens.tolist():
        pages = np.where(np.arange(len(alike)) < chance.integers(len(alike) + 1), alike, chance.integers(50, 1000, len(alike)))
        slots.append((pages[:, None] * page_size + np.arange(page_size)).reshape(-1)[:length].astype(np.int32))
    begun = kv_lens - query_lens
    cached = [own[:start] for own, start in zip(slots, begun, strict=True)]
    return Step(
        mode="prefill",
        token_ids=np.zeros(query_lens.sum(), np.int32),
        positions=np.concatenate([np.arange(start, end, dtype=np.int32) for start, end in zip(begun, kv_lens, strict=True)]),
        out_slots=np.concatenate([own[start:] for own, start in zip(slots, begun, strict=True)]),
        rows=rows,
        query_lens=query_lens,
        kv_lens=kv_lens,
        samples=np.zeros_like(rows),
        sampling=columns([]),
        updates=RowUpdates(rows, 0 * rows, Ragged(np.concatenate(cached), np.append(0, np.cumsum(begun)).astype(np.int32))),
        page_size=page_size,
    )


@pytest.mark.parametrize("together", [7, 1, 64, flashinfer_paged.TOGETHER])
@pytest.mark.parametrize("page_size", [16, 1])
@pytest.mark.usefixtures("double")
@torch.inference_mode()
def test_a_plan_names_the_slots_of_all_keys_in_turn(page_size: int, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of decode steps and others that are replayed, padded, and of steps that are not."""
    monkeypatch.setattr(flashinfer_paged, "TOGETHER", together)
    chance, shape = np.random.default_rng(together), TableShape(5, 96)
    attention, table = room("cpu", [1], dtype=torch.bfloat16).attention, SlotTable(shape)
    assert isinstance(attention, FlashInferAttention)
    attention.reserve(shape)
    decode, prompts = (Held.empty(size, torch.device("cpu"), sequences) for size, sequences in ((5, None), (40, 5)))
    attention.hold([decode, prompts])
    for held in (decode, prompts):
        attention.plan_held(held)
    assert attention._memory is not None
    for longest in (1, 40, 95, 96, 96):
        for kind in (decode, prompts, None):
            rows = chance.permutation(5)[: chance.integers(1, 6)].astype(np.int32)
            query_lens = np.ones_like(rows) if kind is decode else chance.integers(1, min(longest, 8) + 1, len(rows)).astype(np.int32)
            step = over_shared_prefixes(chance, rows, query_lens, longest, page_size)
            table.apply(step)
            if kind is None:
                attention.plan(step, table)
                planned = attention._planned[None].planned
            else:
                attention.fill(step, table, kind)
                planned = attention._memory.wrappers[kind.size, kind.sequences][None].planned
            seen, count = int(step.kv_lens.sum()), len(rows)
            begun, slots = (planned[name if kind is decode else f"paged_kv_{name}"].numpy() for name in ("indptr", "indices"))
            assert begun[: count + 1].tolist() == [0, *np.cumsum(step.kv_lens)]
            expected = np.concatenate([table.slots[row, :length] for row, length in zip(rows, step.kv_lens, strict=True)])
            assert slots[:seen].tolist() == expected.tolist()
            assert len(slots) == begun[-1]
            assert (slots[seen:] == PADDING_SLOT).all()
            assert kind is not None or len(slots) == seen


@pytest.mark.usefixtures("double")
def test_it_takes_the_memory_that_it_says() -> None:
    """But for plans and what a few columns take."""
    for rows, tokens in ((4, 0), (4, 200), (100, 24)):
        attention = room("cpu", [150, 20], dtype=torch.bfloat16).attention
        assert isinstance(attention, FlashInferAttention)
        attention.reserve(shape := TableShape(100, 5000))
        columns = [(rows, None), *([(tokens, most_sequences(tokens))] if tokens else [])]
        attention.hold([Held.empty(size, torch.device("cpu"), sequences) for size, sequences in columns])
        assert attention._memory is not None
        assert attention._table is not None
        taken = attention._table.slots.nbytes + attention._slots.nbytes + attention._memory.workspace.nbytes
        assert taken == FlashInferAttention.beside(shape, rows, tokens)


@pytest.mark.parametrize(
    "family", ["llama", "mistral-window", "gemma2", "qwen2-window"]
)  # the last two have layers with and without a window
@pytest.mark.usefixtures("double")
def test_a_model_says_the_same_with_and_without_replays(
    tiny_model: Callable[[str], TinyModel], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three texts of different lengths that come and go: the graphs are for 1, 2 and 4 rows and for 16 and 24 other tokens, so some steps
    are padded, and the longest prompt goes by them."""
    monkeypatch.setattr(FlashInferAttention, "refusal", staticmethod(lambda *_: None))
    model = tiny_model(family)
    for recorder in (None, Again()):
        runner = model.load(runner="torch")
        assert runner.info.attention_backend == "flashinfer"
        forward = runner.forward
        assert isinstance(forward, TorchForward)
        if recorder is not None:
            runner.forward = TorchForward(forward.decoder, forward.attention, forward._pool, recorder, Sizes.upto(4, 24))
        requests = [
            Request([(31 * row + 7 * i) % VOCAB for i in range(9 + 30 * row)], new_tokens=6 + 3 * row, row=row, start=row)
            for row in range(3)
        ]
        Driver(runner, rows=4, context=128).run(requests, chunk=20 if recorder else 13)
        for request in requests:
            assert request.output == model.choices(request.prompt, request.output)


@pytest.mark.usefixtures("double")
def test_kernels_for_long_prompts_have_run_before_the_first_request(
    tiny_model: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the request that warms a server up is short, and replayed. What they wrote is in no page but the padding's."""
    monkeypatch.setattr(FlashInferAttention, "refusal", staticmethod(lambda *_: None))
    forward = tiny_model("llama").load(runner="torch").forward
    assert isinstance(forward, TorchForward)
    attention = forward.attention
    assert isinstance(attention, FlashInferAttention)
    forward = TorchForward(forward.decoder, attention, forward._pool, None, Sizes.upto(4, 100))
    forward.reserve(4, 200, torch.zeros(4, dtype=torch.int64))
    assert attention._planned is attention._many
    assert len(attention.cells.slots) == 101
    assert not attention._pool.slots(0)[0][:, 1:].any()

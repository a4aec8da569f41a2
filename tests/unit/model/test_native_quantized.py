"""The native runner computes on GGUF's blocks as they lie: what it gives is what their values give, for every instruction set that
this machine has."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, get_args

import numpy as np
import numpy.typing as npt
import pytest
import torch

from banyan_runtime.errors import ConfigError
from banyan_runtime.hub.resolve import cache_dir
from banyan_runtime.model import blocks, host, loader
from banyan_runtime.model.block_values import SIZES, BlockKind
from banyan_runtime.model.blocks import Blocks, dequantize
from banyan_runtime.model.native import loading, variants
from banyan_runtime.model.native.forward import _BLOCK_KINDS, NativeForward
from banyan_runtime.model.native.library import PULSE, Kind, Library, Spec
from banyan_runtime.model.native.library import Step as NativeStep
from banyan_runtime.models import registry
from tests.support.models import ggufs
from tests.support.models.driver import Driver, Request
from tests.support.models.tiny import TinyModel, gate, make
from tests.unit.model.test_blocks import HALVES_AT
from tests.unit.model.test_gguf import WIDE, unfolded
from tests.unit.model.test_parity import prompt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
Part = Blocks | F32
KINDS: Final[tuple[BlockKind, ...]] = get_args(BlockKind)
FEW_BITS: Final = ("Q4_0", "Q4_1", "Q4_K", "Q3_K", "Q2_K")
MOST: Final[dict[BlockKind, np.float32]] = {kind: np.float32(127 if kind in FEW_BITS else 32767) for kind in KINDS}
"""What the largest activation of 32 becomes."""
HERE: Final = variants.usable(host.instruction_sets())
NO_PULSE: Final = PULSE(lambda: None)


@pytest.fixture(scope="module", params=gate(HERE), ids=lambda variant: str(variant.name))
def library(request: pytest.FixtureRequest) -> Library:
    return loading.load_from([request.param], cache_dir() / "native")


class Lone:
    """A model without layers: nothing but one matrix, which embeds tokens and is the head."""

    def __init__(self, library: Library, parts: Sequence[Part], threads: int = 2) -> None:
        self.library = library
        self.outputs = sum(len(values(part)) for part in parts)
        self.width = values(parts[0]).shape[1]
        about = Spec(
            vocabulary=self.outputs, hidden=self.width, tied=1, threads=threads, eps=1e-6, embed_scale=1.0, logit_scale=1.0,
        )  # fmt: skip
        self.decoder = library.create(ctypes.byref(about), None, NO_PULSE)
        norm = np.ones(self.width, np.float32)
        library.vector(self.decoder, -1, b"norm", norm.ctypes.data, self.width)
        for part in parts:
            kind, data = (_BLOCK_KINDS[part.kind], part.data) if isinstance(part, Blocks) else (Kind.F32, part)
            rows = len(values(part))
            assert library.matrix(self.decoder, -1, b"embed", kind, data.ctypes.data, rows, self.width)

    def __del__(self) -> None:
        self.library.destroy(self.decoder)

    def normed(self, rows: F32) -> F32:
        """What the matrix meets."""
        out = np.empty_like(rows)
        self.library.normed(self.decoder, rows.ctypes.data, len(rows), out.ctypes.data)
        return out

    def products(self, rows: F32) -> F32:
        """normed(rows) @ matrix.T"""
        rows = np.ascontiguousarray(rows)
        out = np.full((len(rows), self.outputs), np.nan, np.float32)
        self.library.logits(self.decoder, rows.ctypes.data, len(rows), out.ctypes.data)
        return out

    def likeliest(self, rows: F32) -> npt.NDArray[np.int64]:
        out = np.empty(len(rows), np.int64)
        self.library.likeliest(self.decoder, rows.ctypes.data, len(rows), out.ctypes.data)
        return out

    def embedded(self, tokens: npt.NDArray[np.int64]) -> F32:
        out = np.empty((len(tokens), self.width), np.float32)
        step = NativeStep(len(tokens), 0, tokens.ctypes.data)
        self.library.step(self.decoder, ctypes.byref(step), out.ctypes.data)
        return out


def values(part: Part) -> F32:
    return dequantize(part) if isinstance(part, Blocks) else part


def random_blocks(kind: BlockKind, rows: int, columns: int, rng: np.random.Generator) -> Blocks:
    """Any bytes are blocks: every number, scale and minimum that can be written, but for the float16 that would be huge."""
    length, size = SIZES[kind]
    data = rng.integers(0, 256, (rows * columns // length, size), np.uint8)
    for at in HALVES_AT.get(kind, [0]):
        data[:, at : at + 2] = (rng.standard_normal((len(data), 1)) * 0.02).astype("<f2").view(np.uint8)
        data[0, at : at + 2] = np.array([2.0**-20], "<f2").view(np.uint8)  # less than the least normal float16
    if kind == "MXFP4":  # an exponent
        data[:, 0] = rng.integers(118, 124, len(data))
        data[0, 0] = 0
    return Blocks(kind, rows, columns, data.reshape(rows, -1))


def width_of(kind: BlockKind, rng: np.random.Generator) -> int:
    return int(rng.integers(1, 20 if SIZES[kind][0] == 32 else 6)) * SIZES[kind][0]


def rounded(rows: F32, kind: BlockKind, *, fused: bool) -> F64:
    """What weights of a kind meet: whole numbers with a scale for each group of 32: of 8 bits for weights of few, else of 16.

    fused: a number is rounded to a whole one once, not to a float32 before.
    """
    groups = rows.reshape(len(rows), -1, 32)
    largest = np.abs(groups).max(axis=2, keepdims=True)
    scaled = groups * (MOST[kind] / largest).astype(np.float64 if fused else np.float32)
    found: F64 = np.rint(scaled) * (largest / MOST[kind]).astype(np.float64)
    assert np.all(np.abs(found - groups) <= largest / MOST[kind] * 0.51)
    return found.reshape(rows.shape)


def assert_products(found: F32, rows: F32, parts: Sequence[Part]) -> None:
    """Equal to products in float64 within what rounding sums of this size to float32 may cost."""
    matrix = np.concatenate([values(part) for part in parts]).astype(np.float64)
    # Rounding errors are many and independent. Weights of kinds with minima are differences of what may be some times as large.
    bound = 8e-6 * np.linalg.norm(rows.astype(np.float64), axis=1)[:, None] * np.abs(matrix).max(axis=1) + 1e-30
    errors = []
    for fused in (True, False):
        met = [rounded(rows, part.kind, fused=fused) if isinstance(part, Blocks) else rows.astype(np.float64) for part in parts]
        exact = np.concatenate([row @ values(part).astype(np.float64).T for row, part in zip(met, parts, strict=True)], axis=1)
        errors.append(float((np.abs(found - exact) / bound).max()))
        assert np.abs(exact).max() > 100 * bound.min(), "sums of nothing prove nothing"
    assert min(errors) <= 1, errors


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_blocks_values(library: Library, kind: BlockKind) -> None:
    rng = np.random.default_rng(KINDS.index(kind))
    for outputs in (1, 7, 16, 33, 64, 150, 401):
        columns = width_of(kind, rng)
        part = random_blocks(kind, outputs, columns, rng)
        lone = Lone(library, [part])
        for count in (1, 2, 3, 4, int(rng.integers(5, 13)), int(rng.integers(13, 41))):
            rows = rng.standard_normal((count, columns)).astype(np.float32)
            products = lone.products(rows)
            assert_products(products, lone.normed(rows), [part])
            np.testing.assert_array_equal(lone.likeliest(rows), products.argmax(axis=1))


def test_parts_of_different_kinds_make_one_matrix(library: Library) -> None:
    rng = np.random.default_rng(5)
    parts: list[Part] = [random_blocks(kind, int(rng.integers(1, 90)), 512, rng) for kind in KINDS]
    parts.insert(2, rng.standard_normal((21, 512)).astype(np.float32))
    lone = Lone(library, parts, threads=3)
    whole = np.concatenate([values(part) for part in parts])
    for count in (1, 5, 40):
        rows = rng.standard_normal((count, 512)).astype(np.float32)
        assert_products(lone.products(rows), lone.normed(rows), parts)
    np.testing.assert_array_equal(lone.embedded(np.arange(len(whole))), whole)


@pytest.mark.parametrize("kind", KINDS)
def test_an_embedding_is_the_values_of_a_row_to_the_bit(library: Library, kind: BlockKind) -> None:
    part = random_blocks(kind, 75, 512, np.random.default_rng(1))
    tokens = np.random.default_rng(2).integers(0, 75, 200)
    np.testing.assert_array_equal(Lone(library, [part]).embedded(tokens), dequantize(part)[tokens])


@pytest.mark.parametrize("kind", KINDS)
def test_a_rows_bits_do_not_depend_on_how_many_are_computed_or_by_how_many_threads(library: Library, kind: BlockKind) -> None:
    rng = np.random.default_rng(3)
    part = random_blocks(kind, 213, 768, rng)
    rows = rng.standard_normal((300, 768)).astype(np.float32)  # more than are computed at once
    lone = Lone(library, [part])
    expected = lone.products(rows)
    for index in range(0, 300, 37):
        np.testing.assert_array_equal(lone.products(rows[index : index + 1])[0], expected[index])
    for count in [*range(2, 41), 63, 256, 257]:
        first = int(rng.integers(0, 301 - count))
        np.testing.assert_array_equal(lone.products(rows[first : first + count]), expected[first : first + count], str(count))
    for threads in (1, 3):
        np.testing.assert_array_equal(Lone(library, [part], threads).products(rows), expected)


@pytest.mark.parametrize("threads", gate([2, 1]))
@pytest.mark.parametrize("kind", KINDS)
def test_products_of_other_activations_in_the_same_place_are_theirs(library: Library, kind: BlockKind, threads: int) -> None:
    """What a thread has made of activations serves one step's product only."""
    rng = np.random.default_rng(8)
    part = random_blocks(kind, 90, 512, rng)
    lone = Lone(library, [part], threads)
    for rows in rng.standard_normal((4, 3, 512)).astype(np.float32):
        np.testing.assert_array_equal(lone.products(rows), Lone(library, [part], threads).products(rows))
        np.testing.assert_array_equal(lone.products(rows[:1]), lone.products(rows)[:1])


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "MXFP4"])
def test_a_scale_that_is_no_number_makes_sums_that_are_none(library: Library, kind: BlockKind) -> None:
    """So a damaged file fails requests instead of answering them."""
    rng = np.random.default_rng(4)
    part = random_blocks(kind, 40, 256, rng)
    for bits in (0x7E00, 0x7C00):
        data = part.data.reshape(-1, SIZES[kind][1]).copy()
        at = HALVES_AT.get(kind, [0])[0]
        block = 256 // SIZES[kind][0] * 17
        data[block, at : at + 2] = np.array([bits], "<u2").view(np.uint8)
        damaged = Blocks(kind, 40, 256, data.reshape(part.data.shape))
        for count in (1, 30):
            found = Lone(library, [damaged]).products(np.ones((count, 256), np.float32))
            assert not np.isfinite(found[:, 17]).any()
            assert np.isfinite(np.delete(found, 17, axis=1)).all()


def mixed(name: str) -> str:
    """As files are: other kinds for what matters more."""
    if "embd" in name or "output." in name:
        return "Q6_K"
    return "Q8_0" if "attn_v" in name else "F32" if "attn_k" in name else "Q4_K" if "ffn" in name else "Q4_1"


FILES: Final[dict[str, Callable[[str], str]]] = {**{kind: lambda name, kind=kind: kind for kind in KINDS}, "mixed": mixed}  # type: ignore[misc]


def logits(model: TinyModel, file: Path, runner: str, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
    """Of all positions, and what is said then."""
    loaded = TinyModel(unfolded(file), model.reference).load(runner=runner)
    assert isinstance(loaded.forward, NativeForward) == (runner == "native")
    heard: list[torch.Tensor] = []
    hidden = loaded.forward.hidden

    def listen(*step: Any) -> torch.Tensor:
        heard.append(hidden(*step).clone())
        return heard[-1]

    setattr(loaded.forward, "hidden", listen)  # noqa: B010 -- typed as a method
    request = Request(tokens, new_tokens=12, row=0)
    Driver(loaded, rows=1, context=128).run([request])
    return loaded.forward.logits(torch.cat(heard)).clone(), request.output


@pytest.mark.parametrize("stored", gate(["mixed", *KINDS]))
def test_a_file_says_what_it_says_with_its_weights_as_tensors(variant: str, tmp_path: Path, stored: str) -> None:
    model = make(tmp_path / "model", "qwen3", **WIDE, vocab_size=503, initializer_range=0.1)
    file = ggufs.write(model.folder, tmp_path / "m.gguf", FILES[stored])
    tokens = prompt(7, 70)
    expected, said = logits(model, file, "torch", tokens)
    found, said_here = logits(model, file, "native", tokens)
    if stored in ("Q8_0", "Q6_K"):
        assert said_here == said
        torch.testing.assert_close(found, expected, atol=2e-4 * float(expected.abs().max()), rtol=0)
    else:  # activations of 8 bits, and weights drawn so that errors grow from layer to layer: a mistake would leave nothing alike
        same = min(len(found), next((70 + i for i, pair in enumerate(zip(said, said_here, strict=True)) if pair[0] != pair[1]), len(found)))
        off = (found[:same] - expected[:same]).square().mean() / expected.square().mean()
        assert 1e-5 < float(off) < 0.05**2, float(off) ** 0.5


@pytest.mark.parametrize(("quantization", "bits"), [("w8a16", 9), ("w4a16", 7)])
def test_weights_quantized_at_load_stay_so(tmp_path: Path, quantization: str, bits: int) -> None:
    model = make(tmp_path, "llama", hidden_size=256, intermediate_size=512, num_attention_heads=8, tie_word_embeddings=False)
    said = {}
    for runner in ("torch", "native"):
        loaded = model.load(runner=runner, quantization=quantization)
        request = Request(prompt(3, 40), new_tokens=12, row=0)
        Driver(loaded, rows=1, context=64).run([request])
        said[runner] = request.output
    assert said["native"] == said["torch"]
    parameters = loader.load(
        tmp_path, registry.weights_of(registry.read(tmp_path)), torch.float32, torch.device("cpu"), lambda *_: None, quantization
    )
    assert loaded.info.weights_bytes == blocks.nbytes(parameters.values())
    assert loaded.info.weights_bytes < blocks.elements(parameters.values()) * bits / 8


def test_what_cannot_be_quantized_is_named_and_where_that_is_all_there_is_nothing_to_quantize(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    some, none = tmp_path / "some", tmp_path / "none"
    for folder, size in ((some, 96), (none, 100)):
        folder.mkdir()
        make(folder, "llama", hidden_size=size, intermediate_size=77, num_attention_heads=2, head_dim=22, num_key_value_heads=2)
    take = (torch.float32, torch.device("cpu"), lambda *_: None, "w4a16")
    loader.load(some, registry.weights_of(registry.read(some)), *take)
    assert " 44, 77 " in caplog.text
    with pytest.raises(ConfigError, match="--quantization=w4a16"):
        loader.load(none, registry.weights_of(registry.read(none)), *take)
    with pytest.raises(ConfigError, match="--quantization=w4a16"):
        loader.dummy(registry.weights_of(registry.read(none)), *take)


@pytest.mark.parametrize("kind", KINDS)
def test_activations_that_are_no_numbers_fail_their_row_alone_and_zeros_are_zeros(library: Library, kind: BlockKind) -> None:
    lone = Lone(library, [random_blocks(kind, 40, 256, np.random.default_rng(6))])
    for count in (3, 30):
        rows = np.random.default_rng(7).standard_normal((count, 256)).astype(np.float32)
        sound = lone.products(rows)
        for value in (np.nan, np.inf, -np.inf):
            broken = rows.copy()
            broken[1, 37] = value
            found = lone.products(broken)
            assert not np.isfinite(found[1]).any()
            np.testing.assert_array_equal(np.delete(found, 1, axis=0), np.delete(sound, 1, axis=0))
        np.testing.assert_array_equal(lone.products(np.zeros_like(rows)), 0)

"""Where FlashInfer computes attention, with which of its kernels, and where it is refused."""

from __future__ import annotations

import ctypes
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from banyan_runtime.errors import ConfigError
from banyan_runtime.model import kernels
from banyan_runtime.model.attention import backends, flashinfer_paged
from banyan_runtime.model.attention.flashinfer_kernels import ARCHITECTURES, Kind, Module
from banyan_runtime.model.attention.flashinfer_paged import FlashInferAttention
from tests.kernels.test_triton import of_unlike_layers
from tests.unit.model import test_attention
from tests.unit.model.test_attention import spec


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> types.SimpleNamespace:
    """One where FlashInfer computes, with a compiler."""
    here = types.SimpleNamespace(package=tmp_path, capability=(8, 6), programs={"nvcc", "ninja", "c++", "gcc"})
    for name in ("CUDA_PATH", "FLASHINFER_NVCC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    origin = types.SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(flashinfer_paged, "find_spec", lambda name: origin if here.package and name == "flashinfer" else None)
    monkeypatch.setattr(flashinfer_paged, "version", lambda name: "0.7.2")
    monkeypatch.setattr(flashinfer_paged, "_unloadable", lambda path: None)  # they are empty
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: here.capability)
    monkeypatch.setattr(flashinfer_paged.shutil, "which", lambda name: name if Path(name).name in here.programs else None)
    return here


def refusal(
    head_dim: int = 64,
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    kept: torch.dtype | None = None,
    asked: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
) -> str | None:
    return FlashInferAttention.refusal(spec(window, head_dim, soft_cap=soft_cap), torch.device(device), dtype, kept or dtype, asked)


def refused(named: str, **options: Any) -> bool:
    """Whether the options are refused with a reason that matches `named`."""
    return re.search(named, refusal(**options) or "") is not None


def test_it_is_refused_where_it_could_not_compute(machine: types.SimpleNamespace) -> None:
    assert refusal() is None
    assert refused("CUDA", device="cpu")
    assert refused("float16 and bfloat16", dtype=torch.float32)
    assert refused("type", kept=torch.float8_e4m3fn)
    assert refused("64, 128, 256 .*80", head_dim=80)
    here = torch.device("cuda"), torch.bfloat16, torch.bfloat16, True
    assert "every layer" in (FlashInferAttention.refusal(of_unlike_layers(), *here) or "")
    machine.capability = (7, 5)
    assert refused(r"8\.0")
    machine.package = None
    assert refused("flashinfer-python")


def compiled(folder: Path, *modules: Module, architectures: str = "") -> None:
    for module in modules:
        path = module.path(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        if architectures:
            (path.parent / ARCHITECTURES).write_text(architectures)


def loaded(windowed: bool, *kinds: Kind, capped: bool = False) -> list[Module]:
    return [Module(kind, torch.bfloat16, 64, windowed, capped) for kind in kinds]


def test_without_a_compiler_it_needs_kernels_that_were_compiled_ahead(machine: types.SimpleNamespace) -> None:
    ahead = machine.package / "data" / "aot"
    machine.programs = {"nvcc", "c++"}
    assert refused("ninja")
    machine.programs, machine.capability = {"nvcc", "ninja", "c++"}, (9, 0)
    assert refused(f"{machine.package}/cuda/include/curand_kernel.h")
    machine.programs, machine.capability = set(), (8, 6)
    assert refused("nvcc")
    compiled(ahead, *loaded(False, "fa2", "decode"))
    assert refusal() is None
    assert refusal(asked=False) is None
    assert refused("nvcc", head_dim=128)
    assert refused("nvcc", dtype=torch.float16)


def test_every_module_that_will_be_loaded_counts(machine: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three heads share a KV head here, so decode steps have kernels of their own; from four on they have not."""
    ahead = machine.package / "data" / "aot"
    machine.programs = set()
    compiled(ahead, *loaded(False, "fa2"))
    assert refused("nvcc")
    monkeypatch.setattr(test_attention, "HEADS", 8)
    assert refusal() is None
    assert refused("nvcc", window=37)
    compiled(ahead, *loaded(True, "fa2"))
    assert refusal(window=37) is None
    assert refused("nvcc", soft_cap=5.0)
    compiled(ahead, *loaded(False, "fa2", capped=True))
    assert refusal(soft_cap=5.0) is None
    machine.capability = (9, 0)
    assert refusal() is None, "FlashAttention 2's compute prompts, too"
    assert refusal(window=37) is None


@pytest.mark.parametrize(("there", "generation"), [((), "fa3"), (("fa2",), "fa2"), (("fa2", "fa3"), "fa3"), (("fa3",), "fa3")])
def test_nobody_who_compiled_the_quick_kernels_waits_for_the_slow_ones(
    machine: types.SimpleNamespace, there: tuple[Kind, ...], generation: str
) -> None:
    machine.capability = (9, 0)
    compiled(machine.package / "data" / "aot", *loaded(False, *there))
    hopper, ahead = torch.device("cuda"), machine.package / "data" / "aot"
    assert flashinfer_paged._generation(spec(None, 64), torch.bfloat16, hopper, ahead) == generation
    compiled(machine.package / ".cache" / "flashinfer" / "0.7.2" / "90a" / "cached_ops", *loaded(False, "fa2"))
    assert flashinfer_paged._generation(spec(None, 64), torch.bfloat16, hopper, ahead) == generation, "an earlier start was ended"
    machine.capability = (10, 0)
    assert flashinfer_paged._generation(spec(None, 64), torch.bfloat16, hopper, ahead) == "fa2"


def test_kernels_for_another_device_are_no_kernels(machine: types.SimpleNamespace) -> None:
    ahead = machine.package / "data" / "aot"
    compiled(ahead, *loaded(False, "fa2", "decode"), architectures="9.0a")
    assert refused(r"9\.0a.*8\.6")
    compiled(ahead, *loaded(False, "fa2", "decode"), architectures="8.0 9.0a")
    assert refusal() is None


def test_kernels_that_cannot_be_loaded_are_no_kernels(
    machine: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """FlashInfer would only warn, and begin to compile."""
    compiled(machine.package / "data" / "aot", *loaded(False, "fa2", "decode"))
    monkeypatch.setattr(flashinfer_paged, "_unloadable", lambda path: "no libcudart.so.13" if "decode" in path.name else None)
    assert refused(r"no libcudart\.so\.13")
    monkeypatch.undo()
    failing = types.SimpleNamespace(load_module=ctypes.CDLL)
    monkeypatch.setitem(sys.modules, "tvm_ffi", failing)  # FlashInfer brings it, which is not installed without a GPU
    (broken := tmp_path / "broken.so").write_bytes(b"no library")
    assert str(broken) in (flashinfer_paged._unloadable(broken) or "")


def test_what_it_compiles_is_kept_with_all_else(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FLASHINFER_WORKSPACE_BASE", "BANYAN_CACHE"):
        monkeypatch.delenv(name, raising=False)
    assert flashinfer_paged._base() == Path.home()
    monkeypatch.setenv("BANYAN_CACHE", "/cache")
    assert flashinfer_paged._base() == Path("/cache/flashinfer")
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", "/mine")
    assert flashinfer_paged._base() == Path("/mine")


def test_nobody_waits_for_a_compiler_who_did_not_ask_for_it(machine: types.SimpleNamespace) -> None:
    cache = machine.package / ".cache" / "flashinfer"
    for others in ("0.7.1/86", "0.7.2/90a", "0.7.2/186"):
        compiled(cache / others / "cached_ops", *loaded(False, "fa2", "decode"))
    before = cache / "0.7.2" / "75_86" / "cached_ops"
    assert refusal() is None
    assert refused("--attention-backend=flashinfer", asked=False)
    compiled(before, *loaded(False, "fa2"))
    assert refused("--attention-backend=flashinfer", asked=False)
    compiled(before, *loaded(False, "decode"))
    assert refusal(asked=False) is None


def test_it_is_the_choice_behind_triton_and_what_is_refused_is_an_error(
    machine: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu = spec(None, 64), torch.device("cuda"), torch.bfloat16, torch.bfloat16
    assert backends.choose(None, *on_gpu).name == "triton"
    assert backends.choose("flashinfer", *on_gpu).name == "flashinfer"
    compiled(machine.package / "data" / "aot", *loaded(False, "fa2", "decode"))
    assert backends.choose(None, *on_gpu).name == "triton"
    monkeypatch.setattr(kernels.shutil, "which", lambda name: None)  # no compiler that Triton needs
    assert backends.choose(None, *on_gpu).name == "flashinfer"
    with pytest.raises(ConfigError, match=r"--attention-backend=flashinfer: .*CUDA"):
        backends.choose("flashinfer", spec(None, 64), torch.device("cpu"), torch.float32, torch.float32)

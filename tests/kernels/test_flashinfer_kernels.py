"""FlashInfer's kernels, compiled ahead: with a double of its compiler that writes what would be compiled."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from banyan_runtime.model.attention import flashinfer_kernels
from banyan_runtime.model.attention.flashinfer_kernels import Module, compiled_for, runs_on

TYPES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.int32: "i32"}


def named(kind: str, *args: Any) -> str:
    """As FlashInfer 0.7.2.post1 names modules, from the arguments that it makes them of."""
    q, kv, o, index, qk, vo, posenc, swa, cap = args
    return (
        f"batch_{kind}_with_kv_cache_dtype_q_{TYPES[q]}_dtype_kv_{TYPES[kv]}_dtype_o_{TYPES[o]}_dtype_idx_{TYPES[index]}_"
        f"head_dim_qk_{qk}_head_dim_vo_{vo}_posenc_{posenc}_use_swa_{swa}_use_logits_cap_{cap}"
    )


class Compiler:
    """flashinfer.jit and its attention.modules. Objects are kept in a folder, as FlashInfer keeps them below its workspace."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fails = False
        self.renamed = ""
        self.built: list[str] = []
        self.architectures = ""

    def spec(self, name: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(name=name + self.renamed, jit_library_path=self.folder / f"{name}.so")

    def decode(self, *args: Any) -> types.SimpleNamespace:
        return self.spec(named("decode", *args))

    def primary(self, backend: str, *args: Any) -> types.SimpleNamespace:
        assert backend == "fa2"
        return self.spec(f"{named('prefill', *args[:-1])}_f16qk_{args[-1]}_kv_stride_equal")

    def public(self, backend: str, *args: Any) -> types.SimpleNamespace:
        assert backend == "fa3", "FlashAttention 2's are made for caches of any strides then, and are not what plans load"
        return self.spec(f"{named('prefill', *args[:-1])}_f16qk_{args[-1]}_sm90")

    def build(self, specs: list[types.SimpleNamespace], verbose: bool = False, skip_prebuilt: bool = True) -> None:
        assert not skip_prebuilt, "what lies in the package may be for another architecture"
        if self.fails:
            raise RuntimeError("Ninja build failed. Ninja output:\nnvcc: no such file")
        self.architectures = os.environ["FLASHINFER_CUDA_ARCH_LIST"]
        for spec in specs:
            self.built.append(spec.name)
            spec.jit_library_path.write_text(f"{spec.name} for {self.architectures}")


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Compiler]:
    double = Compiler(tmp_path)
    modules = {name: types.ModuleType(name) for name in ("flashinfer", "flashinfer.jit", "flashinfer.jit.attention")}
    vars(modules["flashinfer.jit"]).update(build_jit_specs=double.build)
    vars(modules["flashinfer.jit.attention"]).update(
        modules=types.SimpleNamespace(
            gen_batch_decode_module=double.decode,
            _gen_batch_prefill_primary_module=double.primary,
            gen_batch_prefill_module=double.public,
        )
    )
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "7.5")  # put back, whatever is written over it
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    yield double
    assert "FLASHINFER_DISABLE_JIT" not in os.environ or not double.built


def compile_ahead(folder: Path, line: str = "") -> None:
    flashinfer_kernels.main([str(folder), *line.split()])


def test_modules_lie_where_flashinfer_and_the_refusal_look_for_them(
    compiler: Compiler, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "aot"
    compile_ahead(out, "--head-dims 64 --dtypes bfloat16 float16 --arch 9.0a --windows no")
    assert compiler.architectures == "9.0a"
    start = "batch_prefill_with_kv_cache_dtype_q_bf16_dtype_kv_bf16_dtype_o_bf16_dtype_idx_i32_head_dim_qk_64_head_dim_vo_64_posenc_0_"
    name = start + "use_swa_False_use_logits_cap_False_f16qk_False_kv_stride_equal"
    assert (out / name / f"{name}.so").read_text() == f"{name} for 9.0a"
    for kind in ("decode", "fa2", "fa3"):
        for dtype in (torch.float16, torch.bfloat16):
            assert compiled_for(out, Module(kind, dtype, 64, False)) == ["9.0a"]  # type: ignore[arg-type]
            assert compiled_for(out, Module(kind, dtype, 64, True)) is None  # type: ignore[arg-type]
    assert sorted(path.name for path in out.iterdir()) == sorted(compiler.built)
    assert f" {len(name) + 9}  {name}\n" in (said := capsys.readouterr().out)
    assert "bytes in 6 modules for 9.0a, " in said


def test_by_default_all_widths_that_are_common_with_and_without_windows(compiler: Compiler, tmp_path: Path) -> None:
    compile_ahead(tmp_path / "aot")
    assert len(set(compiler.built)) == 12
    compiler.built.clear()
    compile_ahead(tmp_path / "aot", "--arch 8.0")
    assert len(set(compiler.built)) == 8
    assert not any("sm90" in name for name in compiler.built)
    assert not any("logits_cap_True" in name for name in compiler.built)


def test_kernels_with_a_cap_of_scores_are_asked_for(compiler: Compiler, tmp_path: Path) -> None:
    compile_ahead(tmp_path / "aot", "--head-dims 256 --windows yes --soft-caps yes --arch 9.0a")
    for kind in ("decode", "fa2", "fa3"):
        assert compiled_for(tmp_path / "aot", Module(kind, torch.bfloat16, 256, True, True)) == ["9.0a"]  # type: ignore[arg-type]
    assert len(compiler.built) == 3


def test_what_is_compiled_again_replaces_what_was_there(compiler: Compiler, tmp_path: Path) -> None:
    module, out = Module("fa2", torch.bfloat16, 128, True), tmp_path / "aot"
    compile_ahead(out, "--generations fa2 --arch 9.0a")
    compile_ahead(out, "--generations fa2 --arch 8.0 9.0a")
    assert compiled_for(out, module) == ["8.0", "9.0a"]
    assert module.path(out).read_text().endswith("for 8.0 9.0a")
    assert sorted(path.name for path in module.path(out).parent.iterdir()) == ["architectures", f"{module.name}.so"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--arch 8.0 --generations fa3", "--arch"),
        ("--arch sm_90a", "sm_90a"),
        ("--head-dims 80", " 80 "),
        ("--dtypes float32", "'float32'"),
    ],
)
def test_what_cannot_be_compiled_is_said_before(line: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compile_ahead(tmp_path, line)
    assert said in capsys.readouterr().err


def test_a_compiler_that_fails_leaves_nothing_behind_but_its_words(compiler: Compiler, tmp_path: Path) -> None:
    compiler.fails = True
    with pytest.raises(SystemExit, match="nvcc: no such file"):
        compile_ahead(tmp_path / "aot")
    assert not (tmp_path / "aot").exists()


def test_a_version_that_names_modules_otherwise_is_no_silent_success(compiler: Compiler, tmp_path: Path) -> None:
    compiler.renamed = "_v2"
    with pytest.raises(AssertionError, match=r"batch_decode_with_kv_cache_.*_v2"):
        compile_ahead(tmp_path / "aot")


def test_where_compiled_code_runs() -> None:
    assert runs_on((9, 0), "9.0a")
    assert not runs_on((8, 9), "9.0a")
    assert runs_on((8, 9), "8.0")
    assert not runs_on((8, 0), "8.6")
    assert runs_on((10, 3), "10.0f")
    assert not runs_on((10, 3), "10.0a")
    assert not runs_on((12, 0), "10.0f")
    with pytest.raises(ValueError, match="90"):
        runs_on((9, 0), "90")

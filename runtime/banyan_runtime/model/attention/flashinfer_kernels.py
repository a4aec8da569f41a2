"""FlashInfer's kernels: which of its modules a model's attention asks for, and how they are compiled ahead, without a GPU.

    python -m banyan_runtime.model.attention.flashinfer_kernels FOLDER --head-dims 64 128 --dtypes bfloat16 --arch 9.0a

FlashInfer loads what lies in its package below data/aot, as NAME/NAME.so, and compiles only what does not. So FOLDER is that folder or is
copied there. Compiling needs nvcc (where CUDA_HOME says), ninja and a C++ compiler. The modules need a C++ library no older than that
compiler's, and the CUDA runtime of nvcc's major version, which PyTorch brings. FlashInfer keeps its objects below
FLASHINFER_WORKSPACE_BASE and compiles MAX_JOBS at once: a run that was cut short goes on where it was.

This file imports nothing of ours, so that an image's layer of kernels depends on nothing else.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Final, Literal

import torch

HEAD_DIMS: Final = (64, 128, 256)  # that both generations of kernels are made for
TYPES: Final = {torch.float16: "f16", torch.bfloat16: "bf16"}  # in modules' names
ARCHITECTURES: Final = "architectures"  # a file beside a compiled module: what it was compiled for
Kind = Literal["decode", "fa2", "fa3"]


@dataclass(frozen=True, slots=True)
class Module:
    """What a wrapper's plan loads: FlashInfer has one module for each combination of these. Keys and values have the queries' type."""

    kind: Kind
    dtype: torch.dtype
    head_dim: int
    windowed: bool
    capped: bool = False  # scores, by a tanh

    @property
    def name(self) -> str:
        """FlashInfer's. `compile_all` fails if it calls the module otherwise."""
        dtype, dim = TYPES[self.dtype], self.head_dim
        kind, variant = {
            "decode": ("decode", ""),
            "fa2": ("prefill", "_f16qk_False_kv_stride_equal"),
            "fa3": ("prefill", "_f16qk_False_sm90"),
        }[self.kind]
        return (
            f"batch_{kind}_with_kv_cache_dtype_q_{dtype}_dtype_kv_{dtype}_dtype_o_{dtype}_dtype_idx_i32_"
            f"head_dim_qk_{dim}_head_dim_vo_{dim}_posenc_0_use_swa_{self.windowed}_use_logits_cap_{self.capped}{variant}"
        )

    def spec(self) -> Any:
        """FlashInfer's way to compile it, a JitSpec: `get_batch_prefill_module` and `get_batch_decode_module` ask for the same."""
        from flashinfer.jit.attention import modules

        common = (self.dtype, self.dtype, self.dtype, torch.int32, self.head_dim, self.head_dim, 0, self.windowed, self.capped)
        if self.kind == "decode":
            return modules.gen_batch_decode_module(*common)
        if self.kind == "fa2":
            return modules._gen_batch_prefill_primary_module("fa2", *common, False)
        return modules.gen_batch_prefill_module("fa3", *common, False)

    def path(self, folder: Path) -> Path:
        return folder / self.name / f"{self.name}.so"


def runs_on(capability: tuple[int, int], compiled: str) -> bool:
    """Whether code for an architecture runs on a device: "9.0a" on 9.0, "10.0f" and "8.0" also on later ones of the generation."""
    major, minor, suffix = _architecture(compiled)
    return (major, minor) == capability if suffix == "a" else major == capability[0] and minor <= capability[1]


def compiled_for(folder: Path, module: Module) -> list[str] | None:
    """The architectures that a module in the folder was compiled for; none where that is not known. None: it is not there."""
    path = module.path(folder)
    if not path.exists():
        return None
    noted = path.with_name(ARCHITECTURES)
    return noted.read_text().split() if noted.exists() else []


def compile_all(modules: Sequence[Module], folder: Path, architectures: Sequence[str]) -> None:
    """Modules into a folder. RuntimeError with the compiler's words if it fails."""
    # Read when FlashInfer is imported, which would ask the devices else.
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = " ".join(architectures)
    os.environ.pop("FLASHINFER_DISABLE_JIT", None)
    from flashinfer.jit import build_jit_specs

    specs = [module.spec() for module in modules]
    for module, spec in zip(modules, specs, strict=True):
        assert spec.name == module.name, f"this FlashInfer calls it {spec.name}, where {module.name} is looked for"
    build_jit_specs(specs, verbose=False, skip_prebuilt=False)
    for module, spec in zip(modules, specs, strict=True):
        target = module.path(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(spec.jit_library_path, part := target.with_suffix(".part"))
        part.replace(target)  # what is being read elsewhere stays whole
        target.with_name(ARCHITECTURES).write_text(" ".join(architectures) + "\n")


def _architecture(name: str) -> tuple[int, int, str]:
    if (found := re.fullmatch(r"(\d+)\.(\d)([af]?)", name)) is None:
        raise ValueError(f"{name} is no architecture, such as 8.0, 9.0a or 10.0f")
    return int(found[1]), int(found[2]), found[3]


def _named(name: str) -> str:
    try:
        _architecture(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}") from error
    return name


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("flashinfer_kernels", description="Compile FlashInfer's kernels ahead, without a GPU.")
    types = [str(dtype).removeprefix("torch.") for dtype in TYPES]
    parser.add_argument("folder", type=Path, help="where they go; FlashInfer reads data/aot in its package")
    parser.add_argument("--head-dims", type=int, nargs="+", choices=HEAD_DIMS, default=[64, 128])
    parser.add_argument("--dtypes", nargs="+", choices=types, default=["bfloat16"])
    parser.add_argument("--windows", nargs="+", choices=["no", "yes"], default=["no", "yes"], help="layers without and with one")
    parser.add_argument("--soft-caps", nargs="+", choices=["no", "yes"], default=["no"], help="scores without and with one (Gemma 2)")
    parser.add_argument("--generations", nargs="+", choices=["fa2", "fa3"], help="fa3 is for prompts on 9.0a (default: what ARCH takes)")
    parser.add_argument("--arch", type=_named, nargs="+", default=["9.0a"], help="what they are compiled for, such as 8.0 9.0a")
    return parser


def main(arguments: Iterable[str] | None = None) -> None:
    parser = _parser()
    asked = parser.parse_args(None if arguments is None else list(arguments))
    hopper = "9.0a" in asked.arch
    generations = asked.generations or (["fa2", "fa3"] if hopper else ["fa2"])
    if "fa3" in generations and not hopper:
        parser.error("--generations fa3 runs on 9.0a alone: name it in --arch too, or leave fa3 out")
    kinds: list[Kind] = [kind for kind in ("decode", "fa2", "fa3") if kind == "decode" or kind in generations]
    modules = [
        Module(kind, getattr(torch, dtype), head_dim, window == "yes", cap == "yes")
        for kind, dtype, head_dim, window, cap in product(kinds, asked.dtypes, asked.head_dims, asked.windows, asked.soft_caps)
    ]
    started = time.monotonic()
    try:
        compile_all(modules, asked.folder, asked.arch)
    except RuntimeError as error:
        raise SystemExit(f"{error}") from error
    sizes = {module: module.path(asked.folder).stat().st_size for module in modules}
    for module, size in sizes.items():
        print(f"{size:>10,}  {module.name}")
    print(f"{sum(sizes.values()):>10,} bytes in {len(sizes)} modules for {' '.join(asked.arch)}, {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()

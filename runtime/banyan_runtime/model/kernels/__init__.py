"""Kernels in Triton, for CUDA; its interpreter runs them on the CPU for tests (`TRITON_INTERPRET=1` before they are imported)."""

from __future__ import annotations

import os
import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import torch


def missing() -> str | None:
    """What is not there and Triton needs to compile for a GPU, in words that go on after "it is not used:"; or None."""
    if find_spec("triton") is None:
        return "the package triton is not installed"
    if not os.environ.get("CC") and shutil.which("gcc") is None and shutil.which("clang") is None:
        return "Triton finds no C compiler, gcc or clang"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return f"Triton finds no Python.h in {sysconfig.get_path('include')}, which Debian has in python3-dev"
    return None


def needed_capability(kept: torch.dtype) -> tuple[int, int]:
    """Of a device, for kernels that read and write such keys and values."""
    return (8, 9) if kept == torch.float8_e4m3fn else (8, 0)


def power_of_two(number: int) -> int:
    """The next one, or the number itself."""
    return 1 << (number - 1).bit_length()

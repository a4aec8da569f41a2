"""Kernels in Triton, for CUDA; its interpreter runs them on the CPU for tests (`TRITON_INTERPRET=1` before they are imported)."""

from __future__ import annotations

import os
import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import torch

FEWEST_ROWS: Final = 16  # of a tile: what tensor cores take
SMALL: Final = 99 << 10
LARGE: Final = 160 << 10
"""Bytes of shared memory: a datacentre's GPUs let a program have so much, others SMALL."""


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


def shared_bytes(device: torch.device) -> int:
    """Of shared memory, that a program may have there."""
    told = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return int(getattr(told, "shared_memory_per_block_optin", SMALL))

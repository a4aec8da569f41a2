"""Triton's kernels compiled for a GPU that is not there, in a process that is not told to interpret them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_BEFORE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

def made(function, types, constants, **options):
    '''For a Hopper. `types` of arguments; all others are constants. Pointers are to multiples of 16, as those of tensors, and so are
    distances between rows of one: reads are not in flight side by side otherwise, and take other memory.'''
    signature = {name: types.get(name, "constexpr") for name in function.arg_names}
    aligned = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(function.arg_names)
               if signature[name].startswith("*") or name in ("stride", "delta_stride", "head_stride")}
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=aligned)
    found = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert found.metadata.shared <= 227 * 1024, (constants, found.metadata.shared)
    return found
"""


def run(script: str, scratch: Path) -> str:
    """What a script prints that makes kernels by `made`."""
    others = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", _BEFORE + script],
        env={**others, "TRITON_CACHE_DIR": str(scratch)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout

"""For which processors the library is compiled, and which of them this one is. Pure but for the flags that it is given."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from typing import Final

from banyan_runtime.errors import ConfigError

VARIABLE: Final = "BANYAN_NATIVE_VARIANT"


@dataclass(frozen=True, slots=True)
class Variant:
    """One set of instructions that the library is compiled for."""

    name: str
    needs: frozenset[str]  # flags of /proc/cpuinfo
    options: tuple[str, ...]  # of the compiler
    machine: str | None = None  # as `platform.machine` says; None: any


_AVX2: Final = frozenset({"avx2", "fma", "f16c"})
_AVX512: Final = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
_AVX2_OPTIONS: Final = ("-mavx2", "-mfma", "-mf16c")
_AVX512_OPTIONS: Final = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512", *_AVX2_OPTIONS)

# Processors that multiply bfloat16 have the older instructions for sums of bytes (VNNI), too.
_BF16: Final = _AVX512 | {"avx512_vnni", "avx512_bf16"}
_BF16_OPTIONS: Final = (*_AVX512_OPTIONS, "-mavx512vnni", "-mavx512bf16")

VARIANTS: Final = (
    Variant("amx", _BF16 | {"amx_tile", "amx_bf16"}, (*_BF16_OPTIONS, "-mamx-tile", "-mamx-bf16"), "x86_64"),
    Variant("avx512bf16", _BF16, _BF16_OPTIONS, "x86_64"),
    Variant("avx512", _AVX512, _AVX512_OPTIONS, "x86_64"),
    Variant("avx2", _AVX2, _AVX2_OPTIONS, "x86_64"),
    Variant("portable", frozenset(), ()),
)
"""The fastest first. The last one runs anywhere."""


def usable(flags: frozenset[str]) -> list[Variant]:
    """Those that a processor with these flags can run, the fastest first."""
    return [variant for variant in VARIANTS if variant.needs <= flags and variant.machine in (None, platform.machine())]


def choose(flags: frozenset[str]) -> list[Variant]:
    """Those that come into question, the fastest first; or the one that $BANYAN_NATIVE_VARIANT names. Raises ConfigError where that one
    cannot run."""
    there = usable(flags)
    if not (wanted := os.environ.get(VARIABLE)):
        return there
    if found := [variant for variant in there if variant.name == wanted]:
        return found
    names = ", ".join(variant.name for variant in there)
    raise ConfigError(f"cannot run on this processor; leave it out, or set it to one of: {names}", field=VARIABLE, value=wanted)

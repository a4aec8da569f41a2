"""How each of a GPU's processors divides its memory between cache and shared memory while a kernel runs.

The driver chooses for each kernel by itself, as little shared memory as lets it run, and a processor that is divided otherwise has to be
idle before it is divided anew. Kernels that should run side by side, of which one keeps much in shared memory, are told of the same
division; a graph keeps what they were told when it was captured. Hints: they change no number.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

_PREFERRED: Final = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in hundredths
_DRIVERS_OWN: Final = -1
_ALL: Final = 100

_loaded: dict[int, int] = {}  # of each function what it was told before
_first = False  # whether shared memory comes first now


@cache
def watch() -> None:
    """Know Triton's kernels that are loaded from now on."""
    from triton import knobs

    hook: Any = getattr(knobs.runtime, "kernel_load_end_hook", None)
    if hasattr(hook, "add"):  # else it is a Triton that tells nobody
        hook.add(_note)


@contextmanager
def shared_memory_first() -> Iterator[None]:
    """What is captured meanwhile runs with as much shared memory as there is."""
    global _first
    _first = True
    for function in tuple(_loaded):
        _tell(function, _ALL)
    try:
        yield
    finally:
        _first = False
        for function, before in tuple(_loaded.items()):
            _tell(function, before)


def _note(module: Any, function: int, *others: Any) -> None:
    driver = _driver()
    if driver is None:
        return
    found = ctypes.c_int(_DRIVERS_OWN)  # Triton itself asks for much where a kernel needs much
    failed = driver.cuFuncGetAttribute(ctypes.byref(found), ctypes.c_int(_PREFERRED), ctypes.c_void_p(function))
    _loaded[function] = _DRIVERS_OWN if failed else found.value
    if _first:
        _tell(function, _ALL)


def _tell(function: int, hundredths: int) -> None:
    driver = _driver()
    assert driver is not None, "what was noted was asked for by it"
    driver.cuFuncSetAttribute(ctypes.c_void_p(function), ctypes.c_int(_PREFERRED), ctypes.c_int(hundredths))


@cache
def _driver() -> Any | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:  # somewhere else; a hint must not keep a kernel from being loaded
        return None

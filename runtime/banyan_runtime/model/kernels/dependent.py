"""Programmatic dependent launch: a kernel is brought up while the one before it ends, which spares about a microsecond of each.

A kernel that is launched so calls `await_earlier` before it reads what kernels before it wrote, or writes anything. It may have read
weights, keys of earlier steps, and what a step is told, which is brought to the device before the step's first kernel begins (`post.py`).
Some programs of each kernel wait, so that it has not ended before those before it have: whoever waits for it relies on that.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def await_earlier(DEPENDENT: tl.constexpr, LATE: tl.constexpr = False):
    """Wait until what the kernels before wrote is there. The next may be brought up; LATE: `bring_up_next` says when."""
    if DEPENDENT:
        if not LATE:
            gdc_launch_dependents()
        gdc_wait()


@triton.jit
def bring_up_next(DEPENDENT: tl.constexpr):
    if DEPENDENT:
        gdc_launch_dependents()


@cache
def options(device: torch.device) -> Mapping[str, Any]:
    """How kernels are launched there. Compute capability 9.0 is the first that can."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"DEPENDENT": True, "launch_pdl": True}
    return {"DEPENDENT": False}

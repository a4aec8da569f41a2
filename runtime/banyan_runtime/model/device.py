"""Which device and number type a server computes with, and how much memory is left there."""

from __future__ import annotations

import logging
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from banyan_runtime.config import ServerConfig
from banyan_runtime.errors import ConfigError
from banyan_runtime.model import host
from banyan_runtime.models.config import DecoderSpec

log = logging.getLogger("banyan")

_NAMES: Final = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}
_NO_DEVICE: Final = "No CUDA GPUs"  # torch's words where the driver is there, and shows none
_NO_ROOM: Final = (  # in a library's words, some of which cannot begin for want of memory
    "out of memory", "out_of_memory", "memoryallocation", "status_alloc_failed", "cublas_status_not_initialized", "can't allocate memory",
    "failed to allocate memory", "bad_alloc",
)  # fmt: skip
_BF16_FLAGS: Final = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Flags of /proc/cpuinfo that mean fast products in bfloat16; `bf16` is ARM's."""


def choose_device(config: ServerConfig) -> torch.device:
    """The device that --device names, or cuda where there is one. Raises ConfigError where it is not there."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"{_why_no_cuda()}, or use --device=cpu", field="--device", value="cuda")
    name = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name, 0) if name == "cuda" else torch.device(name)


def _why_no_cuda() -> str:
    """With what to do about it."""
    if torch.version.cuda is None:
        return (
            f"this PyTorch ({torch.__version__}) is built without CUDA; install one that is (make install TORCH='torch==2.13.0'; for a "
            "pod: make images TORCH='torch==2.13.0', and name the image in spec.runtime.image)"
        )
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except Exception as error:  # which says what the driver lacks
        if _NO_DEVICE not in str(error):
            said = " ".join(str(error).split())[:300].rstrip(".")
            return (
                f"PyTorch {torch.__version__} cannot use CUDA {torch.version.cuda} here: {said}. Install a driver for it, or a PyTorch for "
                "the driver (TORCH='torch==VERSION+cuNNN')"
            )
    return "no CUDA device was found; look at what nvidia-smi shows, and at CUDA_VISIBLE_DEVICES"


def choose_dtype(config: ServerConfig, spec: DecoderSpec, device: torch.device, *, fast_bf16: bool = False) -> torch.dtype:
    """The type of weights and activations: --dtype, or what computes fast. Never float16 on the CPU.

    `fast_bf16`: bfloat16 is fast on this CPU without instructions for it, since weights are widened on their way to the multiplier.
    """
    checkpoint = _NAMES.get(spec.dtype or "float32", torch.float32)
    if config.dtype == "auto":
        if device.type != "cpu":
            chosen = _fast_on_cuda(checkpoint, device)
        else:
            chosen = torch.bfloat16 if fast_bf16 and checkpoint == torch.bfloat16 else _fast_on_cpu()
    else:
        chosen = _NAMES[config.dtype]
        if chosen == torch.float16 and device.type == "cpu":
            raise ConfigError(
                "is not supported on the CPU, which has no fast products for it; use bfloat16 or float32",
                field="--dtype",
                value=config.dtype,
            )
    if chosen != checkpoint:
        if torch.float32 in (chosen, checkpoint):
            log.info("%s %s to %s.", "Upcasting" if chosen == torch.float32 else "Downcasting", checkpoint, chosen)
        else:
            log.warning("Casting %s to %s.", checkpoint, chosen)
    return chosen


def available_bytes(device: torch.device) -> int:
    """Memory of the device that can still be allocated; of the host, where the device is the CPU."""
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    return host.memory_available()


def shortage(error: BaseException | None) -> str | None:
    """What was said, if it is memory that was missing: torch says so by a type of its own, Python likewise, driver and libraries in words,
    and behind a capture that ended early it may be what came before the error."""
    while error is not None:
        worded = isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _NO_ROOM)
        if worded or isinstance(error, torch.OutOfMemoryError | MemoryError):
            return " ".join(str(error).split()) or type(error).__name__
        error = error.__cause__ or error.__context__
    return None


def tensor(column: npt.NDArray[np.generic], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """A copy of a step's column on the device."""
    own = pinned(column, device, dtype)
    return own if device.type == "cpu" else own.to(device, non_blocking=True)


def pinned(column: npt.NDArray[np.generic], device: torch.device, dtype: torch.dtype) -> Tensor:
    """A copy of a column on the host, for a device. torch takes over an array only if it may write to it, which a step forbids; from
    memory that is not pinned a copy to a GPU would wait for all that the GPU was given before."""
    own = torch.from_numpy(column.astype(_numpy(dtype)))  # several times cheaper than torch.tensor
    return own.pin_memory() if device.type == "cuda" else own


def zeros(shape: tuple[int, int], device: torch.device) -> Tensor:
    """int32 zeros; on the host they take no memory until they are written."""
    return torch.from_numpy(host.zeros(shape)) if device.type == "cpu" else torch.zeros(shape, dtype=torch.int32, device=device)


@cache
def _numpy(dtype: torch.dtype) -> np.dtype[np.generic]:
    return np.dtype(name(dtype))


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _fast_on_cpu() -> torch.dtype:
    return torch.bfloat16 if _BF16_FLAGS & host.instruction_sets() else torch.float32


def _fast_on_cuda(checkpoint: torch.dtype, device: torch.device) -> torch.dtype:
    """Half-width types have tensor cores; bfloat16 only from compute capability 8.0 on."""
    if torch.cuda.get_device_capability(device) < (8, 0):
        return torch.float16
    return torch.float16 if checkpoint == torch.float32 else checkpoint

"""How many API processes a server has by default."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from banyan_runtime.config import ServerConfig

MOST: Final = 4
"""Eight answered 6 % more of 256 streams than four on an H200's machine, and one stream later (benchmarks/results)."""
PROCESSORS: Final = 4  # for each: the engine, who prepares requests and their clients have some of them
MEMORY: Final = 4 << 30  # bytes for each, of which it takes a tenth: models are read through the rest
_DRIVERS: Final = ("/dev/nvidiactl", "/dev/dxg")  # the system's, the latter within Windows


def by_itself(processors: int, memory: int) -> int:
    """Beside a GPU, where so many processors and bytes of memory may be used."""
    return max(1, min(MOST, processors // PROCESSORS, memory // MEMORY))


def wanted(config: ServerConfig) -> int:
    """What is asked for, or else what this machine is large enough for; the first process included. A model that the CPU computes needs
    the processors itself, and is never so fast that one process could not answer for it."""
    if config.tokenizer_worker_num is not None:
        return config.tokenizer_worker_num
    if not _has_gpu(config):
        return 1
    from banyan_runtime.model import host  # which brings numpy

    return by_itself(host.processors(), host.memory_limit())


def _has_gpu(config: ServerConfig) -> bool:
    """Told without PyTorch, which is not there yet. Where it is mistaken, the processes are too many or too few, and no more."""
    if config.device is not None:
        return config.device != "cpu"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return not hidden and any(Path(driver).exists() for driver in _DRIVERS)

"""What this process may use of its machine: cores, memory, instruction sets. Control groups count, not the hardware."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

CGROUPS = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60  # version 1 of control groups writes a number near 2**63 where there is no limit


def cores() -> int:
    """Compute threads worth starting: the affinity mask, cut by the CPU quota; OMP_NUM_THREADS wins over both."""
    if (wanted := os.environ.get("OMP_NUM_THREADS", "")).isdigit() and int(wanted) > 0:
        return int(wanted)
    return processors()


def processors() -> int:
    """That this process may use: the affinity mask, cut by the CPU quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for folder in _groups("cpu") if (quota := _quota(folder)) is not None]
    return max(1, min([allowed, *(math.ceil(quota) for quota in quotas)]))


def memory_limit() -> int:
    """Bytes this process may use at most: the smallest limit of its control groups, or the machine's memory."""
    limits = [limit for folder in _groups("memory") if (limit := _read_int(folder, "memory.max", "memory.limit_in_bytes")) is not None]
    return min([_meminfo("MemTotal"), *limits])


def memory_available() -> int:
    """Bytes that can still be allocated without swapping or being killed. Page cache counts as available."""
    free = [_meminfo("MemAvailable")]
    for folder in _groups("memory"):
        limit = _read_int(folder, "memory.max", "memory.limit_in_bytes")
        used = _read_int(folder, "memory.current", "memory.usage_in_bytes")
        if limit is not None and used is not None:
            free.append(limit - used + _cache(folder))
    return max(0, min(free))


def zeros(shape: tuple[int, int]) -> npt.NDArray[np.int32]:
    """Zeros that take memory page by page as they are written. numpy's own would take huge pages: all of a table of which the
    beginning of each row is written."""
    size = max(1, shape[0] * shape[1]) * np.dtype(np.int32).itemsize
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.int32, shape[0] * shape[1]).reshape(shape)


def instruction_sets() -> frozenset[str]:
    """The flags of the first core in /proc/cpuinfo (x86 `flags`, ARM `Features`); empty where there is no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def _groups(controller: str) -> Iterator[Path]:
    """Folders of the control groups that this process is in, from the innermost to the root."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root = CGROUPS
        elif controller in controllers.split(","):
            root = CGROUPS / controller
        else:
            continue
        folder = root / path.lstrip("/")
        yield from (parent for parent in [folder, *folder.parents] if parent.is_relative_to(root) and parent.is_dir())


def _quota(folder: Path) -> float | None:
    """Cores that a group may use on average, or None."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text(encoding="ascii").strip()
            period = (folder / "cpu.cfs_period_us").read_text(encoding="ascii").strip()
        return float(quota) / float(period) if quota != "max" and float(quota) > 0 else None
    except (OSError, ValueError):
        return None


def _read_int(folder: Path, *names: str) -> int | None:
    for name in names:
        try:
            value = int((folder / name).read_text(encoding="ascii"))
        except (OSError, ValueError):
            continue
        return value if value < _UNLIMITED else None
    return None


def _cache(folder: Path) -> int:
    """Bytes of clean page cache charged to a group: the kernel gives them back when asked."""
    try:
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    stats = dict(line.split(maxsplit=1) for line in lines)
    return int(stats.get("inactive_file", 0)) + int(stats.get("active_file", 0))


def _meminfo(key: str) -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise AssertionError(f"/proc/meminfo has no {key}")

"""Which of this machine's GPUs are free. Pods get theirs by CUDA_VISIBLE_DEVICES; those that ask for none see none."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Sequence

from banyan_operator.plan import Manifest

RESOURCE_SUFFIX = "/gpu"
"""nvidia.com/gpu, amd.com/gpu …: whatever the manifest calls it, here it is one of the devices found."""


def find_devices() -> list[str]:
    """The devices that this process may hand out: CUDA_VISIBLE_DEVICES if set, else all that nvidia-smi lists."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is not None:
        return [device.strip() for device in allowed.split(",") if device.strip()]
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    try:
        listed = subprocess.run(
            [command, "--query-gpu=index", "--format=csv,noheader"], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return listed.stdout.split()


def wanted(container: Manifest) -> tuple[str, int]:
    """Resource name and count of the accelerators that a container's limits ask for; ('', 0) for none."""
    for name, count in container.get("resources", {}).get("limits", {}).items():
        if name.endswith(RESOURCE_SUFFIX):
            return name, int(count)
    return "", 0


class Accelerators:
    """Who holds which device. `look`: who waits for one looks again."""

    def __init__(self, devices: Sequence[str]) -> None:
        self.look = asyncio.Event()
        self._free = list(devices)
        self._held: dict[str, dict[str, list[str]]] = {}

    def assign(self, pod: str, spec: Manifest) -> str | None:
        """Give every container of the pod its devices, all or none; if there are too few, the scheduler's words for it."""
        needs = {one["name"]: wanted(one) for one in (*spec.get("initContainers", ()), *spec["containers"])}
        total = sum(count for _, count in needs.values())
        if total > len(self._free):
            name = next(name for name, count in needs.values() if count)
            return f"0/1 nodes are available: 1 Insufficient {name}. This machine has {len(self._free)} free, the pod asks for {total}."
        self._held[pod] = {name: [self._free.pop(0) for _ in range(count)] for name, (_, count) in needs.items()}
        return None

    def of(self, pod: str, container: str) -> list[str]:
        return self._held.get(pod, {}).get(container, [])

    def release(self, pod: str) -> None:
        for devices in self._held.pop(pod, {}).values():
            self._free += devices
        self.look.set()

"""Seconds to read a checkpoint into memory: as the runtime does, and as the safetensors library does, tensor by tensor.

    python benchmarks/loading.py FOLDER [--rounds 3] [--device cuda] [--out FILE]

One after another, A B A B, with the files out of the system's cache (which takes root) and in it, behind a round that is not kept: the
first takes what a device needs to begin. `read` is what several readers need for the same bytes and nothing else, the limit.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
from safetensors import safe_open
from torch import Tensor

from banyan_runtime.hub import checkpoint
from banyan_runtime.model import loader, reading
from banyan_runtime.model.reading import Span, Wanted
from banyan_runtime.models import registry
from banyan_runtime.models.weight_map import WeightMap

DROP: Final = Path("/proc/sys/vm/drop_caches")


def runtime(folder: Path, wanted: WeightMap, device: torch.device) -> None:
    loader.load(folder, wanted, torch.bfloat16, device, lambda *_: None)


def library(folder: Path, wanted: WeightMap, device: torch.device) -> None:
    """Into the same parameters."""
    parameters = {name: torch.empty(shape, dtype=torch.bfloat16, device=device) for name, shape in wanted.parameters.items()}
    for file in checkpoint.files(folder):
        with safe_open(str(file), framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 - a shard cannot be iterated
                if (place := wanted.slices.get(name)) is not None:
                    rows = slice(place.first_row, place.first_row + place.shape[0])
                    parameters[place.parameter][rows].copy_(shard.get_tensor(name))


def bare(folder: Path, wanted: WeightMap, device: torch.device) -> None:
    """The files' bytes, wherever they belong."""
    files = checkpoint.files(folder)
    targets: list[Tensor] = [torch.empty(file.stat().st_size, dtype=torch.uint8) for file in files]
    spans = [Wanted(file.name, Span(file, 0, torch.uint8), target) for file, target in zip(files, targets, strict=True)]
    reading.read(spans, lambda _: None)


WAYS: Final[dict[str, Callable[[Path, WeightMap, torch.device], None]]] = {"runtime": runtime, "library": library, "read": bare}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    wanted, device = registry.weights_of(registry.read(options.folder)), torch.device(options.device)
    nbytes = sum(file.stat().st_size for file in checkpoint.files(options.folder))
    seconds: dict[tuple[str, str], list[float]] = {}
    for way in WAYS.values():
        way(options.folder, wanted, device)
    for state in ("cold", "warm"):
        for _ in range(options.rounds):
            for name, way in WAYS.items():
                if state == "cold":
                    DROP.write_text("3")
                started = time.perf_counter()
                way(options.folder, wanted, device)
                if device.type == "cuda":
                    torch.cuda.synchronize()
                seconds.setdefault((state, name), []).append(time.perf_counter() - started)
    lines = [f"{nbytes / 1e9:.2f} GB to {device}, torch {torch.__version__}; medians of {options.rounds}"]
    for (state, name), found in seconds.items():
        best = statistics.median(found)
        lines.append(f"{state:6} {name:8} {best:8.2f} s {nbytes / best / 1e9:7.2f} GB/s")
    print("\n".join(lines))
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

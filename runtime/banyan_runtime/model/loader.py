"""Checkpoint files → parameters. Shards are memory-mapped and copied tensor by tensor into their place, so the peak is the
model and one tensor. Everything is checked against the layout before the first byte is copied.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from banyan_runtime.errors import ConfigError, ModelError
from banyan_runtime.hub import checkpoint
from banyan_runtime.hub.checkpoint import StoredTensor
from banyan_runtime.hub.files import shown
from banyan_runtime.model import device as devices
from banyan_runtime.model.layout import COMPUTED, Layout

Progress = Callable[[str, int, str], None]
"""(phase, percent of the phase, detail)"""

DUMMY_SEED: Final = 1234  # per parameter, so a value depends on the parameter's size and type only
DUMMY_RANGE: Final = 1e-3
_FLOATS: Final = frozenset({"F64", "F32", "F16", "BF16"})
_NAMED: Final = 10  # tensors named in one error
_GIB: Final = 1 << 30

log = logging.getLogger("banyan")


def load(model_dir: Path, layout: Layout, dtype: torch.dtype, device: torch.device, progress: Progress) -> dict[str, Tensor]:
    """All parameters of the layout, filled from the *.safetensors files of a folder.

    Raises ModelError that names file and tensor for what is missing, truncated, of another shape, or surplus; ConfigError
    where the device has less memory than the parameters need.
    """
    files = _files(model_dir)
    _check(model_dir, layout, _headers(files))
    _fit(layout, dtype, device)
    parameters = {name: torch.empty(shape, dtype=dtype, device=device) for name, shape in layout.parameters.items()}
    with torch.no_grad(), _Report(len(layout.places), progress, "Loading safetensors") as report:
        for file in files:
            try:
                with safe_open(str(file), framework="pt") as shard:
                    for name in shard.keys():  # noqa: SIM118 - a shard cannot be iterated
                        if (place := layout.places.get(name)) is not None:
                            rows = slice(place.first_row, place.first_row + place.shape[0])
                            parameters[place.parameter][rows].copy_(shard.get_tensor(name))
                            report.advance(file.name)
            except (SafetensorError, OSError) as error:  # the file has changed since its header was read
                raise ModelError(f"{file}: is truncated or not a safetensors file ({error}); fetch it again") from error
    return parameters


def dummy(layout: Layout, dtype: torch.dtype, device: torch.device, progress: Progress) -> dict[str, Tensor]:
    """Parameters of the layout with small random values: for schedules, memory and speed, never for text. Raises ConfigError."""
    _fit(layout, dtype, device)
    parameters: dict[str, Tensor] = {}
    with _Report(len(layout.parameters), progress, "Making dummy weights") as report:
        for name, shape in layout.parameters.items():
            generator = torch.Generator("cpu").manual_seed(DUMMY_SEED)
            values = torch.empty(shape, dtype=dtype).uniform_(-DUMMY_RANGE, DUMMY_RANGE, generator=generator)
            parameters[name] = values.to(device)
            report.advance(name)
    return parameters


def _fit(layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse what cannot fit before anything is allocated: later the kernel would end this process without a word."""
    needed, available = layout.elements() * dtype.itemsize, devices.available_bytes(device)
    if needed > available:
        raise ConfigError(
            f"the weights need {needed / _GIB:,.2f} GB in {devices.name(dtype)} and {available / _GIB:,.2f} GB of memory are available on "
            f"{device.type}; use a machine or a memory limit with more, a smaller --dtype, or a smaller model"
        )


def _files(model_dir: Path) -> list[Path]:
    files = checkpoint.files(model_dir)
    if not files:
        hint = "only *.safetensors are read" if any(model_dir.glob("*.bin")) else "fetch the model, or use --load-format dummy"
        raise ModelError(f"Cannot find any model weights with `{model_dir}`; {hint}")
    return files


def _headers(files: list[Path]) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    for file in files:
        for tensor in checkpoint.header(file):
            if tensor.name in found:
                other = found[tensor.name].file.name
                raise ModelError(f"{file.name}: tensor {shown(tensor.name)} is also in {other}; remove the stray file")
            found[tensor.name] = tensor
    return found


def _check(model_dir: Path, layout: Layout, found: dict[str, StoredTensor]) -> None:
    """Compare the files' headers with the layout, before anything is copied."""
    missing = [name for name in layout.places if name not in found]
    if missing:
        raise ModelError(f"{model_dir}: {_listed(missing)} missing from the *.safetensors files, config.json asks for them")
    surplus = [name for name in found if name not in layout.places and name not in layout.ignored and not name.endswith(COMPUTED)]
    if surplus:
        where = found[surplus[0]].file.name
        raise ModelError(
            f"{where}: {_listed(surplus)} surplus, config.json has no place for them; "
            "the checkpoint and its config belong to different models"
        )
    for name, place in layout.places.items():
        tensor = found[name]
        if tensor.shape != place.shape:
            raise ModelError(
                f"{tensor.file.name}: tensor '{name}' has shape {list(tensor.shape)}, config.json asks for {list(place.shape)}; "
                "the checkpoint and its config belong to different models"
            )
        if tensor.dtype not in _FLOATS:
            raise ModelError(f"{tensor.file.name}: tensor '{name}' is {tensor.dtype}; supported are {', '.join(sorted(_FLOATS))}")


def _listed(names: list[str]) -> str:
    listed = ", ".join(shown(name) for name in names[:_NAMED])
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"tensor {listed} is" if len(names) == 1 else f"{len(names)} tensors ({listed}{more}) are"


class _Report:
    """Progress of one loop: a bar on a terminal, else a log line every 10 % or 10 s; and the caller's callback."""

    def __init__(self, total: int, progress: Progress, what: str) -> None:
        self._total = total
        self._progress = progress
        self._what = what
        self._bar = tqdm(total=total, desc=what, unit="tensor", disable=not sys.stderr.isatty(), leave=True)
        self._done = 0
        self._shown = 0  # percent of the last callback
        self._logged = (0, time.monotonic())

    def __enter__(self) -> _Report:
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.close()

    def advance(self, detail: str) -> None:
        self._done += 1
        self._bar.update(1)
        percent = 100 * self._done // self._total
        if percent > self._shown:
            self._shown = percent
            self._progress("loading", percent, detail)
        last, since = self._logged
        if self._bar.disable and (percent // 10 > last // 10 or time.monotonic() - since > 10):
            self._logged = (percent, time.monotonic())
            log.info("%s: %d%% (%d of %d tensors)", self._what, percent, self._done, self._total)

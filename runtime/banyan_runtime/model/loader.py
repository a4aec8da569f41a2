"""Checkpoint files → parameters. They are read into their place (`reading.py`), so the peak is the model; what is quantized on the way goes
tensor by tensor; what a GGUF file holds in blocks stays in the file's own memory. Everything is checked against the weight map before
the first byte is copied.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from tqdm import tqdm

from banyan_runtime.errors import ConfigError, ModelError
from banyan_runtime.hub import checkpoint
from banyan_runtime.hub.files import shown
from banyan_runtime.hub.gguf.files import find
from banyan_runtime.model import blocks, reading
from banyan_runtime.model import device as devices
from banyan_runtime.model.block_values import BlockKind
from banyan_runtime.model.blocks import Blocks, Parameter
from banyan_runtime.model.packed import PackedSafetensors
from banyan_runtime.model.reading import Wanted
from banyan_runtime.model.stored import GgufFile, Safetensors, Source
from banyan_runtime.models.quantization import Packing
from banyan_runtime.models.weight_map import COMPUTED, WeightMap, WeightSlice

Progress = Callable[[str, int, str], None]
"""(phase, percent of the phase, detail)"""

DUMMY_SEED: Final = 1234  # per parameter, so a value depends on the parameter's size and type, and the device, only
DUMMY_RANGE: Final = 1e-3
_NAMED: Final = 10  # tensors named in one error
_GIB: Final = 1 << 30
_VOCABULARY: Final = ("embed", "head", "inputs_embed")
PACKED: Final = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv")
_COMPARED: Final = 1 << 16  # numbers: two matrices that begin alike so far are one that was written twice
_QUANTIZED: Final[dict[str, tuple[BlockKind, BlockKind]]] = {"w8a16": ("Q8_0", "Q8_0"), "w4a16": ("Q4_1", "Q8_0")}
"""What projections and the vocabulary's two matrices become. The head in 4 bits would make SmolLM2's divergence a quarter larger and
its weights an eighth smaller, and larger models less; of the two 4-bit formats Q4_1 is nearer (benchmarks/quantization.py)."""

log = logging.getLogger("banyan")


def load(
    model_dir: Path,
    weights: WeightMap,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
    quantization: str | None = None,
    packing: Packing | None = None,
    plain: bool = False,
) -> dict[str, Parameter]:
    """All parameters of the map, filled from the *.safetensors files of a folder, or from its GGUF file, whose blocks stay blocks.
    `packing`: of the safetensors files. `plain`: whoever computes takes tensors alone, so that blocks become such, one by one.

    With `quantization` matrices become blocks while they are read. Raises ModelError that names file and tensor for what is
    missing, truncated, of another shape or type, or surplus in a layer; ConfigError where the device has less memory than the parameters
    need, and for a `quantization` of what is quantized already.
    """
    source, weights = _examined(model_dir, weights, packing)
    if quantization is not None and (stored := sorted({source.tensors[name].kind for name in weights.slices} & source.block_kinds)):
        raise ConfigError(
            f"{source.tensors[next(iter(weights.slices))].file} holds {', '.join(stored)}: what is "
            "quantized already is not quantized again; leave the option out",
            field="--quantization",
            value=quantization,
        )
    kinds = {name: source.kept(name) or _quantized(place, quantization) for name, place in weights.slices.items()}
    _check_blocks(weights.slices, kinds, quantization)
    started = time.monotonic()
    log.info("Using model weights format ['%s']", source.form)
    if other := _other_head(weights, source):
        log.warning(
            "%s: tensor '%s' is not the embedding, and config.json says that they are one: the embedding is used. If the tensor is meant, "
            "start with --json-model-override-args '{\"tie_word_embeddings\": false}'.",
            source.tensors[other].file.name, other,
        )  # fmt: skip
    fit(_needed(weights.slices, dict.fromkeys(kinds) if plain else kinds, dtype), dtype, device)
    made = _Parameters(weights, kinds, dtype, device, plain)
    with torch.no_grad(), _Report(len(weights.slices), progress, source.title) as report:
        direct = [
            Wanted(name, span, target)
            for name in weights.slices
            if kinds[name] is None
            and weights.slices[name].plain
            and (span := source.span(name))
            and (target := made.target(name)) is not None
        ]
        reading.read(direct, lambda wanted: report.advance(wanted.span.file.name))
        if others := weights.slices.keys() - {wanted.name for wanted in direct}:
            for name, value, detail in source.values(others):
                made.put(name, value)
                report.advance(detail)
    parameters = made.finished()
    if summary := source.changes({name for name, kind in kinds.items() if kind is None}):
        log.warning("%s", summary)
    before = _needed(weights.slices, kinds, dtype)
    _describe(kinds, weights, before, devices.name(dtype))
    if plain and any(kinds.values()):
        _tell_plain(parameters, before, dtype, started)
    return parameters


def needed(model_dir: Path, weights: WeightMap, dtype: torch.dtype, packing: Packing | None, *, plain: bool) -> int:
    """Bytes that `load` takes, from the files' headers. Raises ModelError as `load` does before it reads numbers."""
    source, weights = _examined(model_dir, weights, packing)
    return _needed(weights.slices, {name: None if plain else source.kept(name) for name in weights.slices}, dtype)


def _examined(model_dir: Path, weights: WeightMap, packing: Packing | None) -> tuple[Source, WeightMap]:
    """The weights of a folder and the map in their spelling, compared with one another."""
    source = _open(model_dir, packing)
    weights = weights.spelled(set(source.tensors))
    _check(model_dir, weights, source)
    return source, weights


class _Parameters:
    """Parameters that are being filled."""

    def __init__(
        self, weights: WeightMap, kinds: dict[str, BlockKind | None], dtype: torch.dtype, device: torch.device, plain: bool
    ) -> None:  # fmt: skip
        self._map = weights
        self._kinds = kinds
        self._dtype = dtype
        self._device = device
        mixed = {weights.slices[name].parameter for name, kind in kinds.items() if kind is not None and not plain}
        self._whole = {
            name: torch.empty(shape, dtype=torch.float32 if name in weights.wide else dtype, device=device)
            for name, shape in weights.parameters.items()
            if name not in mixed
        }
        self._parts: dict[str, dict[int, Blocks | Tensor]] = {name: {} for name in mixed}  # by their first row

    def target(self, name: str) -> Tensor | None:
        """Where a checkpoint's tensor belongs; None: it is to be put."""
        place = self._map.slices[name]
        whole = self._whole.get(place.parameter)
        return None if whole is None else whole[place.first_row : place.first_row + place.shape[0]]

    def put(self, name: str, value: Blocks | Tensor) -> None:
        """Take the value of a checkpoint's tensor."""
        place, kind = self._map.slices[name], self._kinds[name]
        if place.order is not None:
            rows = place.order.rows(place.shape[0])
            value = value.taken(rows) if isinstance(value, Blocks) else value[torch.from_numpy(rows)]
        if place.offset and isinstance(value, Tensor):
            value = value.float() + place.offset
        if kind is not None and isinstance(value, Tensor):
            value = blocks.quantize(value, kind)
        assert (value.kind if isinstance(value, Blocks) else None) == kind, (name, kind)
        if (target := self.target(name)) is not None:
            blocks.fill(target, value)
        elif isinstance(value, Tensor):
            self._parts[place.parameter][place.first_row] = value.to(self._device, self._dtype, copy=True)
        else:
            self._parts[place.parameter][place.first_row] = value

    def finished(self) -> dict[str, Parameter]:
        """All parameters, in the order of the map."""
        return {
            name: self._whole[name] if name in self._whole else tuple(part for _, part in sorted(self._parts[name].items()))
            for name in self._map.parameters
        }


def _quantized(place: WeightSlice, quantization: str | None) -> BlockKind | None:
    """What a tensor becomes; None: it stays."""
    if quantization is None or len(place.shape) != 2:
        return None
    kind = _QUANTIZED[quantization][place.parameter in _VOCABULARY]
    return kind if blocks.fits(kind, place.shape[1]) else None


def _check_blocks(places: dict[str, WeightSlice], kinds: dict[str, BlockKind | None], quantization: str | None) -> None:
    """Say which matrices stay what they are although they were to be quantized. Raises ConfigError where all do."""
    matrices = [name for name, place in places.items() if len(place.shape) == 2]
    left = [name for name in matrices if kinds[name] is None]
    if quantization is None or not left:
        return
    widths = ", ".join(map(str, sorted({places[name].shape[1] for name in left})))
    why = f"rows of {widths} numbers are no whole number of blocks of 32"
    if left == matrices:
        message = f"no matrix of this model can be quantized ({why}); leave the option out"
        raise ConfigError(message, field="--quantization", value=quantization)
    log.warning("--quantization=%s: %d of %d matrices stay as they are: %s.", quantization, len(left), len(matrices), why)


def _needed(places: dict[str, WeightSlice], kinds: dict[str, BlockKind | None], dtype: torch.dtype) -> int:
    """Bytes of all parameters."""
    total = 0
    for name, place in places.items():
        kind, (rows, *columns) = kinds[name], place.shape
        width = columns[0] if columns else 1
        total += rows * (blocks.row_bytes(kind, width) if kind is not None else width * dtype.itemsize)
    return total


def _describe(kinds: dict[str, BlockKind | None], weights: WeightMap, nbytes: int, dtype: str) -> None:
    """One line about blocks, where there are any. `nbytes`: of all parameters with them."""
    counts = Counter(kind for kind in kinds.values() if kind is not None)
    if not counts:
        return
    blocked = ", ".join(f"{count} in {kind}" for kind, count in sorted(counts.items()))
    others = sum(kind is None and len(weights.slices[name].shape) == 2 for name, kind in kinds.items())
    log.info(
        "Weights are quantized: matrices %s%s, %.2f GB with all that is not.",
        blocked, f", {others} in {dtype}" if others else "", nbytes / _GIB,
    )  # fmt: skip


def dummy(
    weights: WeightMap, dtype: torch.dtype, device: torch.device, progress: Progress, quantization: str | None = None
) -> dict[str, Parameter]:
    """Parameters of the map with small random values: for schedules, memory and speed, never for text. Raises ConfigError."""
    places = {name: WeightSlice(name, 0, shape) for name, shape in weights.parameters.items()}
    kinds = {name: _quantized(place, quantization) for name, place in places.items()}
    _check_blocks(places, kinds, quantization)
    fit(_needed(places, kinds, dtype), dtype, device)
    parameters: dict[str, Parameter] = {}
    with _Report(len(weights.parameters), progress, "Making dummy weights") as report:
        for name, shape in weights.parameters.items():
            kind = kinds[name]
            maker = device if kind is None else torch.device("cpu")  # a GPU takes no time over what takes a CPU a minute
            generator = torch.Generator(maker).manual_seed(DUMMY_SEED)
            kept = torch.float32 if name in weights.wide else dtype
            values = torch.empty(shape, dtype=kept, device=maker).uniform_(-DUMMY_RANGE, DUMMY_RANGE, generator=generator)
            parameters[name] = values if kind is None else (blocks.quantize(values, kind),)
            report.advance(name)
    return parameters


def dequantized(parameters: dict[str, Parameter], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Parameters for who computes on tensors alone. Takes them over. Raises ConfigError where they do not fit so."""
    if all(isinstance(parameter, Tensor) for parameter in parameters.values()):
        return blocks.dequantized(parameters, dtype, device)
    mixed = [parameter for parameter in parameters.values() if not isinstance(parameter, Tensor)]  # the others lie where they belong
    fit(blocks.elements(mixed) * dtype.itemsize, dtype, device)
    before, started = blocks.nbytes(parameters.values()), time.monotonic()
    tensors = blocks.dequantized(parameters, dtype, device)
    _tell_plain(tensors, before, dtype, started)
    return tensors


def _tell_plain(tensors: Mapping[str, Parameter], before: int, dtype: torch.dtype, started: float) -> None:
    log.warning(
        "This runner does not compute on quantized weights: they were made %s, %.2f GB instead of %.2f GB, in %.1f s, and a token costs "
        "what it would with unquantized ones. --runner native computes on them as they are, on a CPU.",
        devices.name(dtype), blocks.nbytes(tensors.values()) / _GIB, before / _GIB, time.monotonic() - started,
    )  # fmt: skip


def fit(needed: int, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse what cannot fit before anything is allocated: later the kernel would end this process without a word."""
    available = devices.available_bytes(device)
    if needed > available:
        raise ConfigError(
            f"the weights need {needed / _GIB:,.2f} GB in {devices.name(dtype)} and {available / _GIB:,.2f} GB of memory are available on "
            f"{device.type}; use a machine or a memory limit with more, a smaller --dtype, or a smaller model",
            code="insufficient_memory",
        )


def safetensors(model_dir: Path) -> dict[Path, Set[str]]:
    """As `checkpoint.files`. Raises ModelError where there are none."""
    files = checkpoint.files(model_dir)
    if not files:
        hint = "only *.safetensors and *.gguf are read" if any(model_dir.glob("*.bin")) else "fetch the model, or use --load-format dummy"
        raise ModelError(f"Cannot find any model weights with `{model_dir}`; {hint}")
    return files


def _open(model_dir: Path, packing: Packing | None) -> Source:
    """The weights of a folder, their headers read."""
    if (file := find(model_dir)) is not None:
        return GgufFile(file)
    files = safetensors(model_dir)
    if packing is not None:
        return PackedSafetensors(files, packing)
    source = Safetensors(files)
    if strange := next((name for name in source.tensors if name.endswith(PACKED)), None):
        raise ModelError(
            f"{source.tensors[strange].file.name}: tensor {shown(strange)} is of a quantized matrix, and config.json has no "
            "quantization_config that says how; set it by --json-model-override-args, or take another checkpoint of the model"
        )
    return source


def _check(model_dir: Path, weights: WeightMap, source: Source) -> None:
    """Compare the files' headers with the map, before anything is copied."""
    found = source.tensors
    missing = [source.spelled(name) for name in weights.slices if name not in found]
    if missing:
        raise ModelError(f"{model_dir}: {listed(missing)} missing from the {source.form} files, config.json asks for them")
    surplus = [name for name in found if name not in weights.slices and name not in weights.ignored and not name.endswith(COMPUTED)]
    surplus = [name for name in surplus if not source.spare(name)]
    if contradicting := [name for name in surplus if name.startswith(weights.layer_prefix)]:
        raise ModelError(
            f"{found[contradicting[0]].file.name}: {listed([source.spelled(name) for name in contradicting])} surplus, config.json has no "
            "place for them; the checkpoint and its config belong to different models"
        )
    if surplus:
        others = listed([source.spelled(name) for name in surplus])
        log.warning("%s: %s not of the text decoder, and not read.", found[surplus[0]].file.name, others)
    for name, place in weights.slices.items():
        tensor = found[name]
        if tensor.shape != place.shape:
            raise ModelError(
                f"{tensor.file.name}: tensor '{source.spelled(name)}' has shape {list(tensor.shape)}, config.json asks for "
                f"{list(place.shape)}; the checkpoint and its config belong to different models"
            )
        if tensor.kind not in source.kinds:
            raise ModelError(
                f"{tensor.file.name}: tensor '{source.spelled(name)}' is {tensor.kind}; supported are {', '.join(sorted(source.kinds))}"
                f"{source.remedy}"
            )


def _other_head(weights: WeightMap, source: Source) -> str | None:
    """A head that a checkpoint has although its config says that the embedding is the head, unless it is a copy of that.

    Programs differ in which of the two they then take: transformers 4 the embedding, transformers 5 the head.
    """
    (embedding,) = (name for name, place in weights.slices.items() if place.parameter == "embed")
    kept = source.tensors[embedding]
    for name in weights.ignored & source.tensors.keys():
        found = source.tensors[name]
        if (found.kind, found.shape) != (kept.kind, kept.shape):
            return name
        beginnings = [
            Wanted(each, span, torch.empty(min(_COMPARED, math.prod(kept.shape)), dtype=span.kind))
            for each in (embedding, name)
            if (span := source.span(each)) is not None
        ]
        reading.read(beginnings, lambda _: None)
        if len({each.target.view(torch.uint8).numpy().tobytes() for each in beginnings}) > 1:
            return name
    return None


def listed(names: list[str]) -> str:
    first = ", ".join(shown(name) for name in names[:_NAMED])
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"tensor {first} is" if len(names) == 1 else f"{len(names)} tensors ({first}{more}) are"


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

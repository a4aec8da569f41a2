"""A GGUF file to a model folder: config.json, model.safetensors in bfloat16, tokenizer.json, chat template.

Needs the package `gguf` (extra `fetch`), which knows every block format.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from safetensors import TensorSpec, serialize_file

from banyan_runtime.errors import ConfigError, ModelError, UserError
from banyan_runtime.hub.gguf import config, header, tokenizer
from banyan_runtime.hub.gguf.header import Fields
from banyan_runtime.hub.gguf.tensors import half_split, named
from banyan_runtime.hub.gguf.unfold import written
from banyan_runtime.hub.progress import Bar, Report, silent

_SHOWN_CHARACTERS: Final = 300  # of a library's own words


def convert(source: Path, folder: Path, report: Report = silent) -> None:
    """Write the model of the GGUF file `source` into the new folder `folder`.

    Raises ModelError for another architecture or tokenizer than this converter knows, and for a file that is damaged; then
    nothing is left of the folder.
    """
    try:
        import gguf
    except ImportError:
        raise ConfigError("converting a GGUF file needs the package gguf: pip install 'banyan-runtime[fetch]'") from None
    folder.mkdir(parents=True)
    try:
        _convert(gguf, source, folder, report)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, UserError | OSError) or not isinstance(error, Exception):
            raise
        words = " ".join(str(error).split())[:_SHOWN_CHARACTERS]  # whatever a damaged file makes the libraries raise
        raise ModelError(f"{source}: is damaged or cannot be converted ({type(error).__name__}: {words}); fetch it again") from error


def _convert(gguf: Any, source: Path, folder: Path, report: Report) -> None:
    fields = Fields(header.read(source))
    settings = config.config(fields)  # first: it refuses what is of another kind
    texts = {
        "tokenizer.json": tokenizer.tokenizer(fields),
        "tokenizer_config.json": written(config.tokenizer_config(fields)),
        "generation_config.json": written(config.generation_config(fields)),
    }
    found, memory = named(fields), fields.header.memory()
    tensors: dict[str, npt.NDArray[np.uint16]] = {}
    with Bar(f"Converting {source.stem}", len(found), unit="tensor", phase="loading", report=report) as bar:
        for name, each in found.items():
            tensor = each.tensor
            values = gguf.quants.dequantize(tensor.lines(memory), gguf.GGMLQuantizationType[tensor.kind]).reshape(tensor.shape)
            if each.heads is not None:
                values = values[half_split(len(values), each.heads)]
            if each.offset:
                values = values - np.float32(each.offset)
            tensors[name] = _bfloat16(values)
            bar.advance()
    _save(tensors, folder / "model.safetensors")
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    settings["dtype"] = "bfloat16"
    (folder / "config.json").write_text(written(settings), encoding="utf-8")  # last: its presence says that the folder is whole


def _bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The upper halves of float32, rounded to nearest even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def _save(tensors: dict[str, npt.NDArray[np.uint16]], path: Path) -> None:
    """Write bfloat16 tensors. The library's module for numpy has no bfloat16, and the one for torch imports torch."""
    specs = {
        name: TensorSpec(dtype="bfloat16", shape=list(values.shape), data_ptr=values.ctypes.data, data_len=values.nbytes)
        for name, values in tensors.items()
    }
    serialize_file(specs, path, {"format": "pt"})

"""Which tensor of a GGUF file is which of a checkpoint's: names, the order of rows, and what was added to the numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from banyan_runtime.errors import ModelError
from banyan_runtime.hub.files import shown
from banyan_runtime.hub.gguf import architectures, rope
from banyan_runtime.hub.gguf.architectures import Architecture
from banyan_runtime.hub.gguf.header import Fields, StoredTensor
from banyan_runtime.hub.gguf.keys import Keys

_AT_TOP: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_SCALE: Final = "layer_output_scale"  # a number, which a checkpoint has without the end .weight
_NAME: Final = re.compile(r"(?:blk\.(0|[1-9]\d{0,3})\.)?(\w+)\.(weight|bias)", re.ASCII)
_IN_CONFIG: Final = (rope.FACTORS, rope.LONG_FACTORS, rope.SHORT_FACTORS)


@dataclass(frozen=True, slots=True)
class Named:
    """A tensor under the name that it has in a checkpoint. `heads`: its rows are those of so many heads, and within each head
    the two halves that rotate together are interleaved; None: they lie as in a checkpoint. `offset`: what was added to its numbers."""

    tensor: StoredTensor
    heads: int | None = None
    offset: float = 0.0


def named(fields: Fields) -> dict[str, Named]:
    """Every tensor of the file by its name in a checkpoint; one that has none there keeps its own name.

    Raises ModelError for rows that are not those of the heads that the file names.
    """
    known, keys = architectures.of(fields), Keys(fields)
    heads = {"attn_q": keys.size("attention.head_count")} if known.turned else {}
    if known.turned:
        heads["attn_k"] = keys.size("attention.head_count_kv", heads["attn_q"])
    parts = known.parts
    found: dict[str, Named] = {}
    for tensor in fields.header.tensors.values():
        if tensor.name in _IN_CONFIG:
            continue
        layer, part, kind = match.groups() if (match := _NAME.fullmatch(tensor.name)) else (None, "", "")
        if (name := _name(parts, layer, part, kind)) is None:
            found[tensor.name] = Named(tensor)
            continue
        if part in heads and tensor.shape[0] % (2 * heads[part]):
            raise ModelError(
                f"{fields.where}: tensor {shown(tensor.name)} has {tensor.shape[0]} rows, not those of {heads[part]} heads; "
                "fetch the file again"
            )
        if name in found:
            raise ModelError(f"{fields.where}: tensors {shown(found[name].tensor.name)} and {shown(tensor.name)} are one; fetch it again")
        found[name] = Named(tensor, heads.get(part), known.norm_offset if part.endswith("norm") else 0.0)
    return found


def _name(parts: Mapping[str, str], layer: str | None, part: str, kind: str) -> str | None:
    if layer is None:
        return f"{_AT_TOP[part]}.{kind}" if part in _AT_TOP else None
    if part == _SCALE:
        return f"model.layers.{layer}.layer_scalar"
    return f"model.layers.{layer}.{parts[part]}.{kind}" if part in parts else None


def name_in_file(name: str, known: Architecture) -> str:
    """How a GGUF file spells the name of a checkpoint's tensor."""
    stem, _, kind = name.rpartition(".")
    for ours, theirs in _AT_TOP.items():
        if stem == theirs:
            return f"{ours}.{kind}"
    if (match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)) is not None:
        for ours, theirs in known.parts.items():
            if theirs == match[2]:
                return f"blk.{match[1]}.{ours}.{kind}"
    return name


def half_split(rows: int, heads: int) -> npt.NDArray[np.intp]:
    """Which of the interleaved rows comes where a checkpoint has the first halves of a head, then the second ones."""
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(rows)

"""Which tensor of a GGUF file is which of a checkpoint's: names, and the order of rows."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from banyan_runtime.errors import ModelError
from banyan_runtime.hub.files import shown
from banyan_runtime.hub.gguf.header import Fields, StoredTensor

ROPE_FACTORS: Final = "rope_freqs.weight"  # what rotary frequencies are divided by; becomes a part of config.json
_IN_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_AT_TOP: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_NAME: Final = re.compile(r"(?:blk\.(0|[1-9]\d{0,3})\.)?(\w+)\.(weight|bias)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Named:
    """A tensor under the name that it has in a checkpoint. `heads`: its rows are those of so many heads, and within each head
    the two halves that rotate together are interleaved; None: they lie as in a checkpoint."""

    tensor: StoredTensor
    heads: int | None


def named(fields: Fields) -> dict[str, Named]:
    """Every tensor of the file by its name in a checkpoint; one that has none there keeps its own name.

    Raises ModelError for rows that are not those of the heads that the file names.
    """
    heads: dict[str, int] = {}
    if fields.text("general.architecture") == "llama":  # other architectures have the order of checkpoints
        heads["attn_q"] = fields.size("llama.attention.head_count")
        heads["attn_k"] = fields.size("llama.attention.head_count_kv", heads["attn_q"])
    found: dict[str, Named] = {}
    for tensor in fields.header.tensors.values():
        if tensor.name == ROPE_FACTORS:
            continue
        layer, part, kind = match.groups() if (match := _NAME.fullmatch(tensor.name)) else (None, "", "")
        names = _AT_TOP if layer is None else _IN_LAYER
        if part not in names:
            found[tensor.name] = Named(tensor, None)
            continue
        if part in heads and tensor.shape[0] % (2 * heads[part]):
            raise ModelError(
                f"{fields.where}: tensor {shown(tensor.name)} has {tensor.shape[0]} rows, not those of {heads[part]} heads; "
                "fetch the file again"
            )
        there = names[part] if layer is None else f"model.layers.{layer}.{names[part]}"
        found[f"{there}.{kind}"] = Named(tensor, heads.get(part))
    return found


def name_in_file(name: str) -> str:
    """How a GGUF file spells the name of a checkpoint's tensor."""
    stem, _, kind = name.rpartition(".")
    for names, prefix in ((_AT_TOP, ""), (_IN_LAYER, "blk.")):
        for ours, theirs in names.items():
            if not prefix and stem == theirs:
                return f"{ours}.{kind}"
            if prefix and (match := re.fullmatch(rf"model\.layers\.(\d+)\.{re.escape(theirs)}", stem)):
                return f"{prefix}{match[1]}.{ours}.{kind}"
    return name


def half_split(rows: int, heads: int) -> npt.NDArray[np.intp]:
    """Which of the interleaved rows comes where a checkpoint has the first halves of a head, then the second ones."""
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(rows)

"""Checkpoints as other tools quantize them, made of a small model; and the model with the numbers that are left.

GPTQ's tools also write biases of zeros, which no model asks for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .conftest import TinyModel, make

SHAPE: Final = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
GROUP: Final = 64
_AWQ: Final = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight columns stands in the first four bits, in the next …
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Form:
    """`pack`: a matrix [outputs, inputs] → its tensors, by the ends of their names, and the numbers that they mean."""

    config: dict[str, Any]
    pack: Callable[[Tensor], tuple[Tensors, Tensor]]
    blocks: bool = False


def joined(codes: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """[n, 8 * m] numbers of 4 bits → int32 [n, m]."""
    eights = codes.to(torch.int64).reshape(len(codes), -1, 8)
    words = torch.zeros(eights.shape[:2], dtype=torch.int64)
    for place, column in enumerate(order):
        words |= eights[:, :, column] << (4 * place)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def fours(weight: Tensor, group: int, zero: int | None, groups_of: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes [outputs, inputs], scales and zeros [outputs, groups], and the numbers. Scales have so few digits that float16 holds them
    times any zero."""
    rows, columns = weight.shape
    order = torch.arange(columns) // group if groups_of is None else groups_of
    count = int(order.max()) + 1
    scale, zeros = torch.empty(rows, count), torch.empty(rows, count)
    for number in range(count):
        part = weight[:, order == number]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        low[::5] = 0  # whose zero is 0: what lies below is lost
        mantissa, exponent = torch.frexp((high - low) / 14 if zero is None else part.abs().amax(1) / 7)
        scale[:, number] = torch.ldexp((mantissa * 128).round() / 128, exponent)
        zeros[:, number] = (-low / scale[:, number]).round().clamp(0, 15) if zero is None else zero
    codes = (weight / scale[:, order] + zeros[:, order]).round().clamp(0, 15)
    return codes, scale, zeros, (codes - zeros[:, order]) * scale[:, order]


def awq(weight: Tensor) -> tuple[Tensors, Tensor]:
    codes, scale, zeros, values = fours(weight, GROUP, None)
    return {"qweight": joined(codes.T, _AWQ), "qzeros": joined(zeros.T, _AWQ), "scales": scale.T.half()}, values


def gptq(weight: Tensor, lowered: int = 1, shuffled: bool = False, group: int = GROUP) -> tuple[Tensors, Tensor]:
    columns = weight.shape[1]
    order = torch.arange(columns) // group
    if shuffled:
        order = order[torch.randperm(columns, generator=torch.Generator().manual_seed(1))]
    codes, scale, zeros, values = fours(weight, group, None, order)
    less = joined(zeros.T).to(torch.int64) - 0x11111111 * lowered  # from the whole word: a zero of none borrows from its neighbour
    less = (less + (1 << 31)) % (1 << 32) - (1 << 31)
    words = {"qweight": joined(codes).T, "qzeros": less.to(torch.int32)}
    return {**words, "scales": scale.T.half(), "g_idx": order.to(torch.int32), "bias": torch.zeros(len(weight)).half()}, values


def compressed(weight: Tensor, group: int = GROUP) -> tuple[Tensors, Tensor]:
    codes, scale, _, values = fours(weight, group, 8)
    return {"weight_packed": joined(codes), "weight_scale": scale.bfloat16(), "weight_shape": torch.tensor(weight.shape)}, values


def eights(weight: Tensor, kind: torch.dtype, scale: Tensor, spread: Tensor, name: str = "weight_scale") -> tuple[Tensors, Tensor]:
    """`spread`: the scale of each number."""
    most = 448.0 if kind == torch.float8_e4m3fn else 127.0
    codes = (weight / spread).clamp(-most, most)
    codes = (codes.round() if kind == torch.int8 else codes).to(kind)
    return {"weight": codes, name: scale, "input_scale": torch.tensor(0.5)}, codes.float() * spread


def blocks(weight: Tensor) -> tuple[Tensors, Tensor]:
    """Of 48 rows and 80 columns, so that the last ones are smaller."""
    rows, columns = (-(-extent // size) for extent, size in zip(weight.shape, (48, 80), strict=True))
    scale = torch.empty(rows, columns)
    spread = torch.empty_like(weight)
    for row in range(rows):
        for column in range(columns):
            here = slice(48 * row, 48 * row + 48), slice(80 * column, 80 * column + 80)
            scale[row, column] = weight[here].abs().max() / 448
            spread[here] = scale[row, column]
    return eights(weight, torch.float8_e4m3fn, scale, spread, "weight_scale_inv")


def whole(weight: Tensor) -> tuple[Tensors, Tensor]:
    scale = weight.abs().max() / 448
    return eights(weight, torch.float8_e4m3fn, scale, scale.expand(weight.shape))


def by_row(weight: Tensor, kind: torch.dtype) -> tuple[Tensors, Tensor]:
    scale = (weight.abs().amax(1, keepdim=True) / (448 if kind == torch.float8_e4m3fn else 127)).bfloat16()
    return eights(weight, kind, scale, scale.float().expand(weight.shape))


def _of_vllm(form: str, **weights: Any) -> dict[str, Any]:
    own = {"symmetric": True, "actorder": None, "dynamic": False, "group_size": None, **weights}
    groups = {"group_0": {"targets": ["Linear"], "weights": own, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}


_GPTQ: Final = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False}
FORMS: Final = {
    "awq": Form({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}, awq, blocks=True),
    "gptq": Form({**_GPTQ, "desc_act": False}, gptq, blocks=True),
    "gptq, all inputs alike": Form({**_GPTQ, "group_size": -1}, lambda weight: gptq(weight, group=weight.shape[1]), blocks=True),
    "gptq_v2": Form({**_GPTQ, "checkpoint_format": "gptq_v2"}, lambda weight: gptq(weight, lowered=0), blocks=True),
    "gptq, by activations": Form({**_GPTQ, "desc_act": True}, lambda weight: gptq(weight, shuffled=True)),
    "gptq, in narrow groups": Form({**_GPTQ, "group_size": 16}, lambda weight: gptq(weight, group=16)),
    "packed": Form(_of_vllm("pack-quantized", num_bits=4, type="int", strategy="group", group_size=GROUP), compressed, blocks=True),
    "packed rows": Form(
        _of_vllm("pack-quantized", num_bits=4, type="int", strategy="channel"),
        lambda weight: compressed(weight, weight.shape[1]),
        blocks=True,
    ),
    "fp8 in blocks": Form({"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [48, 80]}, blocks),
    "fp8": Form({"quant_method": "fp8", "activation_scheme": "static"}, whole),
    "fp8 by rows": Form(
        _of_vllm("float-quantized", num_bits=8, type="float", strategy="channel"), lambda weight: by_row(weight, torch.float8_e4m3fn)
    ),
    "int8 by rows": Form(
        _of_vllm("int-quantized", num_bits=8, type="int", strategy="channel"), lambda weight: by_row(weight, torch.int8)
    ),
}  # fmt: skip


def write(folder: Path, name: str, family: str = "qwen3", **changes: Any) -> tuple[TinyModel, Tensors]:
    """A checkpoint of a form, with the reference of what it means, and the numbers of its packed matrices."""
    form, model = FORMS[name], make(folder, family, **{**SHAPE, **changes})
    stored = load_file(folder / "model.safetensors")
    meant = {}
    for key in [key for key in stored if key.endswith("_proj.weight")]:
        tensors, meant[key] = form.pack(stored.pop(key).float())
        stored = {key.removesuffix("weight") + end: tensor.contiguous() for end, tensor in tensors.items()} | stored  # its own bias stays
        with torch.no_grad():
            model.reference.get_parameter(key).copy_(meant[key])
    save_file(stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": form.config}))
    return model, meant

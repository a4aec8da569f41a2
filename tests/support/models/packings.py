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

from tests.support.models.tiny import TinyModel, make

SHAPE: Final = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
GROUP: Final = 64
_AWQ: Final = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight columns stands in the first four bits, in the next …
_ORDERS: Final = {bits: tuple(range(32 // bits)) for bits in (4, 8)}
_ONES: Final = {4: 0x11111111, 8: 0x01010101}
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Form:
    """`pack`: a matrix [outputs, inputs] → its tensors, by the ends of their names, and the numbers that they mean."""

    config: dict[str, Any]
    pack: Callable[[Tensor], tuple[Tensors, Tensor]]
    blocks: str = ""  # what they stay in


def joined(codes: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """[n, len(order) * m] numbers of 32 / len(order) bits → int32 [n, m]."""
    together = codes.to(torch.int64).reshape(len(codes), -1, len(order))
    words = torch.zeros(together.shape[:2], dtype=torch.int64)
    for place, column in enumerate(order):
        words |= together[:, :, column] << (32 // len(order) * place)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def grouped(
    weight: Tensor, group: int, zero: int | None, groups_of: Tensor | None = None, most: int = 15
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
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
        mantissa, exponent = torch.frexp((high - low) / (most - 1) if zero is None else part.abs().amax(1) / (most // 2))
        scale[:, number] = torch.ldexp((mantissa * 128).round() / 128, exponent)
        zeros[:, number] = (-low / scale[:, number]).round().clamp(0, most) if zero is None else zero
    codes = (weight / scale[:, order] + zeros[:, order]).round().clamp(0, most)
    if zero is not None:
        codes[:, 3] = 0  # the least that there is, which lies farther from the zero than the largest
    return codes, scale, zeros, (codes - zeros[:, order]) * scale[:, order]


def awq(weight: Tensor) -> tuple[Tensors, Tensor]:
    codes, scale, zeros, values = grouped(weight, GROUP, None)
    return {"qweight": joined(codes.T, _AWQ), "qzeros": joined(zeros.T, _AWQ), "scales": scale.T.half()}, values


def gptq(
    weight: Tensor, lowered: int = 1, shuffled: bool = False, group: int = GROUP, zero: int | None = None, bits: int = 4
) -> tuple[Tensors, Tensor]:
    """With a zero for all, what is written of zeros is what some tools write: nothing that can be read."""
    columns = weight.shape[1]
    order = torch.arange(columns) // group
    if shuffled:
        order = order[torch.randperm(columns, generator=torch.Generator().manual_seed(1))]
    codes, scale, zeros, values = grouped(weight, group, zero, order, (1 << bits) - 1)
    less = joined(zeros.T, _ORDERS[bits]).to(torch.int64)
    if zero is None:
        less -= _ONES[bits] * lowered  # from the whole word: a zero of none borrows from its neighbour
    less = (less + (1 << 31)) % (1 << 32) - (1 << 31)
    words = {"qweight": joined(codes, _ORDERS[bits]).T, "qzeros": less.to(torch.int32)}
    return {**words, "scales": scale.T.half(), "g_idx": order.to(torch.int32), "bias": torch.zeros(len(weight)).half()}, values


def compressed(
    weight: Tensor, group: int = GROUP, bits: int = 4, symmetric: bool = True, shuffled: bool = False
) -> tuple[Tensors, Tensor]:  # fmt: skip
    columns = weight.shape[1]
    order = torch.arange(columns) // group
    if shuffled:
        order = order[torch.randperm(columns, generator=torch.Generator().manual_seed(1))]
    zero = 1 << (bits - 1) if symmetric else None
    codes, scale, zeros, values = grouped(weight, group, zero, order, (1 << bits) - 1)
    found = {"weight_packed": joined(codes, _ORDERS[bits]), "weight_scale": scale.bfloat16(), "weight_shape": torch.tensor(weight.shape)}
    if not symmetric:
        found["weight_zero_point"] = joined(zeros.T, _ORDERS[bits]).T
    if shuffled:
        found["weight_g_idx"] = order.to(torch.int32)
    elif symmetric and bits == 4:
        found["weight_g_idx"] = torch.full((columns,), -1, dtype=torch.int32)  # room that was never used
    return found, values


def eights(weight: Tensor, kind: torch.dtype, scale: Tensor, spread: Tensor, name: str = "weight_scale") -> tuple[Tensors, Tensor]:
    """`spread`: the scale of each number."""
    most = 448.0 if kind == torch.float8_e4m3fn else 127.0
    codes = (weight / spread).clamp(-most, most)
    codes = (codes.round() if kind == torch.int8 else codes).to(kind)
    if kind == torch.int8:
        codes[:, 3] = -128  # which has no counterpart
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
    own = {"symmetric": True, "actorder": None, "dynamic": False, "group_size": None, "observer": "minmax", **weights}
    groups = {"group_0": {"targets": ["Linear"], "weights": own, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}


_GPTQ: Final = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": False}
_EIGHT: Final = {**_GPTQ, "bits": 8}
_GROUPS: Final = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
FORMS: Final = {
    "awq": Form({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}, awq, "Q4_1"),
    "gptq": Form(_GPTQ, gptq, "Q4_1"),
    "gptq, all inputs alike": Form({**_GPTQ, "group_size": -1}, lambda weight: gptq(weight, group=weight.shape[1]), "Q4_1"),
    "gptq_v2": Form({**_GPTQ, "checkpoint_format": "gptq_v2"}, lambda weight: gptq(weight, lowered=0), "Q4_1"),
    "gptq, by activations": Form({**_GPTQ, "desc_act": True}, lambda weight: gptq(weight, shuffled=True)),
    "gptq, in narrow groups": Form({**_GPTQ, "group_size": 16}, lambda weight: gptq(weight, group=16)),
    "gptq, symmetric": Form({**_GPTQ, "sym": True}, lambda weight: gptq(weight, zero=8), "Q4_1"),
    "gptq of 8 bits": Form({**_EIGHT, "sym": True}, lambda weight: gptq(weight, zero=128, bits=8), "Q8_0"),
    "gptq of 8 bits, with zeros": Form(_EIGHT, lambda weight: gptq(weight, bits=8)),
    "packed": Form(_of_vllm("pack-quantized", **_GROUPS), compressed, "Q4_1"),
    "packed rows": Form(
        _of_vllm("pack-quantized", num_bits=4, type="int", strategy="channel"), lambda weight: compressed(weight, weight.shape[1]), "Q4_1"
    ),
    "packed, with zeros": Form(
        _of_vllm("pack-quantized", **_GROUPS, symmetric=False), lambda weight: compressed(weight, symmetric=False), "Q4_1"
    ),
    "packed, by activations": Form(
        _of_vllm("pack-quantized", **_GROUPS, actorder="group"), lambda weight: compressed(weight, shuffled=True)
    ),
    "packed of 8 bits": Form(_of_vllm("pack-quantized", **{**_GROUPS, "num_bits": 8}), lambda weight: compressed(weight, bits=8), "Q8_0"),
    "fp8 in blocks": Form({"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [48, 80]}, blocks),
    "fp8": Form({"quant_method": "fp8", "activation_scheme": "static"}, whole),
    "fp8 of modelopt": Form({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": None}, whole),
    "fp8 by rows": Form(
        _of_vllm("float-quantized", num_bits=8, type="float", strategy="channel"), lambda weight: by_row(weight, torch.float8_e4m3fn)
    ),
    "int8 by rows": Form(
        _of_vllm("int-quantized", num_bits=8, type="int", strategy="channel"), lambda weight: by_row(weight, torch.int8), "Q8_0"
    ),
}  # fmt: skip


def write(folder: Path, name: str, family: str = "qwen3", **changes: Any) -> tuple[TinyModel, Tensors]:
    """A checkpoint of a form, with the reference of what it means, and the numbers of its packed matrices."""
    form, model = FORMS[name], make(folder, family, **{**SHAPE, **changes})
    stored = load_file(folder / "model.safetensors")
    meant = {}
    for key in [key for key, tensor in stored.items() if ".layers." in key and key.endswith(".weight") and tensor.ndim == 2]:
        tensors, meant[key] = form.pack(stored.pop(key).float())
        stored = {key.removesuffix("weight") + end: tensor.contiguous() for end, tensor in tensors.items()} | stored  # its own bias stays
        with torch.no_grad():
            model.reference.get_parameter(key).copy_(meant[key])
    save_file(stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": form.config}))
    return model, meant

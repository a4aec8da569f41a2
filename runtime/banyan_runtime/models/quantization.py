"""config.json's quantization_config → how a checkpoint's matrices are packed. Pure: no tensors here.

Which matrices are packed their own tensors say: the lists of modules that tools write beside are not needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from banyan_runtime.errors import ModelError
from banyan_runtime.hub.files import shown


@dataclass(frozen=True, slots=True)
class Scaled:
    """`NAME.weight` in 8 bits, floats (F8_E4M3) or integers (I8), times the numbers of `NAME.{scale}`: one for all, one for each row, or
    one for each `block` of rows and columns."""

    kind: Literal["F8_E4M3", "I8"]
    block: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Grouped:
    """Integers of so many bits, as many as there is room for in a number of 32: (q - zero) * scale, where `group` neighbours along the
    inputs (None: all) share both.

    awq: `NAME.qweight` [inputs, outputs / 8], the even columns of eight before the odd ones, `qzeros`, `scales` [groups, outputs].
    gptq: `NAME.qweight` [inputs / 8, outputs], `qzeros` less `lowered`, `scales`; `g_idx`: the group of each input, where not in order.
    packed: `NAME.weight_packed` [outputs, inputs / 8], `weight_scale` [outputs, groups], `weight_zero_point` [outputs / 8, groups],
    `weight_g_idx`.
    Of 8 bits four are in a number. `symmetric`: each zero is half of what there is, whatever zeros are written beside.
    """

    form: Literal["awq", "gptq", "packed"]
    bits: Literal[4, 8]
    group: int | None
    symmetric: bool = False
    lowered: int = 0
    ordered: bool = True

    @property
    def each(self) -> int:
        """Integers in a number of 32 bits."""
        return 32 // self.bits

    @property
    def half(self) -> int:
        return 1 << (self.bits - 1)


Packing = Scaled | Grouped

_LARGEST: Final = 1 << 20  # of a group or a block; known: 128
_REMEDY: Final = "take the model's bfloat16 or float16 files, or a GGUF file"
_METHODS: Final = "fp8, fbgemm_fp8, modelopt, awq, gptq, compressed-tensors"
_BY_MODULE: Final = ("bits", "group_size", "desc_act", "sym")  # which GPTQ's tools may choose for each
_READ: Final = ("num_bits", "type", "strategy", "group_size", "block_structure", "symmetric", "actorder")  # of compressed-tensors' weights
_BY_ROWS: Final = ("tensor", "channel")  # which the scales of a matrix tell apart by themselves


def packing(config: object, where: str) -> Packing | None:
    """Of a quantization_config; None: no weights are quantized. Raises ModelError that names the key, its value and what is supported."""
    if config is None:
        return None
    if not isinstance(config, dict):
        raise ModelError(f"{where}: quantization_config is {shown(config)}, not an object")
    keys = _Keys(config, where, "quantization_config")
    match config.get("quant_method"):
        case "fp8":
            keys.need("fmt", "e4m3", "e4m3")
            return Scaled("F8_E4M3", keys.block("weight_block_size"))
        case "fbgemm_fp8":
            return Scaled("F8_E4M3")
        case "modelopt":
            keys.need("quant_algo", None, "FP8")
            return Scaled("F8_E4M3")
        case "awq":
            keys.need("bits", 4)
            keys.need("version", "gemm", "gemm", "GEMM")
            keys.need("zero_point", True, True)
            return Grouped("awq", 4, keys.group("group_size"))
        case "gptq":
            return _gptq(keys)
        case "compressed-tensors":
            return _compressed(keys)
        case other:
            raise ModelError(
                f"{where}: quantization_config.quant_method={shown(other)} is not supported; supported are {_METHODS}; {_REMEDY}"
            )


def _gptq(keys: _Keys) -> Packing:
    bits = keys.bits("bits")
    form = keys.need("checkpoint_format", "gptq", "gptq", "gptq_v2", "", None)
    ordered = not keys.need("desc_act", False, False, True)
    modules = keys.config.get("dynamic") or {}
    for module, own in modules.items() if isinstance(modules, dict) else ():
        own = own if isinstance(own, dict) else {}
        if not module.startswith("-:") and any(key in own and own[key] != keys.config.get(key) for key in _BY_MODULE):
            raise ModelError(
                f"{keys.where}: quantization_config.dynamic quantizes {shown(module)} in another way than the rest: {shown(own)}, which is "
                f"not supported; {_REMEDY}"
            )
    symmetric = bool(keys.need("sym", None, None, False, True))
    return Grouped("gptq", bits, keys.group("group_size"), symmetric, lowered=int(form != "gptq_v2"), ordered=ordered)


def _compressed(keys: _Keys) -> Packing | None:
    if transforms := keys.config.get("transform_config"):
        raise ModelError(f"{keys.where}: quantization_config.transform_config={shown(transforms)} is not supported; {_REMEDY}")
    sparsity = keys.config.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity:
        _Keys(sparsity, keys.where, "quantization_config.sparsity_config").need("format", "dense")
    groups = keys.config.get("config_groups")
    if groups == {}:  # what is quantized is the cache, or nothing
        return None
    weights = [group.get("weights") for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []
    known = [each for each in weights if isinstance(each, dict)]
    if not known or len(known) < len(weights) or any(_read(each) != _read(known[0]) for each in known):
        raise ModelError(f"{keys.where}: quantization_config.config_groups do not quantize all weights in one way; {_REMEDY}")
    own = _Keys(known[0], keys.where, "quantization_config.config_groups.weights")
    form = keys.need("format", None, "float-quantized", "naive-quantized", "int-quantized", "pack-quantized")
    symmetric = bool(own.need("symmetric", True, True, False))
    order = own.need("actorder", None, None, False, True, "weight", "static", "group", "dynamic")
    if form == "pack-quantized":
        own.need("type", "int")
        strategy = own.need("strategy", "group", "group", "channel")
        group = own.group("group_size") if strategy == "group" else None
        return Grouped("packed", own.bits("num_bits"), group, symmetric, ordered=order not in (True, "group", "dynamic"))
    own.need("symmetric", True, True)
    own.need("num_bits", 8)
    kind = own.need("type", "int", "float", "int")
    strategy = own.need("strategy", "tensor", *_BY_ROWS, "block")
    return Scaled("F8_E4M3" if kind == "float" else "I8", own.block("block_structure") if strategy == "block" else None)


def _read(weights: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is read of how weights are quantized."""
    return {key: _BY_ROWS[0] if key == "strategy" and weights.get(key) in _BY_ROWS else weights.get(key) for key in _READ}


class _Keys:
    def __init__(self, config: Mapping[str, Any], where: str, name: str) -> None:
        self.config = config
        self.where = where
        self._name = name

    def need(self, key: str, default: object, *supported: object) -> object:
        """The value of a key, which has to be one of these, or the default if there are none."""
        found = self.config.get(key, default)
        if found not in (supported or (default,)):
            listed = ", ".join(str(one) for one in supported or (default,))
            raise ModelError(f"{self.where}: {self._name}.{key}={shown(found)} is not supported; supported: {listed}; {_REMEDY}")
        return found

    def bits(self, key: str) -> Literal[4, 8]:
        return 8 if self.need(key, None, 4, 8) == 8 else 4

    def group(self, key: str) -> int | None:
        found = self.config.get(key)
        return None if found == -1 else self._size(key, found)

    def block(self, key: str) -> tuple[int, int] | None:
        found = self.config.get(key)
        if found is None:
            return None
        if not isinstance(found, list) or len(found) != 2:
            raise ModelError(f"{self.where}: {self._name}.{key} is {shown(found)}, not two sizes")
        return self._size(key, found[0]), self._size(key, found[1])

    def _size(self, key: str, found: object) -> int:
        if isinstance(found, bool) or not isinstance(found, int) or not 1 <= found <= _LARGEST:
            raise ModelError(f"{self.where}: {self._name}.{key} is {shown(found)}, not a size of at most {_LARGEST}")
        return found

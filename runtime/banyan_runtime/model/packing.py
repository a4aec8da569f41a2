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
class Fours:
    """Integers of 4 bits, eight in a number of 32: (q - zero) * scale, where `group` neighbours along the inputs (None: all) share both.

    awq: `NAME.qweight` [inputs, outputs / 8], the even columns of eight before the odd ones, `qzeros`, `scales` [groups, outputs].
    gptq: `NAME.qweight` [inputs / 8, outputs], `qzeros` less `lowered`, `scales`; `g_idx`: the group of each input, where not in order.
    packed: `NAME.weight_packed` [outputs, inputs / 8], `weight_scale` [outputs, groups]; each zero is 8.
    """

    form: Literal["awq", "gptq", "packed"]
    group: int | None
    lowered: int = 0
    ordered: bool = True


Packing = Scaled | Fours

_LARGEST: Final = 1 << 20  # of a group or a block; known: 128
_REMEDY: Final = "take the model's bfloat16 or float16 files, or a GGUF file"


def packing(config: object, where: str) -> Packing | None:
    """Of a quantization_config; None: there is none. Raises ModelError that names the key, its value and what is supported."""
    if config is None:
        return None
    if not isinstance(config, dict):
        raise ModelError(f"{where}: quantization_config is {shown(config)}, not an object")
    keys = _Keys(config, where, "quantization_config")
    match config.get("quant_method"):
        case "fp8":
            keys.need("fmt", "e4m3", "e4m3")
            return Scaled("F8_E4M3", keys.block("weight_block_size"))
        case "awq":
            keys.need("bits", 4)
            keys.need("version", "gemm", "gemm", "GEMM")
            keys.need("zero_point", True, True)
            return Fours("awq", keys.group("group_size"))
        case "gptq":
            keys.need("bits", 4)
            form = keys.need("checkpoint_format", "gptq", "gptq", "gptq_v2")
            ordered = not keys.need("desc_act", False, False, True)
            return Fours("gptq", keys.group("group_size"), lowered=int(form == "gptq"), ordered=ordered)
        case "compressed-tensors":
            return _compressed(keys)
        case other:
            raise ModelError(
                f"{where}: quantization_config.quant_method={shown(other)} is not supported; supported are fp8, awq, gptq, "
                f"compressed-tensors; {_REMEDY}"
            )


def _compressed(keys: _Keys) -> Packing:
    groups = keys.config.get("config_groups")
    weights = [group.get("weights") for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []
    if not weights or not isinstance(weights[0], dict) or any(each != weights[0] for each in weights):
        raise ModelError(f"{keys.where}: quantization_config.config_groups do not quantize all weights in one way; {_REMEDY}")
    own = _Keys(weights[0], keys.where, "quantization_config.config_groups.weights")
    form = keys.need("format", None, "float-quantized", "naive-quantized", "int-quantized", "pack-quantized")
    own.need("symmetric", True, True)
    own.need("actorder", None, None, False, "weight", "static")
    if form == "pack-quantized":
        own.need("num_bits", 4)
        strategy = own.need("strategy", "group", "group", "channel")
        return Fours("packed", own.group("group_size") if strategy == "group" else None)
    own.need("num_bits", 8)
    kind = own.need("type", "int", "float", "int")
    strategy = own.need("strategy", "tensor", "tensor", "channel", "block")
    return Scaled("F8_E4M3" if kind == "float" else "I8", own.block("block_structure") if strategy == "block" else None)


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

"""Decode steps of one row in one launch (`kernels/persistent.py`)."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import torch
from torch import Tensor

from banyan_runtime.model.attention import AttentionKind, Held, Replayed, triton_paged
from banyan_runtime.model.decoder import Decoder
from banyan_runtime.model.fused import FusedHeads, supports
from banyan_runtime.model.fused_products import FusedLinear
from banyan_runtime.model.kernels import FEWEST_ROWS, missing, power_of_two
from banyan_runtime.model.layers import Entry, Layer
from banyan_runtime.model.pool import KvPool
from banyan_runtime.model.spec import ModelSpec
from banyan_runtime.model.table import DeviceTable, SlotTable
from banyan_runtime.step import I32, PADDING_SLOT, Step

WARPS: Final = 8  # of a program, one for each processor: with more, registers would not do
COLUMNS: Final = 1024  # of a weight that a program reads at a time
LINES: Final = 16  # of a weight, likewise, at most
AHEAD: Final = 64 << 10  # bytes of a share, likewise, that are brought into the cache while programs meet: they all fit there together
LARGEST: Final = 2 * 10**9
"""Parameters of all layers at most: what launches cost is a small part of reading more. By arithmetic, not measured."""
_ALL_POSITIONS: Final = 1 << 30


def refusal(spec: ModelSpec, device: torch.device, kept: torch.dtype, rows: int, attention: AttentionKind | None) -> str | None:
    """Why it does not compute such a model there, with keys and values kept in such a type and decode steps of so many rows captured, in
    words that go on after a colon; or None."""
    if device.type != "cuda":
        return "it computes on CUDA devices"
    if not supports(device, kept):
        return missing() or "this device computes without Triton's kernels"
    if rows == 0 or attention is None or not hasattr(attention, Replayed.plan_held.__name__):
        return "no decode steps are captured as CUDA graphs, of which it is one"
    if spec.head_dim > 256:
        return "heads wider than 256 do not fit its tiles"
    parameters = spec.layers * spec.layer_parameters
    few = parameters <= LARGEST
    return None if few else f"its layers have {parameters / 1e9:.1f} billion parameters; up to {LARGEST / 1e9:.0f} are worth it"


class PersistentDecode:
    def __init__(
        self, decoder: Decoder, pool: KvPool, table: DeviceTable, latest: Tensor, programs: int | None = None, *, apart: bool = False
    ) -> None:
        """`latest` int64: the last token of each row, where it stays. `programs`: that run at once; None: one for each processor of the
        device. `apart`: launch the phases one by one."""
        from banyan_runtime.model.kernels import persistent

        spec, device, dtype = decoder.spec, decoder.embed.device, decoder.dtype
        self._kernel = persistent
        self._table = table
        self._apart = apart
        self.programs = programs or torch.cuda.get_device_properties(device).multi_processor_count
        self._layers = spec.layers
        # All programs run at once, or the launch fails.
        self._options = {"launch_cooperative_grid": True} if device.type == "cuda" else {}
        stretches = max(1, self.programs // spec.kv_heads)

        def empty(*shape: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        width = spec.heads * spec.head_dim
        places = _places(decoder)
        weights = {name: torch.tensor([tensor.data_ptr() for tensor in tensors], device=device) for name, tensors in places.items()}
        assert all(tensor.data_ptr() % 16 == 0 and tensor.is_contiguous() for tensors in places.values() for tensor in tensors)
        assert all(tensor.dtype == dtype for tensors in places.values() for tensor in tensors)
        keys, values = pool.slots(0)  # of the other layers they follow
        cos, sin = decoder.rope.tables
        self._arguments = {
            "latest": latest, "table": table.slots, "table_stride": table.slots.stride(0), "embed": decoder.embed, "cos": cos, "sin": sin,
            "windows": torch.tensor([window or _ALL_POSITIONS for window in spec.windows], device=device), **weights,
            "keys": keys, "values": values, "head_stride": keys.stride(0), "nothing": empty(spec.hidden_size),
            "sums": empty(2, spec.hidden_size), "delta": empty(spec.hidden_size),
            "qkv": empty((spec.heads + 2 * spec.kv_heads) * spec.head_dim), "queries": empty(self.programs, width),
            "parts": empty(stretches, width, kind=torch.float32), "highs": empty(stretches, spec.heads, kind=torch.float32),
            "masses": empty(stretches, spec.heads, kind=torch.float32), "attended": empty(width), "inner": empty(spec.intermediate_size),
            "counters": empty(persistent.COUNTERS, kind=torch.int32), "eps": spec.norm_eps, "scale": 1.0 / math.sqrt(spec.head_dim),
        }  # fmt: skip
        half = power_of_two(max(16, spec.head_dim)) // 2
        self._shape = {
            "HIDDEN": spec.hidden_size, "INNER": spec.intermediate_size, "HEADS": spec.heads, "KV_HEADS": spec.kv_heads,
            "DIM": spec.head_dim, "QKV_BIASED": spec.qkv_bias, "OUT_BIASED": spec.output_bias, "MLP_BIASED": spec.mlp_bias,
            "NORMED": spec.qk_norm, "WINDOWED": any(spec.windows),
            "QKV_LINES": self._lines((spec.heads + 2 * spec.kv_heads) * spec.head_dim), "OUT_LINES": self._lines(spec.hidden_size),
            "GATE_UP_LINES": self._lines(spec.intermediate_size, 2), "DOWN_LINES": self._lines(spec.hidden_size), "COLUMNS": COLUMNS,
            "AHEAD": self._ahead(spec, decoder.embed),
            "STRETCHES": stretches, "STRETCH": triton_paged.STRETCH, "KEYS": triton_paged.KEYS,
            "ROWS": max(FEWEST_ROWS, power_of_two(spec.group)), "GROUP": power_of_two(spec.group + 1), "HALF": half,
            "TOGETHER": triton_paged.TOGETHER, "PADDING": PADDING_SLOT, "LARGEST": pool.largest, "NARROW": pool.narrow,
            "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        }  # fmt: skip

    def _lines(self, outputs: int, each: int = 1) -> int:
        """Of a weight that a program multiplies at a time: all of its share, where they are few."""
        share = -(-outputs // self.programs)
        return power_of_two(share) if share <= LINES // each else LINES // 2

    @staticmethod
    def _ahead(spec: ModelSpec, embed: Tensor) -> int:
        """Bytes; 0 where no such instruction is, or it cannot take these shapes: it counts in 16 bytes."""
        lines = (spec.hidden_size, spec.intermediate_size, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim)
        fit = all(line * embed.itemsize % 16 == 0 for line in lines)
        return AHEAD if fit and embed.is_cuda and torch.cuda.get_device_capability(embed.device) >= (9, 0) else 0

    def fill(self, step: Step, table: SlotTable, held: Held) -> I32:
        """As `Replayed.fill`."""
        self._table.follow_updates(step, table)
        return np.zeros(tuple(held.own.shape), np.int32)

    def compute(self, held: Held, hidden: Tensor) -> None:
        """The hidden state [hidden_size] of the token that `held` tells by then. Can be captured."""
        told = {"ids": held.ids, "rows": held.rows, "positions": held.positions, "slots": held.slots, "ends": held.ends, "hidden": hidden}
        last = self._kernel.PHASES - 1
        launches = [(0, self._layers, self._kernel.ALL.value)]
        if self._apart:
            launches = [(layer, layer + 1, phase) for layer in range(self._layers) for phase in range(last)]
            launches.append((self._layers, self._layers, last))
        for begin, end, only in launches:
            self._kernel.decode[(self.programs,)](
                **self._arguments, **told, **self._shape, begin=begin, end=end, ONLY=only, num_warps=WARPS, **self._options
            )


def _places(decoder: Decoder) -> dict[str, list[Tensor]]:
    """The weights of all layers, as the kernel names them; where there is no such weight, another one stands for it."""
    found: dict[str, list[Tensor]] = {}

    def add(name: str, weight: Tensor | None, other: Tensor) -> None:
        found.setdefault(name, []).append(other if weight is None else weight)

    def product(name: str, layer: Layer) -> Tensor:
        assert isinstance(layer, FusedLinear)
        add(f"{name}_weights", layer.weight, layer.weight)
        add(f"{name}_biases", layer.bias, layer.weight)
        return layer.weight

    def entry(name: str, norm: str, entry: Entry) -> Tensor:
        add(norm, entry.norm.weight, entry.norm.weight)
        return product(name, entry.layer)

    for block in decoder.blocks:
        assert isinstance(block.heads, FusedHeads)
        other = entry("qkv", "input_norms", block.qkv)
        q_norm, k_norm = block.heads.norms or (None, None)
        add("q_norms", q_norm, other)
        add("k_norms", k_norm, other)
        product("out", block.out)
        entry("gate_up", "mlp_norms", block.gate_up)
        product("down", block.down)
    return found

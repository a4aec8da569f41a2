"""The KV pool: keys and values of every layer by slot."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from banyan_runtime.models.config import DecoderSpec


class KvPool:
    """Keys and values [layers][kv_heads, slots, head_dim]; heads outermost, so that gathered keys need no second copy before
    they are multiplied. The first page is padding; it holds finite values, and no query sees them. A layer that reads another one's has
    none of its own.

    They may be kept in a narrower type than the model's, without scales: what it cannot hold becomes the largest that it can.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        tokens: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        kept: torch.dtype | None = None,
    ) -> None:
        """`kept`: the type in memory; None: `dtype`, which is that of what comes and goes."""
        self.dtype = dtype
        self.kept = kept or dtype
        self.narrow = self.kept != dtype
        self.largest = torch.finfo(self.kept).max  # that is kept
        self.device = device
        self._page_size = page_size
        slots = tokens + page_size
        self._k_slots, self._v_slots = list[Tensor](), list[Tensor]()
        for layer in spec.layers:
            attention = layer.attention
            if attention.kv_layer is not None:
                self._k_slots.append(self._k_slots[attention.kv_layer])
                self._v_slots.append(self._v_slots[attention.kv_layer])
                continue
            for part, width in ((self._k_slots, attention.head_dim), (self._v_slots, attention.value_size)):
                part.append(torch.zeros((attention.kv_heads, slots, width), dtype=self.kept, device=device))
        self._k_pages, self._v_pages = (
            [each.view(len(each), slots // page_size, -1) for each in part] for part in (self._k_slots, self._v_slots)
        )
        self.bytes = slots * cell_bytes(spec, self.kept)

    def store(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """k [T, kv_heads, head_dim] and v [T, kv_heads, value_size] into slots [T].

        Values are made finite: a query's weight of a key that it must not see is 0, but 0 times NaN would be NaN, for tokens
        before a broken one and for the next owner of its page. The key is marked instead (v - v is NaN unless v is finite),
        so that whoever does see it still fails.
        """
        mark = v - v if v.shape == k.shape else (v - v).sum(-1, keepdim=True)
        k, v = (k + mark).transpose(0, 1), torch.nan_to_num(v).transpose(0, 1)
        if not self.narrow:
            self._k_slots[layer].index_copy_(1, slots, k)
            self._v_slots[layer].index_copy_(1, slots, v)
            return
        k = k.clamp(-self.largest, self.largest).masked_fill_(~torch.isfinite(k), math.nan)
        v = v.clamp(-self.largest, self.largest)
        for part, kept in ((k, self._k_slots[layer]), (v, self._v_slots[layer])):
            # As bytes: nothing but conversions is known of these types everywhere.
            kept.view(torch.uint8).index_copy_(1, slots, part.to(self.kept).view(torch.uint8))

    def slots(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of all slots as they are kept: [kv_heads, slots, head_dim] each."""
        return self._k_slots[layer], self._v_slots[layer]

    def keys(self, layer: int, pages: Tensor) -> Tensor:
        """The keys of pages [n]: [kv_heads, n, page_size * head_dim]."""
        return self._taken(self._k_pages[layer], pages)

    def values(self, layer: int, pages: Tensor) -> Tensor:
        """The values of pages [n]: [kv_heads, n, page_size * head_dim]."""
        return self._taken(self._v_pages[layer], pages)

    def _taken(self, part: Tensor, pages: Tensor) -> Tensor:
        if not self.narrow:
            return part.index_select(1, pages)
        return part.view(torch.uint8).index_select(1, pages).view(self.kept).to(self.dtype)


@dataclass(frozen=True, slots=True)
class Cells:
    """Where the keys and values of a step's tokens go."""

    pool: KvPool
    slots: Tensor  # int64 or int32 [T]

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """k [T, kv_heads, head_dim] and v [T, kv_heads, value_size]."""
        self.pool.store(layer, self.slots.long(), k, v)


def cell_bytes(spec: DecoderSpec, dtype: torch.dtype) -> int:
    """Bytes that one token takes in all layers."""
    return spec.kv_elements * dtype.itemsize

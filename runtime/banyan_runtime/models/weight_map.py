"""Which parameters a model has, and where each tensor of a checkpoint goes. Pure: nothing is allocated or read.

Projections that read the same input are one parameter (q, k, v → qkv; gate, up → gate_up), so a step makes fewer and larger matrix
products. A checkpoint's tensor fills a range of rows of its parameter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Final

import numpy as np
import numpy.typing as npt

from banyan_runtime.models.config import Attention, DecoderSpec
from banyan_runtime.models.family import Names

Shape = tuple[int, ...]

COMPUTED: Final = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached")
"""Ends of names in old checkpoints that follow from the config."""
PREFIXES: Final = (("model.", ""), ("", ""), ("model.language_model.", ""), ("language_model.model.", "language_model."))
"""How checkpoints begin the names of the decoder and of its head: a text model, one without a head, towers of newer and older ones that
read images."""
_MODEL: Final = PREFIXES[0][0]


@dataclass(frozen=True, slots=True)
class Interleaved:
    """Rows of heads whose first `dim` elements are pairs of neighbours in the checkpoint; a parameter holds the pairs' first elements
    before their second ones."""

    head_dim: int
    dim: int

    def rows(self, count: int) -> npt.NDArray[np.intp]:
        """Which of a checkpoint's rows stands at each of a parameter's."""
        order = np.arange(self.head_dim)
        order[: self.dim] = order[: self.dim].reshape(-1, 2).T.reshape(-1)
        return (np.arange(0, count, self.head_dim)[:, None] + order).reshape(-1)


@dataclass(frozen=True, slots=True)
class WeightSlice:
    """Rows first_row … first_row + shape[0] of a parameter."""

    parameter: str
    first_row: int
    shape: Shape  # of the checkpoint's tensor
    order: Interleaved | None = None
    offset: float = 0.0  # added to the checkpoint's numbers

    @property
    def plain(self) -> bool:
        """The parameter holds the tensor's bytes as they are."""
        return self.order is None and self.offset == 0.0


@dataclass(frozen=True, slots=True)
class WeightMap:
    """parameters: name → shape, in the order in which they are made. slices: checkpoint name → where it goes."""

    parameters: dict[str, Shape]
    slices: dict[str, WeightSlice]
    ignored: frozenset[str]  # tensors that may be there and are not read
    wide: frozenset[str] = frozenset()  # parameters that stay float32

    def spelled(self, found: set[str]) -> WeightMap:
        """The same with the prefixes that a checkpoint with such names uses, as its embedding shows."""
        return next((known for known in map(self._renamed, PREFIXES) if next(iter(known.slices)) in found), self)

    def _renamed(self, prefixes: tuple[str, str]) -> WeightMap:
        model, head = prefixes

        def name(of: str) -> str:
            return model + of.removeprefix(_MODEL) if of.startswith(_MODEL) else head + of

        slices = {name(each): place for each, place in self.slices.items()}
        return replace(self, slices=slices, ignored=frozenset(map(name, self.ignored)))

    @property
    def layer_prefix(self) -> str:
        """How the names of the layers' tensors begin."""
        first = next(name for name, place in self.slices.items() if place.parameter.startswith("layers."))
        return first[: first.index("layers.") + len("layers.")]

    def elements(self) -> int:
        return sum(prod(shape) for shape in self.parameters.values())


def weight_map(spec: DecoderSpec, names: Names) -> WeightMap:
    """The parameters of a model, under the names that transformers writes."""
    builder = _Builder(spec, names)
    hidden = spec.hidden_size
    builder.add("embed", ("model.embed_tokens.weight", (spec.vocab_size, hidden)))
    if (inputs := spec.layer_inputs) is not None:
        width = len(spec.layers) * inputs.size
        builder.add("inputs_embed", ("model.embed_tokens_per_layer.weight", (inputs.vocab_size, width)))
        builder.add("inputs_projection", ("model.per_layer_model_projection.weight", (width, hidden)))
        builder.norm("inputs_norm", "model.per_layer_projection_norm", inputs.size)
    for index in range(len(spec.layers)):
        builder.layer(index)
    builder.norm("norm", "model.norm", hidden)
    if not spec.tied:
        builder.add("head", ("lm_head.weight", (spec.vocab_size, hidden)))
    return WeightMap(builder.parameters, builder.slices, frozenset(builder.ignored), frozenset(builder.wide))


class _Builder:
    def __init__(self, spec: DecoderSpec, names: Names) -> None:
        self._spec = spec
        self._names = names
        self.parameters: dict[str, Shape] = {}
        self.slices: dict[str, WeightSlice] = {}
        self.wide: list[str] = []
        self.ignored = ["lm_head.weight"] if spec.tied else []

    def add(self, parameter: str, *parts: tuple[str, Shape], orders: tuple[Interleaved | None, ...] = (), offset: float = 0.0) -> None:
        row = 0
        for at, (name, shape) in enumerate(parts):
            self.slices[name] = WeightSlice(parameter, row, shape, orders[at] if orders else None, offset)
            row += shape[0]
        self.parameters[parameter] = (row, *parts[0][1][1:])

    def norm(self, parameter: str, name: str, width: int, order: Interleaved | None = None) -> None:
        """A norm whose weight is applied in float32 stays float32."""
        self.add(parameter, (f"{name}.weight", (width,)), orders=(order,), offset=self._names.norm_offset)
        if self._spec.norm.kind != "rms":
            self.wide.append(parameter)
        if self._spec.norm.bias:
            self.add(f"{parameter}_bias", (f"{name}.bias", (width,)))

    def layer(self, index: int) -> None:
        layer, names, hidden = self._spec.layers[index], self._names, self._spec.hidden_size
        here, there = f"layers.{index}", f"model.layers.{index}"
        attention, mlp = layer.attention, layer.mlp
        if layer.norms != "post":
            self.norm(f"{here}.input_norm", f"{there}.{names.input_norm}", hidden)
        self._attention(here, there, attention)
        if layer.norms in ("post", "both"):
            self.norm(f"{here}.post_attention_norm", f"{there}.{names.post_attention_norm}", hidden)
        if layer.norms in ("pre", "both"):
            self.norm(f"{here}.mlp_norm", f"{there}.{names.mlp_norm}", hidden)
        up, ups = ("gate_up", names.gate_up) if mlp.gated else ("up", (names.up,))
        rows = (2 if mlp.gated else 1) * mlp.inner // len(ups)
        self.add(f"{here}.{up}", *((f"{there}.{name}.weight", (rows, hidden)) for name in ups))
        self.add(f"{here}.down", (f"{there}.{names.down}.weight", (hidden, mlp.inner)))
        if mlp.bias:
            self.add(f"{here}.{up}_bias", *((f"{there}.{name}.bias", (rows,)) for name in ups))
            self.add(f"{here}.down_bias", (f"{there}.{names.down}.bias", (hidden,)))
        if layer.norms in ("post", "both"):
            self.norm(f"{here}.post_mlp_norm", f"{there}.{names.post_mlp_norm}", hidden)
        if (inputs := self._spec.layer_inputs) is not None:
            self.add(f"{here}.inputs_gate", (f"{there}.per_layer_input_gate.weight", (inputs.size, hidden)))
            self.add(f"{here}.inputs_projection", (f"{there}.per_layer_projection.weight", (hidden, inputs.size)))
            self.norm(f"{here}.inputs_norm", f"{there}.post_per_layer_input_norm", hidden)
        if layer.learned_scale:
            self.add(f"{here}.scale", (f"{there}.layer_scalar", (1,)))

    def _attention(self, here: str, there: str, attention: Attention) -> None:
        names, hidden, dim = self._names, self._spec.hidden_size, attention.head_dim
        order = Interleaved(dim, attention.rope.dim) if names.interleaved and attention.rope is not None else None
        q_rows, kv_rows = attention.heads * dim, attention.kv_heads * dim
        rows = [q_rows] if attention.kv_layer is not None else [q_rows, kv_rows] if attention.value_is_key else [q_rows, kv_rows, kv_rows]
        if attention.kv_layer is not None:  # what some checkpoints hold all the same
            self.ignored += [f"{there}.{name}.weight" for name in (*names.qkv[1:], names.k_norm)]
        parts, orders = names.qkv, (order, order, None)
        if len(parts) == 1:
            rows = [sum(rows)]
        named = list(zip(parts, rows, strict=False))
        self.add(f"{here}.qkv", *((f"{there}.{name}.weight", (extent, hidden)) for name, extent in named), orders=orders)
        if attention.qkv_bias:
            self.add(f"{here}.qkv_bias", *((f"{there}.{name}.bias", (extent,)) for name, extent in named), orders=orders)
        if attention.qk_norm is not None:
            whole = attention.qk_norm == "row"
            self.norm(f"{here}.q_norm", f"{there}.{names.q_norm}", q_rows if whole else dim, order)
            if attention.kv_layer is None:
                self.norm(f"{here}.k_norm", f"{there}.{names.k_norm}", kv_rows if whole else dim, order)
        self.add(f"{here}.out", (f"{there}.{names.out}.weight", (hidden, q_rows)))
        if attention.out_bias:
            self.add(f"{here}.out_bias", (f"{there}.{names.out}.bias", (hidden,)))

"""Which parameters a model has, and where each tensor of a checkpoint goes. Pure: nothing is allocated or read.

Projections that read the same input are one parameter (q, k, v → qkv; gate, up → gate_up), so that a step makes fewer and
larger matrix products. A checkpoint's tensor fills a range of rows of its parameter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from banyan_runtime.model.spec import ModelSpec

Shape = tuple[int, ...]

COMPUTED: Final = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached")
"""Ends of names that old checkpoints hold and nobody needs: they follow from the config."""

_PREFIX: Final = "model."


@dataclass(frozen=True, slots=True)
class Place:
    """Rows first_row … first_row + shape[0] of a parameter."""

    parameter: str
    first_row: int
    shape: Shape  # of the checkpoint's tensor


@dataclass(frozen=True, slots=True)
class Layout:
    """parameters: name → shape, in the order in which they are made. places: checkpoint name → where it goes."""

    parameters: dict[str, Shape]
    places: dict[str, Place]
    ignored: frozenset[str]  # tensors that may be there and are not read

    def bare(self) -> Layout:
        """The same for a checkpoint that was saved without its head, whose names lack a prefix."""
        return replace(self, places={name.removeprefix(_PREFIX): place for name, place in self.places.items()})

    def elements(self) -> int:
        total = 0
        for shape in self.parameters.values():
            size = 1
            for extent in shape:
                size *= extent
            total += size
        return total


def layout(spec: ModelSpec) -> Layout:
    """The layout of a model: the names are those of transformers' checkpoints."""
    parameters: dict[str, Shape] = {}
    places: dict[str, Place] = {}

    def add(parameter: str, *parts: tuple[str, Shape]) -> None:
        row = 0
        for name, shape in parts:
            places[name] = Place(parameter, row, shape)
            row += shape[0]
        parameters[parameter] = (row, *parts[0][1][1:])

    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_rows, kv_rows = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    add("embed", ("model.embed_tokens.weight", (spec.vocab_size, hidden)))
    for index in range(spec.layers):
        here, there = f"layers.{index}", f"model.layers.{index}"
        attention, mlp = f"{there}.self_attn", f"{there}.mlp"
        rows = {"q": q_rows, "k": kv_rows, "v": kv_rows}
        add(f"{here}.input_norm", (f"{there}.input_layernorm.weight", (hidden,)))
        add(f"{here}.qkv", *((f"{attention}.{part}_proj.weight", (extent, hidden)) for part, extent in rows.items()))
        if spec.qkv_bias:
            add(f"{here}.qkv_bias", *((f"{attention}.{part}_proj.bias", (extent,)) for part, extent in rows.items()))
        if spec.qk_norm:
            add(f"{here}.q_norm", (f"{attention}.q_norm.weight", (spec.head_dim,)))
            add(f"{here}.k_norm", (f"{attention}.k_norm.weight", (spec.head_dim,)))
        add(f"{here}.out", (f"{attention}.o_proj.weight", (hidden, q_rows)))
        if spec.output_bias:
            add(f"{here}.out_bias", (f"{attention}.o_proj.bias", (hidden,)))
        add(f"{here}.mlp_norm", (f"{there}.post_attention_layernorm.weight", (hidden,)))
        add(f"{here}.gate_up", (f"{mlp}.gate_proj.weight", (inner, hidden)), (f"{mlp}.up_proj.weight", (inner, hidden)))
        add(f"{here}.down", (f"{mlp}.down_proj.weight", (hidden, inner)))
        if spec.mlp_bias:
            add(f"{here}.gate_up_bias", (f"{mlp}.gate_proj.bias", (inner,)), (f"{mlp}.up_proj.bias", (inner,)))
            add(f"{here}.down_bias", (f"{mlp}.down_proj.bias", (hidden,)))
    add("norm", ("model.norm.weight", (hidden,)))
    if not spec.tied:
        add("head", ("lm_head.weight", (spec.vocab_size, hidden)))
    return Layout(parameters, places, frozenset({"lm_head.weight"}) if spec.tied else frozenset())

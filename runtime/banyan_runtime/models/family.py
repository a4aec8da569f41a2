"""What a family consists of: how its config.json becomes a spec, and how its checkpoints name their tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from banyan_runtime.models.config import DecoderSpec
from banyan_runtime.models.hf_config import HfConfig


@dataclass(frozen=True, slots=True)
class Names:
    """Names of a layer's tensors in a checkpoint. The defaults are Llama's; several names make one parameter, row below row."""

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    up: str = "mlp.up_proj"  # of an MLP without a gate
    down: str = "mlp.down_proj"
    input_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    post_attention_norm: str = "post_attention_layernorm"
    post_mlp_norm: str = "post_feedforward_layernorm"
    interleaved: bool = False  # rope pairs element 2i of a head with element 2i + 1
    norm_offset: float = 0.0  # added to stored norm weights


@dataclass(frozen=True, slots=True)
class Family:
    """One model family of `registry.FAMILIES`."""

    title: str  # in documentation
    spec: Callable[[HfConfig], DecoderSpec]
    names: Names = Names()
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of keys that its files leave out

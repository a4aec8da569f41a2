"""The architectures of GGUF files: which family of `models/` each is, how its tensors are called, and what its keys mean.

llama.cpp's converter is the authority (`conversion/` of its sources). What it changes is undone when tensors are read: it interleaves rows
of queries and keys (`turned`), and it adds `norm_offset` to the weights of norms. What it leaves out has one value in all known models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from banyan_runtime.errors import ModelError
from banyan_runtime.hub.files import shown
from banyan_runtime.hub.gguf import rope
from banyan_runtime.hub.gguf.header import Fields
from banyan_runtime.hub.gguf.keys import Keys

_LLAMA: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_POST: Final = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_GEMMA: Final = {**_POST, "ffn_norm": "pre_feedforward_layernorm"}
_GEMMA4: Final = {**_GEMMA, "inp_gate": "per_layer_input_gate", "proj": "per_layer_projection", "post_norm": "post_per_layer_input_norm"}
_TURNED: Final = frozenset({"attn_q", "attn_k"})
_GEMMA_27B: Final = {"gemma2": 46, "gemma3": 62}
"""Layers of the models whose queries are scaled by hidden_size / heads; those of others by the size of a head."""


More = Callable[[Keys], dict[str, Any]]
"""Entries of config.json beside those of all families, or instead of them."""


def _nothing(keys: Keys) -> dict[str, Any]:
    return {}


def _qwen(keys: Keys) -> dict[str, Any]:
    return {"use_sliding_window": False}


def _mistral3(keys: Keys) -> dict[str, Any]:
    """Ministral 3, or Mistral Small, which is a Mistral without windows."""
    if not keys.has("attention.temperature_scale"):
        return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
    return {}


def _phi3(keys: Keys) -> dict[str, Any]:
    original = "rope.scaling.original_context_length"
    more = {"original_max_position_embeddings": keys.size(original)} if keys.has(original) else {}
    return {"sliding_window": keys.window, "partial_rotary_factor": keys.size("rope.dimension_count") / keys.head_dim, **more}


def _granite(keys: Keys) -> dict[str, Any]:
    if not keys.fields.truth(keys.name("rope.scaling.finetuned"), default=True):
        raise keys.error("rope.scaling.finetuned", "true")
    scale = keys.number("attention.scale", keys.head_dim**-0.5)
    return {
        "attention_multiplier": scale,
        "embedding_multiplier": keys.number("embedding_scale", 1.0),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "logits_scaling": keys.number("logit_scale", 1.0),
    }


def _smollm3(keys: Keys) -> dict[str, Any]:
    return {"no_rope_layer_interval": 4, "use_sliding_window": False}


def _olmo2(keys: Keys) -> dict[str, Any]:
    """OLMo 3 is an OLMo 2 with windows."""
    if (window := keys.window) is None:
        return {}
    return {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "sliding_window": window,
        "layer_types": keys.layer_types(4),
        "rope_parameters": rope.two(keys),
    }


def _seed_oss(keys: Keys) -> dict[str, Any]:
    return {"attention_out_bias": keys.tensor("blk.0.attn_output.bias") is not None}


def _exaone4(keys: Keys) -> dict[str, Any]:
    if (window := keys.window) is None:
        return {"sliding_window": None}
    return {"sliding_window": window, "layer_types": keys.layer_types(4)}


def _glm4(keys: Keys) -> dict[str, Any]:
    return {"partial_rotary_factor": keys.size("rope.dimension_count") / keys.head_dim}


def _cohere2(keys: Keys) -> dict[str, Any]:
    return {
        "logit_scale": keys.number("logit_scale"),
        "sliding_window": keys.window,
        "layer_types": keys.layer_types(4),
    }


def _starcoder2(keys: Keys) -> dict[str, Any]:
    return {
        "use_bias": keys.tensor("blk.0.attn_q.bias") is not None,
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": 4096,  # the format has no key of it
    }


def _ernie(keys: Keys) -> dict[str, Any]:
    return {"use_bias": keys.tensor("blk.0.attn_q.bias") is not None}


def _gemma2(keys: Keys) -> dict[str, Any]:
    return {**_gemma(keys, 2), "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0)}


def _gemma3(keys: Keys) -> dict[str, Any]:
    return {**_gemma(keys, 6), "rope_parameters": rope.two(keys, 10_000.0)}


def _gemma(keys: Keys, every: int) -> dict[str, Any]:
    hidden, heads = keys.size("embedding_length"), keys.size("attention.head_count")
    large = keys.size("block_count") == _GEMMA_27B[keys.architecture]
    return {
        "sliding_window": keys.window or 4096,
        "layer_types": keys.layer_types(every) if keys.window else ["full_attention"] * keys.size("block_count"),
        "query_pre_attn_scalar": hidden // heads if large else keys.head_dim,
        **_gated_gelu(keys),
    }


def _gated_gelu(keys: Keys) -> dict[str, Any]:
    cap = keys.number("final_logit_softcapping") if keys.has("final_logit_softcapping") else None
    return {"hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": cap}


def _gemma4(keys: Keys) -> dict[str, Any]:
    types, kv_heads, inner = keys.layer_types(6), keys.sizes("attention.head_count_kv"), keys.sizes("feed_forward_length")
    full = types.index("full_attention") if "full_attention" in types else 0
    sliding = types.index("sliding_attention") if "sliding_attention" in types else 0
    inputs = keys.fields.header.fields.get(keys.name("embedding_length_per_layer_input"), 0)
    embedding = keys.tensor("per_layer_token_embd.weight")
    more = {} if embedding is None else {"vocab_size_per_layer_input": embedding.shape[0]}
    return {
        "layer_types": types,
        "sliding_window": keys.window,
        "rope_parameters": rope.two(keys, 10_000.0),
        "head_dim": keys.size("attention.key_length_swa"),
        "global_head_dim": keys.size("attention.key_length"),
        "num_key_value_heads": kv_heads[sliding],
        "num_global_key_value_heads": kv_heads[full],
        "attention_k_eq_v": keys.tensor(f"blk.{full}.attn_v.weight") is None,
        "intermediate_size": inner[0],
        "use_double_wide_mlp": inner[-1] == 2 * inner[0],
        "num_kv_shared_layers": keys.fields.header.fields.get(keys.name("attention.shared_kv_layers"), 0),
        "hidden_size_per_layer_input": inputs,
        **more,
        **_gated_gelu(keys),
    }


@dataclass(frozen=True, slots=True)
class Architecture:
    family: str  # as config.json spells it
    model_type: str
    more: More = _nothing
    names: Mapping[str, str] = field(default_factory=dict)  # of a layer's tensors, where they are not Llama's
    turned: frozenset[str] = frozenset()  # parts whose rows are interleaved
    norm_offset: float = 0.0
    eps: str = "rms_norm_eps"  # config.json's key
    windows: bool = False  # sliding_window is understood
    partial: bool = False  # rope.dimension_count may be smaller than a head
    sections: bool = False  # rope.dimension_sections change nothing for text

    @property
    def parts(self) -> Mapping[str, str]:
        """The checkpoint's names of all parts of a layer; its own come first."""
        return {**self.names, **{part: name for part, name in _LLAMA.items() if part not in self.names}}


ARCHITECTURES: Final = {
    "llama": Architecture("LlamaForCausalLM", "llama", turned=_TURNED),
    "mistral3": Architecture("Ministral3ForCausalLM", "ministral3", _mistral3, turned=_TURNED),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", _qwen),
    "qwen2vl": Architecture("Qwen2ForCausalLM", "qwen2", _qwen, sections=True),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", _qwen),
    "qwen3vl": Architecture("Qwen3ForCausalLM", "qwen3", _qwen, sections=True),
    "phi3": Architecture(
        "Phi3ForCausalLM", "phi3", _phi3, {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}, windows=True, partial=True
    ),
    "granite": Architecture("GraniteForCausalLM", "granite", _granite, turned=_TURNED),
    "smollm3": Architecture("SmolLM3ForCausalLM", "smollm3", _smollm3, turned=_TURNED),
    "olmo2": Architecture("Olmo2ForCausalLM", "olmo2", _olmo2, _POST, windows=True),
    "seed_oss": Architecture("SeedOssForCausalLM", "seed_oss", _seed_oss, {"post_attention_norm": "post_attention_layernorm"}),
    "exaone4": Architecture("Exaone4ForCausalLM", "exaone4", _exaone4, _POST, windows=True),
    "glm4": Architecture(
        "Glm4ForCausalLM", "glm4", _glm4,
        {"ffn_up": "mlp.gate_up_proj", "post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"},
        partial=True,
    ),
    "cohere2": Architecture("Cohere2ForCausalLM", "cohere2", _cohere2, eps="layer_norm_eps", windows=True),
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM", "starcoder2", _starcoder2, {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}, eps="norm_epsilon"
    ),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM", "ernie4_5", _ernie),
    "hunyuan-dense": Architecture(
        "HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense",
        names={"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
    ),
    "gemma2": Architecture("Gemma2ForCausalLM", "gemma2", _gemma2, _GEMMA, norm_offset=1.0, windows=True),
    "gemma3": Architecture("Gemma3ForCausalLM", "gemma3_text", _gemma3, _GEMMA, norm_offset=1.0, windows=True),
    "gemma4": Architecture("Gemma4ForCausalLM", "gemma4_text", _gemma4, _GEMMA4, windows=True),
}  # fmt: skip
"""By `general.architecture`."""


def of(fields: Fields) -> Architecture:
    """The architecture of a file. Raises ModelError for one that is not supported."""
    name = fields.text("general.architecture")
    if name not in ARCHITECTURES:
        raise ModelError(
            f"{fields.where}: general.architecture is {shown(name)}; supported are {', '.join(ARCHITECTURES)}; another model is needed"
        )
    return ARCHITECTURES[name]

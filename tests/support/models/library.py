"""Tiny random models of architectures that the transformers backend serves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import transformers

from tests.support.models.tiny import COMMON, TWO_KINDS, TinyModel

EXPERTS: Final = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
LOCAL: Final = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED: Final = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
LATENT: Final = {
    "num_key_value_heads": 6, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
}  # fmt: skip
WINDOWS: Final = {"sliding_window": 37, "layer_types": TWO_KINDS}
ARCHITECTURES: Final[dict[str, dict[str, Any]]] = {
    "MixtralForCausalLM": LOCAL | {"sliding_window": 37},
    "GptOssForCausalLM": LOCAL | WINDOWS | {"head_dim": 16},
    "DeepseekV3ForCausalLM": ROUTED | LATENT,
    "DeepseekV2ForCausalLM": ROUTED | LATENT | {"n_group": 1},
    "Gemma2ForCausalLM": WINDOWS | {"head_dim": 16, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 9.0},
    "Gemma4ForCausalLM": WINDOWS | {
        "head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 3, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True,
    },
    "LlamaForCausalLM": {},
    "Qwen2MoeForCausalLM": EXPERTS | {"shared_expert_intermediate_size": 64},
    "Qwen3MoeForCausalLM": EXPERTS | {"head_dim": 16},
    "OlmoeForCausalLM": EXPERTS,
    "FlexOlmoForCausalLM": EXPERTS,
    "Glm4MoeForCausalLM": ROUTED | {"head_dim": 16},
    "Glm4MoeLiteForCausalLM": ROUTED | LATENT,
    "Dots1ForCausalLM": ROUTED | {"head_dim": 16},
    "Ernie4_5_MoeForCausalLM": {
        "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 48, "moe_num_shared_experts": 1, "moe_layer_start_index": 1,
    },
    "ExaoneMoeForCausalLM": ROUTED | {"num_experts": 4, "num_shared_experts": 1, **WINDOWS},
    "GraniteMoeForCausalLM": LOCAL,
    "GraniteMoeSharedForCausalLM": LOCAL | {"shared_intermediate_size": 64},
    "HunYuanMoEV1ForCausalLM": {"num_experts": 4, "moe_topk": 2, "head_dim": 16},
    "PhimoeForCausalLM": LOCAL,
    "MiniMaxM2ForCausalLM": LOCAL | {"head_dim": 16},
    "Cohere2MoeForCausalLM": EXPERTS | WINDOWS,
    "AfmoeForCausalLM": EXPERTS | WINDOWS | {"num_shared_experts": 1, "num_dense_layers": 1, "head_dim": 16},
    "ArceeForCausalLM": {},
    "ApertusForCausalLM": {},
    "BitNetForCausalLM": {},
    "CohereForCausalLM": {},
    "CwmForCausalLM": WINDOWS | {"head_dim": 16, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0},
    "GemmaForCausalLM": {"head_dim": 16},
    "Gemma3ForCausalLM": WINDOWS | {"head_dim": 16},
    "GlmForCausalLM": {"head_dim": 16},
    "GPT2LMHeadModel": {"n_embd": 96, "n_layer": 3, "n_head": 6, "n_positions": 512, "n_inner": 176},
    "GPTNeoXForCausalLM": {},
    "HeliumForCausalLM": {"head_dim": 16},
    "Jais2ForCausalLM": {},
    "NanoChatForCausalLM": {},
    "OlmoForCausalLM": {"clip_qkv": 6.0},
    "OPTForCausalLM": {"ffn_dim": 176, "word_embed_proj_dim": 96, "num_key_value_heads": 6},
    "PersimmonForCausalLM": {},
    "Phi3ForCausalLM": {"sliding_window": 37},
    "PhiForCausalLM": {},
    "SmolLM3ForCausalLM": {"no_rope_layer_interval": 2},
    "VaultGemmaForCausalLM": WINDOWS | {"head_dim": 16},
    "YoutuForCausalLM": LATENT,
}  # fmt: skip
"""By class of transformers, options of their configs beyond `COMMON`. The first few are one of each mechanism."""


def make(folder: Path, architecture: str, **changes: Any) -> TinyModel:
    """A model with random weights, saved by transformers."""
    kind = getattr(transformers, architecture)
    torch.manual_seed(len(architecture))
    reference = kind(kind.config_class(**(COMMON | ARCHITECTURES[architecture] | changes))).eval()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if parameter.ndim == 1:  # biases start as zero and norms as one: both would hide mistakes
                parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if "norm" in name or "ln_" in name else 0.0))
    reference.save_pretrained(folder)
    return TinyModel(folder, reference)


@pytest.fixture(scope="session")
def library_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    made: dict[str, TinyModel] = {}

    def get(architecture: str) -> TinyModel:
        if architecture not in made:
            made[architecture] = make(tmp_path_factory.mktemp(architecture), architecture)
        return made[architecture]

    return get

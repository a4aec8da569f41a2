"""Classes of transformers that a test compares with the library's own results when its backend computes them."""

from __future__ import annotations

from typing import Final

COMPARED: Final = frozenset({
    "AfmoeForCausalLM", "ApertusForCausalLM", "ArceeForCausalLM", "BitNetForCausalLM", "Cohere2ForCausalLM",
    "Cohere2MoeForCausalLM", "CohereForCausalLM", "CwmForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM",
    "Dots1ForCausalLM", "Ernie4_5ForCausalLM", "Ernie4_5_MoeForCausalLM", "Exaone4ForCausalLM", "ExaoneMoeForCausalLM",
    "FlexOlmoForCausalLM", "GPT2LMHeadModel", "GPTNeoXForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma4ForCausalLM",
    "GemmaForCausalLM", "Glm4ForCausalLM", "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM", "GlmForCausalLM", "GptOssForCausalLM",
    "GraniteForCausalLM", "GraniteMoeForCausalLM", "GraniteMoeHybridForCausalLM", "GraniteMoeSharedForCausalLM",
    "HeliumForCausalLM", "HunYuanDenseV1ForCausalLM", "HunYuanMoEV1ForCausalLM", "Jais2ForCausalLM", "LlamaForCausalLM",
    "MiniMaxM2ForCausalLM", "Ministral3ForCausalLM", "MinistralForCausalLM", "MistralForCausalLM", "MixtralForCausalLM",
    "NanoChatForCausalLM", "OPTForCausalLM", "Olmo2ForCausalLM", "Olmo3ForCausalLM", "OlmoForCausalLM", "OlmoeForCausalLM",
    "PersimmonForCausalLM", "Phi3ForCausalLM", "PhiForCausalLM", "PhimoeForCausalLM", "Qwen2ForCausalLM", "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "SeedOssForCausalLM", "SmolLM3ForCausalLM", "Starcoder2ForCausalLM",
    "VaultGemmaForCausalLM", "YoutuForCausalLM",
})  # fmt: skip

"""The metadata of a GGUF file as config.json, generation_config.json and tokenizer_config.json."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from banyan_runtime.errors import ModelError
from banyan_runtime.hub.files import shown
from banyan_runtime.hub.gguf.header import Fields
from banyan_runtime.hub.gguf.tensors import ROPE_FACTORS

_ARCHITECTURES: Final = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_TYPES: Final = {"F32": "float32", "F16": "float16"}  # what the checkpoint had; of quantized files nobody knows
_ENDS: Final = ("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>")
"""Tokens that end a text wherever they are. A file names one of those that its model may write; checkpoints name all."""
_CONTROL: Final = 3  # type of special tokens
_SAMPLING: Final = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
}  # fmt: skip
_LLAMA3: Final = (1.0, 4.0)  # low_freq_factor, high_freq_factor of every known model
_CONTEXTS: Final = tuple(1 << power for power in range(5, 18))  # that such a model may have had before it was stretched


def architecture(fields: Fields) -> str:
    """Raises ModelError for one that is not supported."""
    name = fields.text("general.architecture")
    if name not in _ARCHITECTURES:
        raise ModelError(
            f"{fields.where}: general.architecture is {shown(name)}; supported are {', '.join(_ARCHITECTURES)}; another model is needed"
        )
    return name


def config(fields: Fields) -> dict[str, Any]:
    """config.json. Raises ModelError that names the key."""
    name = architecture(fields)
    tensors = fields.header.tensors
    if (parts := fields.size("split.count", 1)) > 1:
        raise ModelError(
            f"{fields.where}: split.count is {parts}, so it is one part of several; join them ('llama-gguf-split --merge FIRST WHOLE') "
            "and serve the whole file"
        )
    for key in ("expert_count", "attention.sliding_window"):
        if fields.header.fields.get(f"{name}.{key}"):
            raise ModelError(f"{fields.where}: '{name}.{key}' is set; such models are not supported, serve another one")
    if "token_embd.weight" not in tensors:
        raise ModelError(f"{fields.where}: tensor 'token_embd.weight' is missing; the file is not a complete model, fetch it again")
    embedding = tensors["token_embd.weight"]
    heads, hidden = fields.size(f"{name}.attention.head_count"), fields.size(f"{name}.embedding_length")
    head_dim = fields.size(f"{name}.attention.key_length", max(1, hidden // heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if (other := fields.size(f"{name}.{key}", head_dim)) != head_dim:
            raise ModelError(f"{fields.where}: '{name}.{key}' is {other} and heads have {head_dim}; that is not supported")
    bias = {part: f"blk.0.{part}.bias" in tensors for part in ("attn_q", "ffn_up")}
    return {
        "architectures": [_ARCHITECTURES[name]],
        "model_type": name,
        "dtype": _TYPES.get(embedding.kind, "bfloat16"),
        "hidden_size": hidden,
        "intermediate_size": fields.size(f"{name}.feed_forward_length"),
        "num_hidden_layers": fields.size(f"{name}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.size(f"{name}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": fields.size(f"{name}.context_length"),
        "rms_norm_eps": fields.number(f"{name}.attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(fields, name, head_dim),
        "vocab_size": embedding.shape[0],
        "hidden_act": "silu",
        "attention_bias": bias["attn_q"],
        "mlp_bias": bias["ffn_up"],
        "tie_word_embeddings": "output.weight" not in tensors,
        **_tokens(fields),
    }


def generation_config(fields: Fields) -> dict[str, Any]:
    """generation_config.json: tokens that end a text, and how to sample, where the file says it."""
    sampling = {ours: fields.header.fields[key] for theirs, ours in _SAMPLING.items() if fields.has(key := f"general.sampling.{theirs}")}
    return _tokens(fields) | {key: float(str(np.float32(value))) if isinstance(value, float) else value for key, value in sampling.items()}


def tokenizer_config(fields: Fields) -> dict[str, Any]:
    """tokenizer_config.json: the named tokens and the chat template."""
    tokens = fields.texts("tokenizer.ggml.tokens", [])
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    found = {
        name: tokens[number]
        for name, key in named.items()
        if (number := fields.index(f"tokenizer.ggml.{key}_token_id", len(tokens))) is not None
    }
    templates = {"default": fields.text("tokenizer.chat_template")} if fields.has("tokenizer.chat_template") else {}
    for name in fields.texts("tokenizer.chat_templates", []):
        templates[name] = fields.text(f"tokenizer.chat_template.{name}")
    more: dict[str, Any] = {}
    if templates:
        listed = [{"name": name, "template": template} for name, template in templates.items()]
        more["chat_template"] = templates["default"] if list(templates) == ["default"] else listed
    return {"tokenizer_class": "PreTrainedTokenizerFast", **found, "clean_up_tokenization_spaces": False, **more}


def _tokens(fields: Fields) -> dict[str, Any]:
    texts, kinds = fields.texts("tokenizer.ggml.tokens", []), fields.header.fields.get("tokenizer.ggml.token_type")

    def token(name: str) -> int | None:
        return fields.index(f"tokenizer.ggml.{name}_token_id", len(texts) or 1 << 31)

    ends = [found for name in ("eos", "eot", "eom") if (found := token(name)) is not None]
    if isinstance(kinds, list) and len(kinds) == len(texts):
        ends += [number for number, (text, kind) in enumerate(zip(texts, kinds, strict=True)) if kind == _CONTROL and text in _ENDS]
    ids = {"bos_token_id": token("bos"), "eos_token_id": list(dict.fromkeys(ends)) or None, "pad_token_id": token("padding")}
    return {key: value for key, value in ids.items() if value is not None}


def _rope(fields: Fields, name: str, head_dim: int) -> dict[str, Any]:
    theta = fields.number(f"{name}.rope.freq_base", 10_000.0)
    kind = fields.text(f"{name}.rope.scaling.type", "none")
    factors = fields.header.tensors.get(ROPE_FACTORS)
    if factors is not None:
        if factors.kind != "F32" or factors.shape != (head_dim // 2,):
            raise ModelError(f"{fields.where}: tensor '{ROPE_FACTORS}' is {factors.kind} of shape {list(factors.shape)}; fetch it again")
        values = np.ascontiguousarray(factors.lines(fields.header.memory())).view("<f4")[0]
        return {"rope_theta": theta, **_stretched(fields, theta, values.astype(np.float64).tolist())}
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": fields.number(f"{name}.rope.scaling.factor")}
    if kind == "yarn":
        return {"rope_type": "yarn", "rope_theta": theta, **_yarn(fields, f"{name}.rope.scaling")}
    raise ModelError(
        f"{fields.where}: '{name}.rope.scaling.type' is {shown(kind)}; supported are none, linear, yarn and the factors of Llama 3; "
        "another model is needed"
    )


def _yarn(fields: Fields, name: str) -> dict[str, Any]:
    """What is not there is as transformers has it by default, which is as llama.cpp has it. Its attn_factor comes on top of what follows
    from the factor."""
    found: dict[str, Any] = {"factor": fields.number(f"{name}.factor")}
    if fields.has(f"{name}.original_context_length"):
        found["original_max_position_embeddings"] = fields.size(f"{name}.original_context_length")
    for key in ("beta_fast", "beta_slow"):
        if fields.has(f"{name}.yarn_{key}"):
            found[key] = fields.number(f"{name}.yarn_{key}")
    for key in ("attn_factor", "yarn_attn_factor"):
        if fields.has(f"{name}.{key}"):
            found["attention_factor"] = fields.number(f"{name}.{key}") * (1.0 + 0.1 * math.log(max(1.0, found["factor"])))
    return found


def _stretched(fields: Fields, theta: float, factors: Sequence[float]) -> dict[str, Any]:
    """The settings that make these factors by the rule of Llama 3: converters write down its result alone."""
    factor = max(factors)
    for context in _CONTEXTS:
        expected = _llama3(theta, len(factors), factor, context)
        if all(abs(found - value) <= 1e-4 * value for found, value in zip(factors, expected, strict=True)):
            low, high = _LLAMA3
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": context,
            }
    raise ModelError(
        f"{fields.where}: tensor '{ROPE_FACTORS}' holds factors that do not follow the rule of Llama 3; put the model's config.json beside "
        "the file and name their folder, or serve its safetensors"
    )


def _llama3(theta: float, count: int, factor: float, context: int) -> list[float]:
    """By what each frequency is divided."""
    low, high = _LLAMA3
    divisors = []
    for index in range(count):
        turns = context / (2 * math.pi * theta ** (index / count))  # of this frequency in the original context
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors

"""The metadata of a GGUF file as config.json, generation_config.json and tokenizer_config.json."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from banyan_runtime.errors import ModelError
from banyan_runtime.hub.gguf import architectures, rope
from banyan_runtime.hub.gguf.architectures import Architecture
from banyan_runtime.hub.gguf.header import Fields
from banyan_runtime.hub.gguf.keys import Keys

_TYPES: Final = {"F32": "float32", "F16": "float16"}  # what the checkpoint had; of quantized files nobody knows
_ENDS: Final = ("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>")
"""Tokens that end a text wherever they are. A file names one of those that its model may write; checkpoints name all."""
_CONTROL: Final = 3  # type of special tokens
_SAMPLING: Final = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
}  # fmt: skip


def config(fields: Fields) -> dict[str, Any]:
    """config.json. Raises ModelError that names the key."""
    known, keys = architectures.of(fields), Keys(fields)
    _refuse(keys, known)
    if (embedding := keys.tensor("token_embd.weight")) is None:
        raise ModelError(f"{fields.where}: tensor 'token_embd.weight' is missing; the file is not a complete model, fetch it again")
    heads, own = keys.size("attention.head_count"), known.more(keys)
    makers: dict[str, Callable[[], Any]] = {
        "architectures": lambda: [known.family],
        "model_type": lambda: known.model_type,
        "dtype": lambda: _TYPES.get(embedding.kind, "bfloat16"),
        "hidden_size": lambda: keys.size("embedding_length"),
        "intermediate_size": lambda: keys.size("feed_forward_length"),
        "num_hidden_layers": lambda: keys.size("block_count"),
        "num_attention_heads": lambda: heads,
        "num_key_value_heads": lambda: keys.size("attention.head_count_kv", heads),
        "head_dim": lambda: keys.head_dim,
        "max_position_embeddings": lambda: keys.size("context_length"),
        known.eps: lambda: keys.number(f"attention.layer_norm_{'rms_' if known.eps == 'rms_norm_eps' else ''}epsilon"),
        "rope_parameters": lambda: rope.settings(keys),
        "vocab_size": lambda: embedding.shape[0],
        "hidden_act": lambda: "silu",
        "attention_bias": lambda: keys.tensor("blk.0.attn_q.bias") is not None,
        "mlp_bias": lambda: keys.tensor("blk.0.ffn_up.bias") is not None,
        "tie_word_embeddings": lambda: keys.tensor("output.weight") is None,
    }
    return {name: make() for name, make in makers.items() if name not in own} | own | _tokens(fields)


def _refuse(keys: Keys, known: Architecture) -> None:
    """Raises ModelError for what changes a model and is not supported."""
    values = keys.fields.header.fields
    unsupported = ["expert_count", "nextn_predict_layers"]
    unsupported += [] if known.windows else ["attention.sliding_window"]
    unsupported += [] if known.sections else ["rope.dimension_sections"]
    for key in unsupported:
        if values.get(keys.name(key)):
            raise ModelError(f"{keys.fields.where}: '{keys.name(key)}' is set; such models are not supported, serve another one")
    if not keys.fields.truth(keys.name("attention.causal"), default=True):
        raise ModelError(f"{keys.fields.where}: '{keys.name('attention.causal')}' is false; such models are not supported")
    for key in ("attention.value_length", *(() if known.partial else ("rope.dimension_count",))):
        if (other := keys.size(key, keys.head_dim)) != keys.head_dim:
            raise ModelError(f"{keys.fields.where}: '{keys.name(key)}' is {other} and heads have {keys.head_dim}; that is not supported")


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

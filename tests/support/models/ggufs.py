"""GGUF files made of model folders with the format's own library: its names of tensors, its order of rows, its rounding."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, quants
from safetensors.torch import load_file

from banyan_runtime.model import blocks
from banyan_runtime.model.block_values import SIZES

ARCHITECTURES = {
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "MistralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Qwen2ForCausalLM": gguf.MODEL_ARCH.QWEN2,
    "Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3,
}
_HALVES_AT = {"Q5_K": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "IQ4_NL": (0,), "IQ4_XS": (0,)}
"""Float16 in blocks of kinds that the library only reads."""
CONTROL, USER_DEFINED, NORMAL, UNUSED, UNKNOWN = 3, 4, 1, 5, 2


def write(
    folder: Path,
    path: Path,
    kind: Callable[[str], str] = lambda name: "F32",
    *,
    pre: str = "gpt-2",
    rope_factors: npt.NDArray[np.float32] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Write the model of a folder; `kind` says how each matrix is stored, by the name that the file gives it."""
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[config["architectures"][0]]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    write_tokenizer(writer, folder, pre, config)
    for key, value in (extra or {}).items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool}[type(value)]
        add(key, value)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, tensor in load_file(folder / "model.safetensors").items():
        values = tensor.float().numpy()
        there = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert there is not None, name
        if architecture == gguf.MODEL_ARCH.LLAMA and (".attn_q." in there or ".attn_k." in there):
            values = interleaved(values, heads if ".attn_q." in there else kv_heads)
        stored = kind(there) if values.ndim == 2 else "F32"
        writer.add_tensor(there, encoded(values, stored), raw_dtype=GGMLQuantizationType[stored])
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def encoded(values: npt.NDArray[np.float32], kind: str) -> npt.NDArray[Any]:
    """The bytes of a matrix; K kinds by our own hand, for the library only reads them."""
    if kind == "F32":
        return values
    if kind in ("Q4_K", "Q6_K"):
        return blocks.quantize(values, kind).data  # type: ignore[arg-type]
    if kind in _HALVES_AT:  # any bytes are a matrix
        length, size = SIZES[kind]  # type: ignore[index]
        data = np.random.default_rng(values.shape[0]).integers(0, 256, (values.size // length, size), np.uint8)
        for at in _HALVES_AT[kind]:
            data[:, at : at + 2] = np.array([[0.001]] * len(data), "<f2").view(np.uint8)
        return data.reshape(len(values), -1)
    found: npt.NDArray[Any] = quants.quantize(values, GGMLQuantizationType[kind])
    return found


def decoded(values: npt.NDArray[np.float32], kind: str) -> npt.NDArray[np.float32]:
    """What a reader gets back."""
    if kind == "F32":
        return values
    found: npt.NDArray[np.float32] = quants.dequantize(encoded(values, kind), GGMLQuantizationType[kind])
    return found


def interleaved(values: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """The order of rows in which llama.cpp rotates neighbours."""
    rows = values.shape[0]
    return values.reshape(heads, 2, rows // heads // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def write_tokenizer(writer: gguf.GGUFWriter, folder: Path, pre: str, config: Mapping[str, Any]) -> None:
    """The vocabulary of tokenizer.json, if the folder has one, as converters write it."""
    if not (folder / "tokenizer.json").exists():
        writer.add_tokenizer_model("none")
        return
    model = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    tokens = {number: (token, NORMAL) for token, number in model["model"]["vocab"].items()}
    tokens |= {entry["id"]: (entry["content"], CONTROL if entry["special"] else USER_DEFINED) for entry in model["added_tokens"]}
    size = max(config["vocab_size"], 1 + max(tokens))
    listed = [tokens.get(number, (f"[PAD{number}]", UNUSED)) for number in range(size)]
    ids = {token: number for number, (token, _) in tokens.items()}
    scored = bool(model["model"].get("byte_fallback"))
    if scored:
        listed = [(token, UNKNOWN if token == "<unk>" else kind) for token, kind in listed]
    writer.add_tokenizer_model("llama" if scored else "gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([token for token, _ in listed])
    writer.add_token_types([kind for _, kind in listed])
    if scored:  # by their place, as SentencePiece has it
        writer.add_token_scores([-float(number) for number in range(size)])
        writer.add_add_space_prefix(bool((model["normalizer"] or {}).get("normalizers")))
    else:
        writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["model"]["merges"]])
    for name, add in (
        ("bos_token", writer.add_bos_token_id),
        ("eos_token", writer.add_eos_token_id),
        ("pad_token", writer.add_pad_token_id),
    ):
        token = settings.get(name)
        if (text := token.get("content") if isinstance(token, dict) else token) is not None:
            add(ids[text])
    template = folder / "chat_template.jinja"
    if (text := template.read_text() if template.exists() else settings.get("chat_template")) is not None:
        writer.add_chat_template(text)

"""What lies in a model folder, read from headers alone: nothing is loaded, so it takes milliseconds for any size."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from banyan_runtime.errors import ModelError

_ITEM_BYTES = {
    "F64": 8,
    "I64": 8,
    "F32": 4,
    "I32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
}


@dataclass(frozen=True)
class Summary:
    """Sizes in bytes, lengths in tokens."""

    architecture: str
    parameters: int
    weight_bytes: int
    dtypes: dict[str, int]  # safetensors type -> tensors
    files: int
    layers: int
    context_length: int | None
    kv_bytes_per_token: int  # for the checkpoint's own type
    vocabulary: int | None
    tokenizer: bool
    chat_template: bool


def inspect(folder: Path) -> Summary:
    """Summarise a model folder. Raises ModelError naming the file that is missing or broken."""
    config = _json(folder / "config.json")
    files = _weight_files(folder)
    parameters = weight_bytes = 0
    dtypes: dict[str, int] = {}
    for file in files:
        try:
            with safe_open(file, framework="numpy") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - a safe_open is no dict
                    piece = tensors.get_slice(name)
                    count = 1
                    for size in piece.get_shape():
                        count *= size
                    kind = piece.get_dtype()
                    parameters += count
                    weight_bytes += count * _ITEM_BYTES.get(kind, 1)
                    dtypes[kind] = dtypes.get(kind, 0) + 1
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file}: cannot be read as safetensors ({error}); the file is truncated or damaged, fetch it again") from None
    heads = config.get("num_attention_heads", 0)
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or (config.get("hidden_size", 0) // heads if heads else 0)
    layers = config.get("num_hidden_layers", 0)
    item = max((_ITEM_BYTES.get(kind, 1) for kind in dtypes), default=2)
    tokenizer_config = folder / "tokenizer_config.json"
    template = (folder / "chat_template.jinja").exists() or (tokenizer_config.exists() and "chat_template" in _json(tokenizer_config))
    return Summary(
        architecture=", ".join(config.get("architectures") or ["(none named)"]),
        parameters=parameters,
        weight_bytes=weight_bytes,
        dtypes=dtypes,
        files=len(files),
        layers=layers,
        context_length=config.get("max_position_embeddings"),
        kv_bytes_per_token=2 * layers * kv_heads * head_dim * item,
        vocabulary=config.get("vocab_size"),
        tokenizer=(folder / "tokenizer.json").exists() or (folder / "tokenizer.model").exists(),
        chat_template=template,
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file, so {path.parent} is not a whole model folder") from None
    except ValueError as error:
        raise ModelError(f"{path}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: holds no JSON object")
    return value


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(_json(index).get("weight_map", {}).values()))
        if gone := [name for name in names if not (folder / name).exists()]:
            raise ModelError(f"{index}: names the shards {', '.join(gone)}, which are not in {folder}")
        return [folder / name for name in names]
    return sorted(folder.glob("*.safetensors"))


def describe(folder: Path, summary: Summary) -> str:
    """The summary as aligned lines for a terminal."""
    kinds = ", ".join(f"{count} x {kind}" for kind, count in sorted(summary.dtypes.items())) or "none: serve with --load-format dummy"
    rows = [
        ("folder", str(folder)),
        ("architecture", summary.architecture),
        ("parameters", f"{summary.parameters:,} in {summary.layers} layers"),
        ("weights", f"{summary.weight_bytes / 1e6:,.1f} MB in {summary.files} file(s); tensors: {kinds}"),
        ("context", f"{summary.context_length:,} tokens" if summary.context_length else "not said"),
        ("KV cache", f"{summary.kv_bytes_per_token:,} bytes per token in the checkpoint's type"),
        (
            "tokenizer",
            f"{'found' if summary.tokenizer else 'MISSING'}, vocabulary {summary.vocabulary:,}" if summary.vocabulary else "not said",
        ),
        ("chat template", "found" if summary.chat_template else "MISSING: /v1/chat/completions needs --chat-template"),
    ]
    return "\n".join(f"{name:<14}{value}" for name, value in rows)

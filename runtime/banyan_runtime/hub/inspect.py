"""What lies in a model folder, read from headers alone: nothing is loaded, so it takes milliseconds for any size."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from banyan_runtime.errors import ModelError
from banyan_runtime.hub import checkpoint
from banyan_runtime.hub.checkpoint import StoredTensor
from banyan_runtime.hub.files import TOKENIZERS, read_object, read_object_if_any, shown, text_key
from banyan_runtime.hub.gguf import header
from banyan_runtime.hub.gguf.files import find, parts

_PLAIN: Final = ("F64", "F32", "F16", "BF16")
_JOINED: Final = (".qweight", ".weight_packed")  # several numbers of a matrix in one of 32 bits
_BESIDE: Final = (
    ".qzeros", ".scales", ".g_idx", ".weight_scale", ".weight_scale_inv", ".weight_zero_point", ".weight_g_idx", *checkpoint.UNREAD,
)  # fmt: skip
"""What lies beside packed matrices and is none of their numbers."""
_NO_WEIGHTS: Final = "there are no weights (*.safetensors, *.gguf); with --load-format dummy it answers nonsense"
_LARGEST = 1 << 24  # of a size in config.json: the products of sizes below stay printable


@dataclass(frozen=True)
class Summary:
    """Sizes in bytes, lengths in tokens."""

    architecture: str
    parameters: int
    weight_bytes: int
    dtypes: dict[str, int]  # type in the files' words -> tensors
    files: int
    layers: int
    context_length: int | None
    kv_bytes_per_token: int  # for the checkpoint's own type; in 16 bits where that is a GGUF file
    vocabulary: int | None
    tokenizer: bool
    chat_template: bool
    refused: str | None = None  # why it cannot be served, if that is known
    family: str | None = None
    runner: str | None = None  # that computes it on this machine
    slower_because: dict[str, str] | None = None  # why faster runners do not compute it, by their names
    memory_bytes: int | None = None  # of its weights in that runner


def inspect(folder: Path) -> Summary:
    """Summarise a model folder. Raises ModelError naming the file that is missing or broken."""
    path = folder / "config.json"
    try:
        config = read_object(path)
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file, so {folder} is not a whole model folder") from None
    whole = find(folder)
    files = checkpoint.files(folder) if whole is None else dict.fromkeys(parts(whole), frozenset[str]())
    tensors = checkpoint.tensors(files) if whole is None else _of_gguf(whole)
    named, joined = config.get("architectures"), _joined(config)
    config = config[key] if (key := text_key(config)) else config
    heads = _count(config, "num_attention_heads", path) or 0
    kv_heads = _count(config, "num_key_value_heads", path) or heads
    head_dim = _count(config, "head_dim", path) or ((_count(config, "hidden_size", path) or 0) // heads if heads else 0)
    layers = _count(config, "num_hidden_layers", path) or 0
    plain = [tensor for tensor in tensors if tensor.dtype in _PLAIN and not tensor.name.endswith(_BESIDE)]
    item = max((tensor.nbytes // (math.prod(tensor.shape) or 1) for tensor in plain), default=2) if whole is None else 2
    kv_bytes = 2 * layers * kv_heads * head_dim * item
    if kv_bytes >= 1 << 63:
        raise ModelError(f"{path}: its sizes make {kv_bytes} bytes per token, which no model has")
    weight_bytes = sum(tensor.nbytes for tensor in tensors)
    return Summary(
        architecture=", ".join(map(str, named)) if isinstance(named, list) and named else "(none named)",
        parameters=sum(_numbers(tensor, joined) for tensor in tensors),
        weight_bytes=weight_bytes,
        dtypes=dict(Counter(tensor.dtype for tensor in tensors)),
        files=len(files),
        layers=layers,
        context_length=_count(config, "max_position_embeddings", path),
        kv_bytes_per_token=kv_bytes,
        vocabulary=_count(config, "vocab_size", path),
        tokenizer=any((folder / name).exists() for name in TOKENIZERS),
        chat_template=(folder / "chat_template.jinja").exists() or "chat_template" in read_object_if_any(folder / "tokenizer_config.json"),
        refused=None if weight_bytes else _NO_WEIGHTS,
    )


def _numbers(tensor: StoredTensor, joined: int) -> int:
    """Parameters in a tensor; `joined`: in a number of 32 bits of those that hold several."""
    if tensor.name.endswith(_BESIDE):
        return 0
    return math.prod(tensor.shape) * (joined if tensor.name.endswith(_JOINED) else 1)


def _joined(config: Mapping[str, Any]) -> int:
    """Eight, where nothing is told."""
    quantization = config.get("quantization_config") or config.get("compression_config")
    told = [quantization.get("bits")] if isinstance(quantization, dict) else []
    groups = quantization.get("config_groups") if isinstance(quantization, dict) else None
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        told.append(weights.get("num_bits") if isinstance(weights, dict) else None)
    return 4 if 8 in told else 8


def _of_gguf(file: Path) -> list[StoredTensor]:
    found = header.read(file).tensors.values()
    return [StoredTensor(each.name, each.file, each.shape, each.kind, each.offset, each.nbytes) for each in found]


def _count(config: Mapping[str, Any], key: str, path: Path) -> int | None:
    value = config.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LARGEST):
        raise ModelError(f"{path}: '{key}' is {shown(value)}, not a number of at most {_LARGEST}")
    return value


def _served(summary: Summary) -> str:
    if summary.refused is not None:
        return f"NO: {summary.refused}"
    if not summary.tokenizer:
        return "only with --skip-tokenizer-init: there is no tokenizer (tokenizer.json)"
    return "yes, as far as its files' headers tell"


def describe(folder: Path, summary: Summary) -> str:
    """The summary as aligned lines for a terminal."""
    kinds = ", ".join(f"{count} x {kind}" for kind, count in sorted(summary.dtypes.items())) or "none: serve with --load-format dummy"
    memory = "" if summary.memory_bytes is None else f", weights take {summary.memory_bytes / 1e6:,.1f} MB of memory"
    rows = [
        ("folder", str(folder)),
        ("architecture", summary.architecture),
        *([("family", summary.family)] if summary.family else []),
        *([("runner", f"{summary.runner}{memory}")] if summary.runner else []),
        *[(f"not {name}", why) for name, why in (summary.slower_because or {}).items()],
        ("parameters", f"{summary.parameters:,} in {summary.layers} layers"),
        ("weights", f"{summary.weight_bytes / 1e6:,.1f} MB in {summary.files} file(s); tensors: {kinds}"),
        ("context", f"{summary.context_length:,} tokens" if summary.context_length else "not said"),
        ("KV cache", f"{summary.kv_bytes_per_token:,} bytes per token"),
        (
            "tokenizer",
            f"{'found' if summary.tokenizer else 'MISSING'}, vocabulary {summary.vocabulary:,}" if summary.vocabulary else "not said",
        ),
        ("chat template", "found" if summary.chat_template else "MISSING: /v1/chat/completions needs --chat-template"),
        ("served", _served(summary)),
    ]
    return "\n".join(f"{name:<14}{value}" for name, value in rows)

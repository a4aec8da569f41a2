"""GGUF files of tiny models, made by llama.cpp's own converter. It runs in a process of its own, with its own version of `gguf`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import pytest

from tests.conftest import llama_cpp_converter
from tests.support.models.tiny import FAMILIES, VOCAB, TinyModel, make

LIKE_REAL_ONES: Final[dict[str, dict[str, Any]]] = {
    "cohere2": {"num_hidden_layers": 4, "layer_types": None},
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3": {"query_pre_attn_scalar": 32, "num_hidden_layers": 6, "layer_types": None},
    "gemma3-tower": {"query_pre_attn_scalar": 32, "num_hidden_layers": 6, "layer_types": None},
    "hunyuan": {"max_position_embeddings": 32768},
    "smollm3": {"no_rope_layer_interval": 4, "num_hidden_layers": 4},
    "starcoder2": {"sliding_window": 4096},
}
"""What the format has no key for is as in all known models."""
_IN_CONFIG: Final[dict[str, dict[str, Any]]] = {
    "cohere2": {"rotary_pct": 1.0},
    "granite4": {"layer_types": ["attention"] * 3, "num_experts_per_tok": None},
}
"""What transformers reads and the converter does not, or the reverse."""
WITHOUT: Final = ("ministral", "mistral-window", "qwen2-window")
"""Families that the converter does not know, or whose windows it forgets."""
_CONVERT: Final = """
import sys
from pathlib import Path
converter, most, *folders = sys.argv[1:]
sys.path[:0] = [converter, converter + "/gguf-py"]
import gguf, torch
from conversion import ModelBase, ModelType, get_model_architecture, get_model_class
for folder in map(Path, folders):
    with torch.inference_mode():
        kind = get_model_class(get_model_architecture(ModelBase.load_hparams(folder, False), ModelType.TEXT))
        made = kind(folder, gguf.LlamaFileType.ALL_F32, folder / "gguf" / "m.gguf", split_max_tensors=int(most))
        inner = getattr(made, "impl", made)
        inner.set_vocab = lambda inner=inner: inner.gguf_writer.add_tokenizer_model("none")
        made.write()
"""


def converted(root: Path, families: Iterable[str] = FAMILIES, *, most_tensors: int = 0) -> dict[str, TinyModel]:
    """Models with their GGUF file in a folder `gguf`; in several parts of so many tensors, if a number is named."""
    converter, models = llama_cpp_converter(), dict[str, TinyModel]()
    for family in families:
        if family not in WITHOUT:
            models[family] = make(root / family, family, **LIKE_REAL_ONES.get(family, {}))
            folder = root / family
            config = json.loads((folder / "config.json").read_text()) | _IN_CONFIG.get(family, {})
            (folder / "config.json").write_text(json.dumps(config))
            vocabulary = {str(number): number for number in range(VOCAB)}  # Gemma's embedding is cut to its size
            (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))
            (folder / "gguf").mkdir()
    command = [sys.executable, "-c", _CONVERT, str(converter), str(most_tensors), *(str(model.folder) for model in models.values())]
    found = subprocess.run(command, capture_output=True, text=True)
    if found.returncode:
        pytest.fail(found.stderr[-2000:])
    return models

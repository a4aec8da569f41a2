"""Weights of a model that the transformers library computes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM

from banyan_runtime.errors import ModelError
from banyan_runtime.hub import checkpoint
from banyan_runtime.hub.files import shown
from banyan_runtime.model import loader
from banyan_runtime.model.choice import Choice
from banyan_runtime.model.transformers_backend.attention import NAME
from banyan_runtime.model.transformers_backend.library import Library
from banyan_runtime.model.transformers_backend.refusal import LIBRARY, line

log = logging.getLogger("banyan")

_TOWERS: Final = {
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
    r"^model\.(language|text)_model\.": "model.",
}
"""Names of a text decoder within a larger model, and what they are without it."""
_TYPES: Final = ("F32", "F16", "BF16", "F64", "I64", "I32", "U8", "BOOL")  # the integers: buffers


def dummy(library: Library, choice: Choice) -> Any:
    """The model with random weights, as the library initializes it. Raises ConfigError where they do not fit."""
    loader.fit(library.elements * choice.dtype.itemsize, choice.dtype, choice.device)
    torch.manual_seed(loader.DUMMY_SEED)
    return library.build(choice.dtype, choice.device)


def load(library: Library, model_dir: Path, choice: Choice) -> Any:
    """The model with the weights of a folder. Raises ModelError for what is missing or of another shape, ConfigError where there is no
    room."""
    stored = checkpoint.tensors(loader.safetensors(model_dir))
    if strange := next((tensor for tensor in stored if tensor.dtype not in _TYPES or tensor.name.endswith(loader.PACKED)), None):
        raise ModelError(
            f"{strange.file.name}: tensor {shown(strange.name)} is {strange.dtype}: the transformers backend reads no quantized weights; "
            "take the model's bfloat16 or float16 files"
        )
    needed = library.elements * choice.dtype.itemsize
    for device in {choice.device, torch.device("cpu")}:  # they pass through the host's memory
        loader.fit(needed, choice.dtype, device)
    try:
        auto: Any = AutoModelForCausalLM
        model, report = auto.from_pretrained(
            str(model_dir),
            config=library.config,
            dtype=choice.dtype,
            attn_implementation=NAME,
            key_mapping=_TOWERS if library.nested else None,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=library.trusted,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, with their names
        )
    except Exception as error:  # whatever files that contradict config.json make the library raise
        raise ModelError(f"{model_dir}: {LIBRARY} cannot load the weights ({line(error)}); the checkpoint and its config differ") from error
    if misshapen := sorted(report["mismatched_keys"]):
        name, found, expected = misshapen[0]
        raise ModelError(
            f"{model_dir}: tensor '{name}' has shape {list(found)}, config.json asks for {list(expected)}; the checkpoint and its config "
            "belong to different models"
        )
    missing = sorted(name for name in report["missing_keys"] if not (library.spec.headless and name.startswith("lm_head.")))
    if missing:
        raise ModelError(f"{model_dir}: {loader.listed(missing)} missing from the safetensors files, config.json asks for them")
    if surplus := sorted(report["unexpected_keys"]):
        log.warning("%s: %s not of the text decoder, and not read.", model_dir, loader.listed(surplus))
    return model.to(choice.device).eval()

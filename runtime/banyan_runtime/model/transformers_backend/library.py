"""A model folder as the transformers library reads it: the class that computes it, its `DecoderSpec`, and what is refused of both."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from banyan_runtime.errors import ModelError
from banyan_runtime.hub.files import shown
from banyan_runtime.hub.gguf.files import find
from banyan_runtime.model.transformers_backend.attention import NAME
from banyan_runtime.model.transformers_backend.probe import probe
from banyan_runtime.model.transformers_backend.refusal import LIBRARY, line, refusal
from banyan_runtime.models.config import DecoderSpec, Layer, Mlp, Norm
from banyan_runtime.models.hf_config import HfConfig, bare
from banyan_runtime.models.registry import with_head

_SIZES: Final = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
_PLAIN: Final = "take the model's bfloat16 or float16 safetensors"


@dataclass(frozen=True, slots=True)
class Library:
    """A text decoder that the library computes. Nothing of it is loaded."""

    config: Any  # PretrainedConfig of the decoder
    spec: DecoderSpec
    computed_by: str  # class of the library
    elements: int  # of all parameters
    nested: bool  # the decoder is a part of the checkpoint's model
    trusted: bool  # code of the folder may run

    def build(self, dtype: torch.dtype, device: torch.device) -> Any:
        """The model, its weights as the library initializes them."""
        return _build(self.config, dtype, device, self.trusted)


def read(model_dir: Path, contents: Mapping[str, Any], where: str, *, trusted: bool) -> Library:
    """The decoder that a config.json describes; `where` names the file in errors. `trusted`: --trust-remote-code.

    Raises ModelError for what cannot be served, before anything is loaded.
    """
    if (file := find(model_dir)) is not None:
        raise ModelError(f"{file}: the transformers backend does not read GGUF files; {_PLAIN}")
    _check_sizes(contents, where)
    said: Any = transformers.logging
    said.set_verbosity_error()  # what the library would warn of is refused, or in our own log
    said.disable_progress_bar()
    config = _config(model_dir, contents, where, trusted)
    text = config.get_text_config(decoder=True)
    for nested in (contents, text.to_dict()):
        if packed := nested.get("quantization_config") or nested.get("compression_config"):
            method = packed.get("quant_method") if isinstance(packed, dict) else packed
            raise ModelError(f"{where}: quantization_config ({shown(method)}) is not read by the transformers backend; {_PLAIN}")
    architecture = _architecture(contents, config, text, where, trusted)
    sizes = {key: value for key in _SIZES if (value := _value(text, key)) is not None}
    reader = HfConfig(sizes | {"rope_parameters": _value(text, "rope_parameters")}, where)
    for key in sizes:  # also those that this model's file spells otherwise
        reader.size(key)
    dtype = None if text.dtype is None else str(text.dtype).removeprefix("torch.")
    try:
        model = _build(text, torch.bfloat16, torch.device("meta"), trusted)
    except Exception as error:  # of the model's own code
        raise ModelError(f"{where}: {LIBRARY} makes no model of it ({line(error)})") from error
    _check_class(type(model), where)
    probed = probe(model, where)
    if not reader.has("max_position_embeddings"):
        raise ModelError(
            f"{where}: 'max_position_embeddings' is missing; set the longest context with --json-model-override-args "
            "'{\"max_position_embeddings\": TOKENS}'"
        )
    inner = _value(text, "intermediate_size")
    mlp = Mlp(inner if isinstance(inner, int) else 4 * probed.hidden_size)
    spec = DecoderSpec(
        architecture=architecture,
        model_type=str(text.model_type),
        vocab_size=probed.vocab_size,
        hidden_size=probed.hidden_size,
        layers=tuple(Layer(attention, mlp) for attention in probed.layers),
        norm=Norm("rms", 1e-6),
        context_len=reader.context(),
        tied=False,
        dtype=dtype,
        headless=architecture.endswith("Model") and architecture != type(model).__name__,
    )
    elements = sum(parameter.numel() for parameter in model.parameters())
    return Library(text, spec, type(model).__name__, elements, text is not config, trusted)


def _check_sizes(contents: Mapping[str, Any], where: str) -> None:
    """Raises ModelError for a size that the library would make lists and layers of before it judges it."""
    parts = {where: contents} | {f"{where}: {key}": part for key, part in contents.items() if isinstance(part, dict)}
    for name, part in parts.items():
        reader = HfConfig(part, name)
        for key in _SIZES:
            if reader.has(key):
                reader.size(key)


def _config(model_dir: Path, contents: Mapping[str, Any], where: str, trusted: bool) -> Any:
    name = contents.get("model_type")
    own_code = bool(contents.get("auto_map"))
    if not isinstance(name, str) or (name not in CONFIG_MAPPING and not (trusted and own_code)):
        hint = "; its folder has code of its own, which --trust-remote-code runs" if own_code else ""
        raise ModelError(f"{where}: model_type={bare(name)} is not known to {LIBRARY}{hint}")
    try:
        if trusted and own_code:
            kind = type(AutoConfig.from_pretrained(str(model_dir), trust_remote_code=True, local_files_only=True))
            config = kind.from_dict(dict(contents))
            config._name_or_path = str(model_dir)  # where the library looks for the model's code
            return config
        return CONFIG_MAPPING[name].from_dict(dict(contents))
    except Exception as error:  # whatever a broken value makes the library raise
        raise ModelError(f"{where}: {LIBRARY} does not accept it ({line(error)})") from error


def _architecture(contents: Mapping[str, Any], config: Any, text: Any, where: str, trusted: bool) -> str:
    """The name in config.json, of a model that is a text decoder or has one."""
    named = contents.get("architectures")
    name = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else None
    if name is None:
        raise ModelError(f"{where}: 'architectures' is {shown(named)}, not a list of names")
    if config.is_encoder_decoder:
        raise ModelError(f"{where}: {bare(name)} has an encoder; the transformers backend serves decoders")
    if trusted and contents.get("auto_map"):
        return name
    found: Any = AutoModelForCausalLM._model_mapping.get(type(text), None)
    if found is None or (text is config and found.__name__ not in (name, with_head(name))):
        raise ModelError(f"{where}: transformers has no text decoder for {bare(name)}")
    _check_class(found, where)
    return name


def _check_class(kind: Any, where: str) -> None:
    if kind._is_stateful:
        raise refusal(where, f"{kind.__name__} keeps a state that is neither keys nor values")
    if not kind._supports_attention_backend:
        raise refusal(where, f"{kind.__name__} does not support the attention interface")


def _value(config: Any, key: str) -> Any:
    """What all layers have in common under a key; else None."""
    try:
        return getattr(config, key, None)
    except Exception:  # the library's for a key that has a value for each layer
        return None


def _build(config: Any, dtype: torch.dtype, device: torch.device, trusted: bool) -> Any:
    own, auto = copy.deepcopy(config), cast("Any", AutoModelForCausalLM)  # the library writes into a config
    with torch.device(device):
        return auto.from_config(own, dtype=dtype, attn_implementation=NAME, trust_remote_code=trusted).eval()

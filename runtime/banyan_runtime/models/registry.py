"""Which families there are, and the way from a model folder to its `DecoderSpec`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from banyan_runtime.errors import ModelError
from banyan_runtime.hub.files import read_object, shown, text_key
from banyan_runtime.models import (
    cohere,
    ernie,
    exaone,
    gemma,
    glm,
    granite,
    hunyuan,
    llama,
    mistral,
    olmo,
    phi,
    qwen,
    seed_oss,
    smollm,
    starcoder,
)
from banyan_runtime.models.config import DecoderSpec
from banyan_runtime.models.family import Family
from banyan_runtime.models.hf_config import HfConfig, bare
from banyan_runtime.models.quantization import packing
from banyan_runtime.models.weight_map import WeightMap, weight_map

_FILES: Final = (llama, mistral, qwen, phi, granite, smollm, olmo, seed_oss, exaone, glm, cohere, starcoder, ernie, hunyuan, gemma)
FAMILIES: Final[dict[str, Family]] = {architecture: family for file in _FILES for architecture, family in file.FAMILIES.items()}
"""By architecture, as config.json spells it."""
_BY_TEXT: Final = {"ministral3": "Ministral3ForCausalLM"}
"""Families of text decoders that the architecture does not tell, by their model_type."""


def read(model_dir: Path, overrides: str = "{}") -> DecoderSpec:
    """The spec of the model in a folder; `overrides` is a JSON object whose keys replace those of config.json.

    Raises ModelError with the file, the key and what to do.
    """
    return parse(*contents(model_dir, overrides))


def contents(model_dir: Path, overrides: str = "{}") -> tuple[dict[str, Any], str]:
    """config.json of a folder with the overrides, and what errors call it. Raises ModelError."""
    path = model_dir / "config.json"
    try:
        config = read_object(path)
    except FileNotFoundError:
        raise ModelError(
            f"{model_dir}: there is no config.json; --model-path must be a folder with config.json and *.safetensors, or a .gguf file"
        ) from None
    replaced = json.loads(overrides)
    return _overridden(config, replaced), f"{path} with --json-model-override-args" if replaced else str(path)


def known(config: Mapping[str, Any]) -> bool:
    """Whether config.json names an architecture of one of the families."""
    named = config.get("architectures")
    return isinstance(named, list) and any(isinstance(name, str) and with_head(name) in FAMILIES for name in named)


def parse(config: Mapping[str, Any], where: str = "config.json") -> DecoderSpec:
    """The spec that the contents of a config.json describe. `where` names the file in errors."""
    architecture = _architecture(config, where)
    key = text_key(config)
    values = dict(config[key] if key else config)
    if key and "tie_word_embeddings" in config:
        values["tie_word_embeddings"] = config["tie_word_embeddings"]
    named = values.get("model_type")
    family = _family(architecture, named if isinstance(named, str) else None)
    reader = HfConfig(values, f"{where}: {key}" if key else where, family.defaults)
    if values.get("is_causal") is False:
        raise reader.error("is_causal=false is not supported; a served model attends to earlier tokens alone")
    if values.get("use_bidirectional_attention") in (True, "all"):
        raise reader.error("use_bidirectional_attention is not supported; a served model attends to earlier tokens alone")
    dtype = reader.text("dtype") or reader.text("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    headless = architecture not in FAMILIES
    spec = family.spec(reader)
    return replace(
        spec,
        architecture=architecture,
        model_type=reader.text("model_type") or with_head(architecture).removesuffix("ForCausalLM").lower(),
        dtype=None if dtype is None else str(dtype).removeprefix("torch."),
        tied=headless or spec.tied,
        headless=headless,
        packing=packing(config.get("quantization_config") or config.get("compression_config"), where),
    )


def weights_of(spec: DecoderSpec) -> WeightMap:
    """The parameters of a model that `parse` accepted, and where its checkpoints have them."""
    return weight_map(spec, family_of(spec).names)


def family_of(spec: DecoderSpec) -> Family:
    """The family of a model that `parse` accepted."""
    return _family(spec.architecture, spec.model_type)


def _family(architecture: str, model_type: str | None) -> Family:
    """Of some architectures the text decoder's model_type decides."""
    return FAMILIES[_BY_TEXT.get(model_type or "", with_head(architecture))]


def with_head(architecture: str) -> str:
    """The family's key: Qwen3Model is Qwen3ForCausalLM without its head."""
    return architecture.removesuffix("Model") + "ForCausalLM" if architecture.endswith("Model") else architecture


def _architecture(config: Mapping[str, Any], where: str) -> str:
    supported = f"supported are {', '.join(FAMILIES)}"
    named = config.get("architectures")
    if not isinstance(named, list) or not named:
        raise ModelError(f"{where}: 'architectures' is {shown(named)}, not a list of names; {supported}")
    for name in named:
        if isinstance(name, str) and with_head(name) in FAMILIES:
            return name
    raise ModelError(f"{where}: architecture {', '.join(map(bare, named[:4]))} is not supported; {supported}")


def _overridden(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A config with some keys replaced, also where the file spells them as transformers 5 does and the override as 4, or the reverse."""
    own, rope = dict(config), config.get("rope_parameters")
    if "torch_dtype" in overrides:
        own.pop("dtype", None)
    if "rope_parameters" in overrides:
        own.pop("rope_scaling", None)
    elif isinstance(rope, dict) and not overrides.keys().isdisjoint(("rope_theta", "rope_scaling")):
        del own["rope_parameters"]
        own["rope_scaling"] = own.get("rope_scaling") or {key: value for key, value in rope.items() if key != "rope_theta"}
        if "rope_theta" in rope:
            own["rope_theta"] = rope["rope_theta"]
    return {**own, **overrides}

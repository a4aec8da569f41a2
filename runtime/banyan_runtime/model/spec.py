"""config.json → `ModelSpec`: what the one decoder needs to know of a model. No torch here.

A family of models is a row in `_FAMILIES` (which options it turns on) and nothing more. The spellings of transformers 4
(`rope_theta`, `rope_scaling`, `torch_dtype`) and 5 (`rope_parameters`, `dtype`) are both read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from banyan_runtime.errors import ModelError
from banyan_runtime.hub.files import read_object, shown
from banyan_runtime.model.packing import Packing, packing


@dataclass(frozen=True, slots=True)
class PlainRope:
    """Frequencies as they are."""


@dataclass(frozen=True, slots=True)
class LinearRope:
    """Every frequency divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Long wavelengths divided by `factor`, short ones kept, a ramp between them (Llama 3.1 and later)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class YarnRope:
    """Frequencies divided by `factor` where a pair turns fewer than `slow` times over the original context, kept where it turns more than
    `fast` times, a ramp over the pairs between them (YaRN, Peng et al. 2023, section 3). What is turned is multiplied by `magnitude`.
    """

    factor: float
    fast: float
    slow: float
    whole: bool  # the ramp begins and ends at whole pairs
    magnitude: float
    original_context: int


RopeScaling = PlainRope | LinearRope | Llama3Rope | YarnRope


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One decoder. Sizes in elements; `windows[i]` is how many tokens layer i looks back, itself included (None: all)."""

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool
    rope_theta: float
    rope: RopeScaling
    windows: tuple[int | None, ...]
    context_len: int  # tokens the model was made for
    dtype: str | None  # of the checkpoint, as config.json says: float32, bfloat16, ...
    headless: bool = False  # the checkpoint has no head: it makes vectors, not text
    packing: Packing | None = None  # of the checkpoint's matrices; None: they are as they are

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads

    @property
    def layer_parameters(self) -> int:
        """Of the matrices of one layer."""
        return self.hidden_size * (self.head_dim * (2 * self.heads + 2 * self.kv_heads) + 3 * self.intermediate_size)


@dataclass(frozen=True, slots=True)
class _Family:
    """What an architecture turns on. A string names the key of config.json that decides (default false)."""

    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    kv_heads: int | None = None  # where config.json has no num_key_value_heads; None: as many as heads
    head_dim: int | None = None  # where it has no head_dim; None: hidden_size / heads
    window: int | None = None  # where it has no sliding_window at all; None: such models have no windows
    window_switch: bool = False  # sliding_window counts only with use_sliding_window, from max_window_layers on


_FAMILIES: Final[dict[str, _Family]] = {
    "LlamaForCausalLM": _Family(qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias"),
    "MistralForCausalLM": _Family(kv_heads=8, window=4096),
    "Qwen2ForCausalLM": _Family(qkv_bias=True, window=4096, window_switch=True),
    "Qwen3ForCausalLM": _Family(
        qkv_bias="attention_bias", output_bias="attention_bias", qk_norm=True, head_dim=128, window=4096, window_switch=True
    ),
}
SUPPORTED: Final = tuple(_FAMILIES)

_LARGEST: Final = {
    # Several times what the largest known models have: beyond that a config is broken, and nothing may be allocated by it.
    "vocab_size": 1 << 22,  # known: 262,208
    "hidden_size": 1 << 17,  # known: 18,432
    "intermediate_size": 1 << 20,  # known: 73,728
    "num_hidden_layers": 1024,  # known: 126
    "num_attention_heads": 4096,  # known: 128
    "num_key_value_heads": 4096,
    "head_dim": 1024,  # known: 256
    "max_position_embeddings": 1 << 24,  # float32, in which rotary angles are computed, holds every position up to here
    "original_max_position_embeddings": 1 << 24,
    "sliding_window": (1 << 31) - 1,  # positions are 32-bit integers
}
_RANGES: Final = {
    "rms_norm_eps": (1e-38, 1.0),  # added to a mean square in float32
    "rope_theta": (1.0, 1e15),  # known: 1e4 to 5e8; float32 must hold it and its inverse
    "factor": (1.0, 1e6),  # known: 2 to 40; below 1 the context would shrink
    "low_freq_factor": (1e-3, 1e6),  # known: 1
    "high_freq_factor": (1e-3, 1e6),  # known: 4
    "beta_fast": (1e-3, 1e6),  # known: 32
    "beta_slow": (1e-3, 1e6),  # known: 1
    "attention_factor": (1e-3, 1e3),  # known: 1 to 1.4
    "mscale": (1e-3, 1e3),  # known: 0.7 to 1
    "mscale_all_dim": (1e-3, 1e3),
}
_KINDS_OF_LAYERS: Final = {"full_attention", "sliding_attention"}


def read(model_dir: Path, overrides: str = "{}") -> ModelSpec:
    """The spec of the model in a folder; `overrides` is a JSON object whose keys replace those of config.json.

    Raises ModelError with the file, the key and what to do.
    """
    path = model_dir / "config.json"
    try:
        config = read_object(path)
    except FileNotFoundError:
        raise ModelError(
            f"{model_dir}: there is no config.json; --model-path must be a folder with config.json and *.safetensors, or a .gguf file"
        ) from None
    replaced = json.loads(overrides)
    return parse(_overridden(config, replaced), where=f"{path} with --json-model-override-args" if replaced else str(path))


def parse(config: Mapping[str, Any], where: str = "config.json") -> ModelSpec:
    """The spec that the contents of a config.json describe. `where` names the file in errors."""
    keys = _Keys(config, where)
    architecture = keys.architecture()
    headless = architecture not in _FAMILIES
    family = _FAMILIES[_with_head(architecture)]
    if config.get("is_causal") is False:
        raise ModelError(f"{where}: is_causal=false is not supported; the supported models attend to earlier tokens alone")
    if (act := config.get("hidden_act", "silu")) != "silu":
        raise ModelError(f"{where}: hidden_act={_bare(act)} is not supported; the supported models use silu")
    hidden, heads, layers = keys.size("hidden_size"), keys.size("num_attention_heads"), keys.size("num_hidden_layers")
    kv_heads = keys.size("num_key_value_heads", family.kv_heads or heads)
    if heads % kv_heads:
        raise ModelError(f"{where}: num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")
    if config.get("head_dim") is None and family.head_dim is None and hidden % heads:
        raise ModelError(f"{where}: hidden_size={hidden} is not a multiple of num_attention_heads={heads}, and head_dim is not set")
    head_dim = keys.size("head_dim", family.head_dim or hidden // heads)
    if head_dim % 2:
        raise ModelError(f"{where}: head_dim={head_dim} is odd; rotary embeddings need an even one")
    theta, rope, stretch = keys.rope()
    context_len = int(round(keys.size("max_position_embeddings") * stretch, 3))  # a stretch may be a third
    if context_len > _LARGEST["max_position_embeddings"]:
        raise ModelError(
            f"{where}: max_position_embeddings times the rope factor {stretch:g} is more than {_LARGEST['max_position_embeddings']}"
        )
    dtype = keys.text("dtype") or keys.text("torch_dtype")
    return ModelSpec(
        architecture=architecture,
        model_type=keys.text("model_type") or _with_head(architecture).removesuffix("ForCausalLM").lower(),
        vocab_size=keys.size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=keys.size("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        qkv_bias=keys.switch(family.qkv_bias),
        output_bias=keys.switch(family.output_bias),
        mlp_bias=keys.switch(family.mlp_bias),
        qk_norm=family.qk_norm,
        tied=headless or keys.switch("tie_word_embeddings"),
        rope_theta=theta,
        rope=rope,
        windows=keys.windows(family, layers),
        context_len=context_len,
        dtype=None if dtype is None else dtype.removeprefix("torch."),
        headless=headless,
        packing=packing(config.get("quantization_config") or config.get("compression_config"), where),
    )


def _overridden(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A config with some of its keys replaced, also where a file spells them as transformers 5 does and an override as 4, or the other
    way round."""
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


class _Keys:
    """Typed reads of one config.json, with errors that name the file and the key."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config = config
        self.where = where

    def architecture(self) -> str:
        named = self.config.get("architectures")
        if not isinstance(named, list) or not named:
            raise ModelError(f"{self.where}: 'architectures' is missing; supported are {', '.join(SUPPORTED)}")
        for name in named:
            if isinstance(name, str) and _with_head(name) in _FAMILIES:
                return name
        raise ModelError(
            f"{self.where}: architecture {', '.join(map(_bare, named[:4]))} is not supported; supported are {', '.join(SUPPORTED)}"
        )

    def size(self, key: str, default: int | None = None) -> int:
        value = self.config.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.where}: '{key}' is missing; the file is not a complete config of a language model")
        return _size(value, key, self.where)

    def number(self, key: str, default: float) -> float:
        return _number(self.config.get(key, default), key, self.where)

    def text(self, key: str) -> str | None:
        value = self.config.get(key)
        if value is not None and not isinstance(value, str):
            raise ModelError(f"{self.where}: '{key}' is {shown(value)}, not text")
        return value

    def switch(self, value: bool | str) -> bool:
        if isinstance(value, bool):
            return value
        found = self.config.get(value) or False
        if not isinstance(found, bool):
            raise ModelError(f"{self.where}: '{value}' is {shown(found)}, not true or false")
        return found

    def rope(self) -> tuple[float, RopeScaling, float]:
        """Theta, the scaling, and by how much the scaling stretches max_position_embeddings."""
        rope: Any = self.config.get("rope_scaling") or self.config.get("rope_parameters") or {}  # of two transformers takes the older
        if not isinstance(rope, dict):
            raise ModelError(f"{self.where}: rope settings are {shown(rope)}, not an object")
        if nested := [key for key, value in rope.items() if isinstance(value, dict)]:
            raise ModelError(f"{self.where}: rope settings of their own for {shown(nested[0])} are not supported")
        theta = _number(rope.get("rope_theta", self.config.get("rope_theta", 10_000.0)), "rope_theta", self.where)
        kind = rope.get("rope_type", rope.get("type", "default"))
        if rope.get("partial_rotary_factor", self.config.get("partial_rotary_factor", 1.0)) != 1.0:
            raise ModelError(f"{self.where}: partial_rotary_factor is not supported; the supported models rotate whole heads")

        def value(key: str) -> float:
            return _number(rope.get(key), key, self.where, "rope ")

        if kind == "default":
            return theta, PlainRope(), 1.0
        if kind == "linear":
            return theta, LinearRope(value("factor")), value("factor")
        if kind == "llama3":  # max_position_embeddings is already the long context
            original = _size(rope.get("original_max_position_embeddings"), "original_max_position_embeddings", self.where, "rope ")
            scaling = Llama3Rope(value("factor"), value("low_freq_factor"), value("high_freq_factor"), original)
            if scaling.low_freq_factor >= scaling.high_freq_factor:
                raise ModelError(
                    f"{self.where}: rope low_freq_factor={scaling.low_freq_factor:g} is not below "
                    f"high_freq_factor={scaling.high_freq_factor:g}"
                )
            return theta, scaling, 1.0
        if kind == "yarn":
            return theta, *self._yarn(theta, rope)
        raise ModelError(f"{self.where}: rope_type={_bare(kind)} is not supported; supported are default, linear, llama3, yarn")

    def _yarn(self, theta: float, rope: Mapping[str, Any]) -> tuple[YarnRope, float]:
        """Its names and what they are by default are those of transformers. The context is the original one times the factor, whatever
        max_position_embeddings says: of some models it is the one, of others the other."""
        declared = self.size("max_position_embeddings")
        original = rope.get("original_max_position_embeddings")
        original = declared if original is None else _size(original, "original_max_position_embeddings", self.where, "rope ")

        def value(key: str, default: float) -> float:
            return default if rope.get(key) is None else _number(rope[key], key, self.where, "rope ")

        factor, fast, slow = value("factor", max(1.0, declared / original)), value("beta_fast", 32.0), value("beta_slow", 1.0)
        if slow >= fast:
            raise ModelError(f"{self.where}: rope beta_slow={slow:g} is not below beta_fast={fast:g}")
        if theta <= 1.0:
            raise ModelError(
                f"{self.where}: rope_theta={theta:g} turns all pairs alike, and yarn needs some that turn less often than others"
            )
        whole = rope.get("truncate", True)
        if not isinstance(whole, bool):
            raise ModelError(f"{self.where}: 'rope truncate' is {shown(whole)}, not true or false")
        magnitude = 1.0 + 0.1 * math.log(factor)
        if rope.get("mscale") and rope.get("mscale_all_dim"):
            magnitude = 1.0 + 0.1 * value("mscale", 1.0) * math.log(factor)
            magnitude /= 1.0 + 0.1 * value("mscale_all_dim", 1.0) * math.log(factor)
        scaling = YarnRope(factor, fast, slow, whole, value("attention_factor", magnitude), original)
        return scaling, original * factor / declared

    def windows(self, family: _Family, layers: int) -> tuple[int | None, ...]:
        """How far each layer looks back."""
        window = self.config.get("sliding_window", family.window)
        if family.window_switch and not self.switch("use_sliding_window"):
            window = None
        if window is None or family.window is None:
            return (None,) * layers
        window = self.size("sliding_window", window)
        kinds = self.config.get("layer_types")
        if isinstance(kinds, list):
            if len(kinds) != layers:
                raise ModelError(f"{self.where}: layer_types has {len(kinds)} entries for {layers} layers")
            if strange := [kind for kind in kinds if not isinstance(kind, str) or kind not in _KINDS_OF_LAYERS]:
                raise ModelError(
                    f"{self.where}: layer_types names {shown(strange[0])}; supported are {', '.join(sorted(_KINDS_OF_LAYERS))}"
                )
            return tuple(window if kind == "sliding_attention" else None for kind in kinds)
        if kinds is not None:
            raise ModelError(f"{self.where}: 'layer_types' is {shown(kinds)}, not a list")
        first = self.config.get("max_window_layers", 28) if family.window_switch else 0
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise ModelError(f"{self.where}: 'max_window_layers' is {shown(first)}, not a number of layers")
        return tuple(window if layer >= first else None for layer in range(layers))


def _with_head(architecture: str) -> str:
    """The family's name: Qwen3Model is Qwen3ForCausalLM without its head."""
    return architecture.removesuffix("Model") + "ForCausalLM" if architecture.endswith("Model") else architecture


def _size(value: object, key: str, where: str, prefix: str = "") -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{where}: '{prefix}{key}' is {shown(value)}, not a positive integer")
    if value > _LARGEST[key]:
        raise ModelError(f"{where}: '{prefix}{key}' is {shown(value)}; at most {_LARGEST[key]} is supported")
    return value


def _number(value: object, key: str, where: str, prefix: str = "") -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ModelError(f"{where}: '{prefix}{key}' is {shown(value)}, not a positive number")
    low, high = _RANGES[key]
    if not low <= value <= high:
        raise ModelError(f"{where}: '{prefix}{key}' is {shown(value)}; supported are {low:g} to {high:g}")
    return float(value)


def _bare(value: object) -> str:
    """A name as it is where it is one, else as errors show any value."""
    return value if isinstance(value, str) and value.isidentifier() else shown(value)

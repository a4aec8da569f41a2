"""Typed reads of a Hugging Face config.json, with errors that name the file, the key and the value.

The spellings of transformers 4 (`rope_theta`, `rope_scaling`, `torch_dtype`) and 5 (`rope_parameters`, `dtype`) are both read. Builders at
the end make the parts of a `DecoderSpec` that most families share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from banyan_runtime.errors import ModelError
from banyan_runtime.hub.files import shown
from banyan_runtime.models.config import (
    Activation,
    Attention,
    DecoderSpec,
    Layer,
    LinearRope,
    Llama3Rope,
    LongRope,
    Mlp,
    Norm,
    PlainRope,
    ProportionalRope,
    QueryGrowth,
    Rope,
    RopeScaling,
    YarnRope,
)

_LARGEST: Final = {
    # Several times the largest known model: a config with more is broken, and must not decide an allocation.
    "vocab_size": 1 << 22,  # known: 290,943
    "vocab_size_per_layer_input": 1 << 22,
    "hidden_size": 1 << 17,  # known: 18,432
    "hidden_size_per_layer_input": 1 << 14,  # known: 256
    "intermediate_size": 1 << 20,  # known: 73,728
    "shared_intermediate_size": 1 << 20,
    "num_kv_shared_layers": 1024,
    "num_hidden_layers": 1024,  # known: 126
    "num_attention_heads": 4096,  # known: 128
    "num_key_value_heads": 4096,
    "num_global_key_value_heads": 4096,
    "head_dim": 1024,  # known: 512
    "global_head_dim": 1024,
    "max_position_embeddings": 1 << 24,  # rotary angles are float32, which holds every integer up to here
    "original_max_position_embeddings": 1 << 24,
    "sliding_window": (1 << 31) - 1,  # positions are 32-bit integers
    "sliding_window_pattern": 1024,
    "no_rope_layer_interval": 1024,
}
_RANGES: Final = {
    "rms_norm_eps": (1e-38, 1.0),  # added to a mean square in float32
    "layer_norm_eps": (1e-38, 1.0),
    "norm_epsilon": (1e-38, 1.0),
    "rope_theta": (1.0, 1e15),  # known: 1e4 to 5e8; float32 must hold it and its inverse
    "rope_local_base_freq": (1.0, 1e15),
    "factor": (1.0, 1e6),  # known: 2 to 40; below 1 the context would shrink
    "alpha": (1.0, 1e6),  # known: 1,000
    "low_freq_factor": (1e-3, 1e6),  # known: 1
    "high_freq_factor": (1e-3, 1e6),  # known: 4
    "beta_fast": (1e-3, 1e6),  # known: 32
    "beta_slow": (1e-3, 1e6),  # known: 1
    "attention_factor": (1e-3, 1e3),  # known: 1 to 1.4
    "mscale": (1e-3, 1e3),  # known: 0.7 to 1
    "mscale_all_dim": (1e-3, 1e3),
    "short_factor": (1e-3, 1e6),  # known: 1 to 64.5
    "long_factor": (1e-3, 1e6),
    "llama_4_scaling_beta": (1e-6, 1e3),  # known: 0.1
    "partial_rotary_factor": (1e-3, 1.0),  # known: 0.25 to 1
    "attention_multiplier": (1e-6, 1e3),  # known: 0.0078 to 0.22
    "embedding_multiplier": (1e-3, 1e4),  # known: 12
    "residual_multiplier": (1e-3, 1e3),  # known: 0.22
    "logits_scaling": (1e-3, 1e4),  # known: 8 to 16
    "logit_scale": (1e-6, 1e4),  # known: 0.0625 to 1
    "query_pre_attn_scalar": (1e-3, 1e6),  # known: 144 to 256
    "attn_logit_softcapping": (1e-3, 1e6),  # known: 50
    "final_logit_softcapping": (1e-3, 1e6),  # known: 30
}
_KINDS_OF_LAYERS: Final = ("full_attention", "sliding_attention")
_ACTIVATIONS: Final[dict[str, Activation]] = {
    "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
}  # fmt: skip


class HfConfig:
    """One object of a config.json. `where` names it in errors; `defaults` stand for keys that are missing."""

    def __init__(self, values: Mapping[str, Any], where: str, defaults: Mapping[str, Any] | None = None) -> None:
        self.values = {**(defaults or {}), **values}
        self.where = where

    def error(self, message: str) -> ModelError:
        return ModelError(f"{self.where}: {message}")

    def nested(self, key: str) -> HfConfig:
        """The object under a key, empty where there is none."""
        value = self.values.get(key) or {}
        if not isinstance(value, dict):
            raise self.error(f"'{key}' is {shown(value)}, not an object")
        return HfConfig(value, f"{self.where}: {key}")

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def size(self, key: str, default: int | None = None) -> int:
        value = self.values[key] if self.has(key) else default
        if value is None:
            raise self.error(f"'{key}' is missing; the file is not a complete config of a language model")
        return self._size(value, key)

    def size_if_any(self, key: str) -> int | None:
        return self.size(key) if self.has(key) else None

    def count(self, key: str, default: int = 0) -> int:
        """As `size`; it may be 0."""
        return 0 if self.values.get(key, default) in (0, None) else self.size(key, default)

    def number(self, key: str, default: float) -> float:
        return self._number(self.values[key] if self.has(key) else default, key)

    def number_if_any(self, key: str) -> float | None:
        return self.number(key, 1.0) if self.has(key) else None

    def text(self, key: str) -> str | None:
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise self.error(f"'{key}' is {shown(value)}, not text")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.values[key] if self.has(key) else default
        if not isinstance(value, bool):
            raise self.error(f"'{key}' is {shown(value)}, not true or false")
        return value

    def activation(self) -> Activation:
        """Of `hidden_activation` or `hidden_act`."""
        key = "hidden_activation" if self.has("hidden_activation") else "hidden_act"
        name = self.values.get(key, "silu")
        if not isinstance(name, str) or name not in _ACTIVATIONS:
            raise self.error(f"{key}={bare(name)} is not supported; supported are {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[name]

    # Positions

    def rope(
        self, head_dim: int, *, kind: str | None = None, theta: float = 10_000.0, key: str = "rope_theta", partial: float = 1.0
    ) -> Rope:
        """The rope of layers, with the family's default theta, transformers 4's key of it, and the default share of a head that turns.
        `kind`: of layers that may have settings of their own (full_attention, sliding_attention).
        """
        settings = self._rope_settings(kind)
        theta = self._number(settings.get("rope_theta", self.values.get(key, theta)), "rope_theta")
        share = settings.get("partial_rotary_factor", self.values.get("partial_rotary_factor", partial))
        share = self._number(share, "partial_rotary_factor")
        name = settings.get("rope_type", settings.get("type", "default"))
        if name == "proportional":
            factor = self._number(settings.get("factor", 1.0), "factor", "rope ")
            return Rope(theta, head_dim, ProportionalRope(int(share * head_dim // 2), factor))
        dim = int(head_dim * share)
        if dim % 2 or dim < 2:
            raise self.error(f"partial_rotary_factor={share:g} rotates {dim} of {head_dim} elements; rotary embeddings need an even number")
        if name == "dynamic" and settings.get("alpha") is not None:  # NTK scaling with a fixed factor, which changes theta alone
            alpha = self._number(settings["alpha"], "alpha", "rope ")
            return Rope(theta * alpha ** (dim / (dim - 2)), dim)
        return Rope(theta, dim, self._scaling(name, settings, theta, dim), self._growth(settings))

    def context(self) -> int:
        """Tokens that the model was made for: max_position_embeddings, and what the rope scaling adds to it."""
        declared, settings = self.size("max_position_embeddings"), self._rope_settings("full_attention")
        name, stretch = settings.get("rope_type", settings.get("type", "default")), 1.0
        if name == "linear":
            stretch = self._number(settings.get("factor"), "factor", "rope ")
        elif name == "yarn":
            # The original context times the factor: max_position_embeddings is the former in some files and the latter in others.
            original, factor = self._yarn_context(settings)
            stretch = original * factor / declared
        context = int(round(declared * stretch, 3))
        if context > _LARGEST["max_position_embeddings"]:
            raise self.error(
                f"max_position_embeddings times the rope factor {stretch:g} is more than {_LARGEST['max_position_embeddings']}"
            )
        return context

    def _rope_settings(self, kind: str | None) -> Mapping[str, Any]:
        own = self.values.get("rope_scaling") or self.values.get("rope_parameters") or {}  # transformers reads the older one of two
        if not isinstance(own, dict):
            raise self.error(f"rope settings are {shown(own)}, not an object")
        nested = {key: value for key, value in own.items() if isinstance(value, dict)}
        if nested.keys() & set(_KINDS_OF_LAYERS):
            if kind is None:
                raise self.error(f"rope settings of their own for {shown(next(iter(nested)))} are not supported for this architecture")
            return nested.get(kind, {})
        if kind == "sliding_attention":  # settings for all layers: their scaling is of the full ones
            return {key: own[key] for key in ("rope_theta",) if key in own}
        return own

    def _scaling(self, name: object, settings: Mapping[str, Any], theta: float, dim: int) -> RopeScaling:
        def value(key: str) -> float:
            return self._number(settings.get(key), key, "rope ")

        match name:
            case "default" | "mrope" | "dynamic":  # dynamic changes nothing up to max_position_embeddings; mrope nothing for text
                return PlainRope()
            case "linear":
                return LinearRope(value("factor"))
            case "llama3":
                original = self._size(settings.get("original_max_position_embeddings"), "original_max_position_embeddings", "rope ")
                scaling = Llama3Rope(value("factor"), value("low_freq_factor"), value("high_freq_factor"), original)
                if scaling.low_freq_factor >= scaling.high_freq_factor:
                    raise self.error(
                        f"rope low_freq_factor={scaling.low_freq_factor:g} is not below high_freq_factor={scaling.high_freq_factor:g}"
                    )
                return scaling
            case "yarn":
                return self._yarn(settings, theta)
            case "longrope" | "su":
                return self._longrope(settings, dim)
        supported = "default, linear, dynamic, llama3, yarn, longrope, proportional"
        raise self.error(f"rope_type={bare(name)} is not supported; supported are {supported}")

    def _yarn_context(self, settings: Mapping[str, Any]) -> tuple[int, float]:
        """The original context and the factor, with the defaults of transformers."""
        declared, original = self.size("max_position_embeddings"), settings.get("original_max_position_embeddings")
        original = declared if original is None else self._size(original, "original_max_position_embeddings", "rope ")
        factor = settings.get("factor")
        return original, max(1.0, declared / original) if factor is None else self._number(factor, "factor", "rope ")

    def _yarn(self, settings: Mapping[str, Any], theta: float) -> YarnRope:
        """The keys and their defaults are those of transformers."""

        def value(key: str, default: float) -> float:
            return default if settings.get(key) is None else self._number(settings[key], key, "rope ")

        original, factor = self._yarn_context(settings)
        fast, slow = value("beta_fast", 32.0), value("beta_slow", 1.0)
        if slow >= fast:
            raise self.error(f"rope beta_slow={slow:g} is not below beta_fast={fast:g}")
        if theta <= 1.0:
            raise self.error(f"rope_theta={theta:g} gives all pairs one frequency; yarn needs some that are lower than others")
        whole = settings.get("truncate", True)
        if not isinstance(whole, bool):
            raise self.error(f"'rope truncate' is {shown(whole)}, not true or false")
        magnitude = 1.0 + 0.1 * math.log(factor)
        if settings.get("mscale") and settings.get("mscale_all_dim"):
            magnitude = 1.0 + 0.1 * value("mscale", 1.0) * math.log(factor)
            magnitude /= 1.0 + 0.1 * value("mscale_all_dim", 1.0) * math.log(factor)
        return YarnRope(factor, fast, slow, whole, value("attention_factor", magnitude), original)

    def _longrope(self, settings: Mapping[str, Any], dim: int) -> LongRope:
        key = "original_max_position_embeddings"  # Phi-3 has it outside the rope settings
        original = self._size(settings.get(key, self.values.get(key)), key, "rope ")
        factor = settings.get("factor")
        stretch = max(1.0, self.size("max_position_embeddings") / original)
        factor = stretch if factor is None else self._number(factor, "factor", "rope ")
        magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0
        if settings.get("attention_factor") is not None:
            magnitude = self._number(settings["attention_factor"], "attention_factor", "rope ")
        factors: dict[str, tuple[float, ...]] = {}
        for key in ("short_factor", "long_factor"):
            listed = settings.get(key)
            if not isinstance(listed, list) or len(listed) != dim // 2:
                raise self.error(f"'rope {key}' is {shown(listed)}, not a list of {dim // 2} numbers, one for each pair of a head")
            factors[key] = tuple(self._number(each, key, "rope ") for each in listed)
        return LongRope(factors["short_factor"], factors["long_factor"], magnitude, original)

    def _growth(self, settings: Mapping[str, Any]) -> QueryGrowth | None:
        if settings.get("llama_4_scaling_beta") is None:
            return None
        original = self._size(settings.get("original_max_position_embeddings"), "original_max_position_embeddings", "rope ")
        return QueryGrowth(self._number(settings["llama_4_scaling_beta"], "llama_4_scaling_beta", "rope "), original)

    # Layers

    def layer_types(self, default: Sequence[str]) -> tuple[str, ...]:
        """full_attention or sliding_attention of each layer; `default`: where config.json does not list them."""
        kinds, layers = self.values.get("layer_types", list(default)), self.size("num_hidden_layers")
        if not isinstance(kinds, list):
            raise self.error(f"'layer_types' is {shown(kinds)}, not a list")
        if len(kinds) != layers:
            raise self.error(f"layer_types has {len(kinds)} entries for {layers} layers")
        if unknown := [kind for kind in kinds if kind not in _KINDS_OF_LAYERS]:
            raise self.error(f"layer_types names {shown(unknown[0])}; supported are {', '.join(_KINDS_OF_LAYERS)}")
        return tuple(kinds)

    def every_nth_full(self, every: int) -> tuple[str, ...]:
        """Layer types of which each `every`th is full and the others have windows; config.json's list, if there is one, counts."""
        return self.layer_types(
            ["full_attention" if every and (index + 1) % every == 0 else "sliding_attention" for index in range(self.layers)]
        )

    @property
    def layers(self) -> int:
        return self.size("num_hidden_layers")

    def attention(self, *, head_dim: int | None = None, kv_heads: int | None = None) -> Attention:
        """Heads, sizes and scale; no rope. `head_dim` and `kv_heads` stand for missing keys; else hidden_size / heads, and all heads."""
        hidden, heads = self.size("hidden_size"), self.size("num_attention_heads")
        kv_heads = self.size("num_key_value_heads", kv_heads or heads)
        if heads % kv_heads:
            raise self.error(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")
        if not self.has("head_dim") and head_dim is None and hidden % heads:
            raise self.error(f"hidden_size={hidden} is not a multiple of num_attention_heads={heads}, and head_dim is not set")
        dim = self.size("head_dim", head_dim or hidden // heads)
        if dim % 2:
            raise self.error(f"head_dim={dim} is odd; rotary embeddings need an even one")
        return Attention(heads, kv_heads, dim, dim**-0.5, None)

    def mlp(self, *, gated: bool = True, bias: bool = False) -> Mlp:
        return Mlp(self.size("intermediate_size"), self.activation(), gated, bias)

    def rms_norm(self, *, wide: bool = False) -> Norm:
        return Norm("rms_wide" if wide else "rms", self.number("rms_norm_eps", 1e-6))

    def decoder(self, layers: tuple[Layer, ...], norm: Norm, *, tied: bool = False) -> DecoderSpec:
        """The spec of a text decoder; `tied`: where config.json does not say. The registry fills in what the whole file says."""
        return DecoderSpec(
            architecture="",
            model_type="",
            vocab_size=self.size("vocab_size"),
            hidden_size=self.size("hidden_size"),
            layers=layers,
            norm=norm,
            context_len=self.context(),
            tied=self.flag("tie_word_embeddings", tied),
        )

    def alike(self, layer: Layer, windows: Sequence[int | None] | None = None) -> tuple[Layer, ...]:
        """The same layer everywhere, with windows of their own."""
        if windows is None:
            return (layer,) * self.layers
        return tuple(replace(layer, attention=replace(layer.attention, window=window)) for window in windows)

    def _size(self, value: object, key: str, prefix: str = "") -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(f"'{prefix}{key}' is {shown(value)}, not a positive integer")
        if value > _LARGEST[key]:
            raise self.error(f"'{prefix}{key}' is {shown(value)}; at most {_LARGEST[key]} is supported")
        return value

    def _number(self, value: object, key: str, prefix: str = "") -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise self.error(f"'{prefix}{key}' is {shown(value)}, not a positive number")
        low, high = _RANGES[key]
        if not low <= value <= high:
            raise self.error(f"'{prefix}{key}' is {shown(value)}; supported are {low:g} to {high:g}")
        return float(value)


def bare(value: object) -> str:
    """A name as it is if it is an identifier, else as errors show any value."""
    return value if isinstance(value, str) and value.isidentifier() else shown(value)

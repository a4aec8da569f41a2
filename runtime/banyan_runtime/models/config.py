"""`DecoderSpec`: a decoder as data, one entry a layer. Runners read it; families (the other files of this package) make it.

Sizes count elements; windows and contexts count tokens. What a family needs and another does not is a field here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from banyan_runtime.model.packing import Packing


@dataclass(frozen=True, slots=True)
class PlainRope:
    """The frequencies theta^(-2i / dim), unscaled."""


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
    """YaRN (Peng et al. 2023, section 3): a frequency is divided by `factor` if it makes fewer than `slow` rotations over the original
    context, kept if it makes more than `fast`, and lies on a ramp between. The rotated vector is multiplied by `magnitude`.
    """

    factor: float
    fast: float
    slow: float
    whole: bool  # the ramp begins and ends at whole indices
    magnitude: float
    original_context: int


@dataclass(frozen=True, slots=True)
class LongRope:
    """LongRoPE (Ding et al. 2024): each frequency has its own divisor, from `short` or from `long`.

    `long` applies to a server whose context exceeds the original one, from its first token on. A switch in the middle of a text would
    invalidate cached keys. The rotated vector is multiplied by `magnitude`.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    magnitude: float
    original_context: int


@dataclass(frozen=True, slots=True)
class ProportionalRope:
    """The first `rotated` pairs turn with the frequencies of the whole head divided by `factor`; the others do not turn (Gemma 4)."""

    rotated: int
    factor: float


RopeScaling = PlainRope | LinearRope | Llama3Rope | YarnRope | LongRope | ProportionalRope


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Queries at position p are multiplied by 1 + beta * log(1 + floor(p / original_context)) (Ministral 3)."""

    beta: float
    original_context: int


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding of the first `dim` elements of a head; element i forms a pair with element i + dim / 2."""

    theta: float
    dim: int
    scaling: RopeScaling = PlainRope()
    growth: QueryGrowth | None = None


NormKind = Literal["rms", "rms_wide", "layer"]
"""rms: x / rms(x), rounded to the model's dtype, times the weight. rms_wide: rounded after the weight. layer: LayerNorm in float32."""


@dataclass(frozen=True, slots=True)
class Norm:
    kind: NormKind
    eps: float
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Attention:
    heads: int
    kv_heads: int
    head_dim: int
    scale: float  # of the scores
    rope: Rope | None  # None: no position enters
    window: int | None = None  # tokens that a query sees, its own included; None: all before it
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["head", "row"] | None = None  # over each head, or over all heads of a token together
    norm_after_rope: bool = False
    soft_cap: float | None = None  # scores become soft_cap * tanh(score / soft_cap)
    value_is_key: bool = False  # the value is the projected key, before norm and rope
    value_norm: bool = False  # a norm without weight
    kv_layer: int | None = None  # an earlier layer, whose keys and values this one reads; None: it has its own
    value_dim: int | None = None  # of a value; None: head_dim
    sinks: bool = False  # each head has a logit without a key, which takes a share of the weights

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads

    @property
    def value_size(self) -> int:
        return self.value_dim or self.head_dim


Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class Mlp:
    """down(act(gate(x)) * up(x)), or down(act(up(x))) without a gate."""

    inner: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False


Placement = Literal["pre", "post", "both", "parallel"]
"""Where a block's norms are. pre: h += f(norm(h)). post: h += norm(f(h)). both: h += norm(f(norm(h))). parallel: attention and MLP read
one norm of h, and both are added."""


@dataclass(frozen=True, slots=True)
class Layer:
    attention: Attention
    mlp: Mlp
    norms: Placement = "pre"
    residual_scale: float = 1.0  # of what attention and MLP add
    learned_scale: bool = False  # the layer's output is multiplied by a stored number


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Embeddings that each layer adds through a gate of its own (Gemma 4): `size` numbers for each token of each layer."""

    size: int
    vocab_size: int
    activation: Activation


Feature = Literal[
    "attention sinks", "attention soft cap", "embedding scale", "GELU", "head sizes by layer", "KV of another layer", "layer inputs",
    "LayerNorm", "learned layer scale", "logit scale", "logit soft cap", "MLP without a gate", "no rope", "norms after blocks",
    "parallel blocks", "partial rope", "QK norm after rope", "QK norm over rows", "query growth", "query scale", "residual scale",
    "several ropes", "value norm", "value sizes", "values are keys", "wide RMS norm",
]  # fmt: skip
"""What a model may need beyond Llama's blocks, QK norm over heads and windows. A runner declares which of these it implements."""


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    layers: tuple[Layer, ...]
    norm: Norm  # of every norm in the model
    context_len: int  # tokens that the model was made for
    tied: bool  # the head is the embedding
    dtype: str | None = None  # of the checkpoint, as config.json has it: float32, bfloat16, ...
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    logit_soft_cap: float | None = None
    layer_inputs: LayerInputs | None = None
    headless: bool = False  # the checkpoint has no head: it makes vectors, not text
    packing: Packing | None = None  # of the checkpoint's quantized matrices

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The different ropes of the layers."""
        return tuple(dict.fromkeys(layer.attention.rope for layer in self.layers if layer.attention.rope is not None))

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of each layer."""
        return tuple(layer.attention.window for layer in self.layers)

    @property
    def kv_elements(self) -> int:
        """Numbers in the keys and values of one token."""
        own = (layer.attention for layer in self.layers if layer.attention.kv_layer is None)
        return sum(attention.kv_heads * (attention.head_dim + attention.value_size) for attention in own)

    @property
    def uniform(self) -> Attention | None:
        """The first layer's attention, if heads, scale and cap are the same in every layer."""
        shapes = {
            (at.heads, at.kv_heads, at.head_dim, at.value_size, at.scale, at.soft_cap) for at in (each.attention for each in self.layers)
        }
        return self.layers[0].attention if len(shapes) == 1 else None

    @property
    def layer_parameters(self) -> int:
        """In the matrices of the largest layer."""
        return max(
            self.hidden_size * (at.head_dim * (2 * at.heads + 2 * at.kv_heads) + (3 if mlp.gated else 2) * mlp.inner)
            for at, mlp in ((layer.attention, layer.mlp) for layer in self.layers)
        )

    @property
    def features(self) -> frozenset[Feature]:
        """What a runner must implement to compute this model."""
        layers, attentions = self.layers, [layer.attention for layer in self.layers]
        ropes = {attention.rope for attention in attentions}
        needed: dict[Feature, bool] = {
            "attention sinks": any(attention.sinks for attention in attentions),
            "attention soft cap": any(attention.soft_cap is not None for attention in attentions),
            "embedding scale": self.embed_scale != 1.0,
            "GELU": any(layer.mlp.activation != "silu" for layer in layers),
            "head sizes by layer": len({(attention.heads, attention.kv_heads, attention.head_dim) for attention in attentions}) > 1,
            "KV of another layer": any(attention.kv_layer is not None for attention in attentions),
            "layer inputs": self.layer_inputs is not None,
            "LayerNorm": self.norm.kind == "layer",
            "learned layer scale": any(layer.learned_scale for layer in layers),
            "logit scale": self.logit_scale != 1.0,
            "logit soft cap": self.logit_soft_cap is not None,
            "MLP without a gate": any(not layer.mlp.gated for layer in layers),
            "no rope": None in ropes,
            "norms after blocks": any(layer.norms in ("post", "both") for layer in layers),
            "parallel blocks": any(layer.norms == "parallel" for layer in layers),
            "partial rope": any(a.rope is not None and a.rope.dim != a.head_dim for a in attentions),
            "QK norm after rope": any(attention.norm_after_rope for attention in attentions),
            "QK norm over rows": any(attention.qk_norm == "row" for attention in attentions),
            "query growth": any(rope is not None and rope.growth is not None for rope in ropes),
            "query scale": any(attention.scale != attention.head_dim**-0.5 for attention in attentions),
            "residual scale": any(layer.residual_scale != 1.0 for layer in layers),
            "several ropes": len(ropes - {None}) > 1,
            "value norm": any(attention.value_norm for attention in attentions),
            "value sizes": any(attention.value_size != attention.head_dim for attention in attentions),
            "values are keys": any(attention.value_is_key for attention in attentions),
            "wide RMS norm": self.norm.kind == "rms_wide",
        }
        return frozenset(feature for feature, need in needed.items() if need)

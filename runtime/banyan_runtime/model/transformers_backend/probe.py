"""What a model asks of attention, seen in one step of it on torch's meta device, which computes shapes alone and takes no memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from banyan_runtime.errors import ModelError
from banyan_runtime.model.transformers_backend.attention import ARGUMENT, MASKED, NAME, NotPassed
from banyan_runtime.model.transformers_backend.decoder import Head, base_of
from banyan_runtime.model.transformers_backend.refusal import line, refusal
from banyan_runtime.models.config import Attention

_TOKENS: Final = 8
_FAR: Final = 1 << 20  # a position behind every window
_READ: Final = frozenset({"scaling", "sliding_window", "softcap", "s_aux", "is_causal", "dropout"})
"""What attention functions are given that changes their result, and is read here. Dropout is none outside of training."""
_HARMLESS: Final = frozenset({
    "position_ids", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "cache_position",
    "logits_to_keep", "position_embeddings", "deterministic", "layer_idx", "target_dtype", "use_top_left_mask",
})  # fmt: skip
"""What comes beside and changes nothing in a step of one causal text."""

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Any]


@dataclass(frozen=True, slots=True)
class Probed:
    """What a step showed."""

    layers: tuple[Attention, ...]
    hidden_size: int  # of the states that the head reads
    vocab_size: int


@dataclass(slots=True)
class _Recorder:
    """Takes the place of attention and notes what each layer asks for."""

    where: str
    calls: dict[int, tuple[Attention, Tensor | None]] = field(default_factory=dict)

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, settings: dict[str, Any]
    ) -> Tensor:
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int):
            raise refusal(self.where, f"{type(module).__name__} does not say which layer it is")
        if layer in self.calls:
            raise refusal(self.where, f"layer {layer} attends more than once in a step")
        self.calls[layer] = _asked(self.where, layer, module, query, key, value, settings), mask
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])


def probe(model: Any, where: str) -> Probed:
    """Run one step of a model that lies on the meta device. Raises ModelError for what the step cannot be served with."""
    if conv := next((name for name, module in model.named_modules() if isinstance(module, nn.Conv1d)), None):
        raise refusal(where, f"{conv} is a convolution over tokens, whose state is neither keys nor values")
    recorder = _Recorder(where)
    hidden = _step(model, where, recorder, NAME, None)
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    if sorted(recorder.calls) != list(range(count)):
        using = f"{len(recorder.calls)} of {count} layers use the attention interface"
        raise refusal(where, f"{using}: the others may keep a state that is neither keys nor values")
    layers = _windowed(model, where, [recorder.calls[layer][0] for layer in range(count)])
    try:
        logits = Head(model)(torch.empty(_TOKENS, hidden, device="meta", dtype=model.dtype))
    except Exception as error:
        raise refusal(where, f"its head cannot be computed apart from its layers ({line(error)})") from error
    return Probed(layers, hidden, logits.shape[-1])


def _step(model: Any, where: str, recorder: _Recorder, implementation: str, mask: Tensor | None) -> int:
    """Width of the last hidden states. No operation of the step needs the values of a tensor, so CUDA graphs can hold it."""
    model.set_attn_implementation(implementation)
    _, base = base_of(model)
    try:
        with torch.inference_mode(), torch.device("meta"):
            out = base(
                input_ids=torch.zeros(1, _TOKENS, dtype=torch.int64),
                position_ids=torch.arange(_TOKENS)[None],
                attention_mask=mask,
                use_cache=False,
                **{ARGUMENT: recorder},
            )
    except NotPassed:
        raise refusal(where, "it does not pass arguments on to its attention") from None
    except ModelError:
        raise
    except Exception as error:  # of the model's own code
        raise refusal(where, f"a step of it cannot be computed apart from its weights ({line(error)})") from error
    return int(out[0].shape[-1])


def _asked(where: str, layer: int, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, settings: dict[str, Any]) -> Attention:
    heads, tokens, head_dim = query.shape[1:]
    kv_heads, value_dim = key.shape[1], value.shape[-1]
    if settings.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise refusal(where, f"layer {layer} attends to later tokens")
    if key.shape[2] != tokens or key.shape[-1] != head_dim or value.shape[1:3] != key.shape[1:3] or heads % kv_heads:
        shapes = ", ".join(f"{name} {list(each.shape)}" for name, each in (("query", query), ("key", key), ("value", value)))
        raise refusal(where, f"layer {layer} attends with {shapes} for {tokens} tokens")
    for name, given in settings.items():
        if given is not None and given is not False and name not in _READ | _HARMLESS:
            raise refusal(where, f"layer {layer} gives its attention {name}, which Banyan does not compute")
    scale, sinks = settings.get("scaling"), settings.get("s_aux")
    if sinks is not None and tuple(sinks.shape) != (heads,):
        raise refusal(where, f"layer {layer} has sinks of shape {list(sinks.shape)} for {heads} heads")
    return Attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5 if scale is None else float(scale),
        rope=None,  # queries and keys come rotated
        window=settings.get("sliding_window"),
        soft_cap=settings.get("softcap"),
        value_dim=None if value_dim == head_dim else value_dim,
        sinks=sinks is not None,
    )


# Windows that only the masks tell


def _windowed(model: Any, where: str, layers: list[Attention]) -> tuple[Attention, ...]:
    """The layers, compared with the masks that the model makes for attention that takes some."""
    seen: list[tuple[Tensor, MaskFunction]] = []

    def note(batch_size: int, q_length: int, kv_length: int, mask_function: MaskFunction, **_: Any) -> Tensor:
        made = torch.empty(batch_size, 1, q_length, kv_length, dtype=torch.bool, device="meta")
        seen.append((made, mask_function))
        return made

    ALL_MASK_ATTENTION_FUNCTIONS.register(MASKED, note)
    recorder = _Recorder(where)
    _step(model, where, recorder, MASKED, torch.ones(1, _TOKENS, dtype=torch.int64, device="meta"))
    model.set_attn_implementation(NAME)
    for layer, attention in enumerate(layers):
        mask = recorder.calls[layer][1]
        if mask is None:
            continue
        known = next((function for made, function in seen if made.untyped_storage()._cdata == mask.untyped_storage()._cdata), None)
        if known is None or not _means(known, attention.window):
            window = "none" if attention.window is None else f"{attention.window} tokens"
            raise refusal(where, f"layer {layer} masks other keys than those outside of its window ({window})")
    return tuple(layers)


def _means(function: MaskFunction, window: int | None) -> bool:
    """Whether a mask shows a query the keys up to its own position, and of those the last `window`."""
    zero = torch.tensor(0)

    def sees(query: int, key: int) -> bool:
        return bool(function(zero, zero, torch.tensor(query), torch.tensor(key)))

    first = 0 if window is None else _FAR - window + 1
    edges = {first: True, _FAR: True, _FAR + 1: False} | ({first - 1: False} if window is not None else {})
    try:
        return all(sees(_FAR, key) is seen for key, seen in edges.items())
    except NotImplementedError:  # it depends on more than positions
        return False

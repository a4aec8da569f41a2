"""Steps of a model of the transformers library: all sequences of a step are one row of tokens, and attention tells them apart."""

from __future__ import annotations

import copy
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from banyan_runtime.model.attention import Attention, Held
from banyan_runtime.model.layers import Kernels
from banyan_runtime.model.transformers_backend.attention import ARGUMENT
from banyan_runtime.models.config import DecoderSpec
from banyan_runtime.step import Pulse

_LONGER: Final = ("dynamic", "longrope")
"""Ropes whose frequencies depend on the longest text of a step."""


def base_of(model: Any) -> tuple[str, Any]:
    """The layers of a model without its head, and the attribute that holds them."""
    name = model.base_model_prefix
    if not hasattr(model, name):
        name = next(name for name, child in model.named_children() if isinstance(child, PreTrainedModel))
    return name, getattr(model, name)


class TransformersDecoder:
    """Token ids → hidden states → logits, as `decoder.StepDecoder`."""

    def __init__(self, spec: DecoderSpec, model: Any, kernels: Kernels, pulse: Pulse) -> None:
        self.spec = spec
        self.dtype: torch.dtype = model.dtype
        self.embed: Tensor = model.get_input_embeddings().weight
        self.sampler = kernels.sampler()
        self.mail = kernels.mail(self.embed.device)
        _, self._base = base_of(model)
        self._head = Head(model)
        self._pulse = pulse

    def reserve(self, positions: int) -> None:
        """The library computes rotations in each step."""

    def hidden(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        out = self._base(
            input_ids=token_ids[None],
            position_ids=positions[None],
            attention_mask=None,
            use_cache=False,
            **{ARGUMENT: _Paged(attention, self._pulse)},
        )
        hidden: Tensor = out[0][0]
        return hidden

    def hidden_held(self, held: Held, latest: Tensor, attention: Attention, out: Tensor) -> None:
        ids = torch.where(held.ids < 0, latest.index_select(0, held.rows), held.ids)
        out.copy_(self.hidden(ids, held.positions.long(), attention))

    def logits(self, hidden: Tensor) -> Tensor:
        self._pulse()
        return self._head(hidden).float()

    def pick(self, hidden: Tensor, settings: Tensor | None, tokens: Tensor, failed: Tensor) -> None:
        self._pulse()
        self.sampler.pick(self._head(hidden), settings, tokens, failed)

    def normed(self, hidden: Tensor) -> Tensor:
        return hidden  # the library's layers end with the norm


class Head:
    """The library's own way from hidden states to logits: its model, with the layers replaced by what gives the states back."""

    def __init__(self, model: Any) -> None:
        self._model = copy.copy(model)
        name, _ = base_of(model)
        self._model._modules = {**model._modules, name: _Given()}

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden_size] → logits [n, vocab_size], scaled and capped."""
        logits: Tensor = self._model(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits


class _Given(nn.Module):
    """Stands for the layers of a model whose hidden states are known."""

    @property
    def decoder(self) -> _Given:
        """OPT's head calls its layers so."""
        return self

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _States:
        return _States(inputs_embeds)


class _States:
    """What layers give, of which there are hidden states alone."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, at: Any) -> Any:
        return (self.last_hidden_state,)[at]

    def __getattr__(self, name: str) -> None:
        return None


class _Paged:
    """The attention of one step over the pool."""

    def __init__(self, attention: Attention, pulse: Pulse) -> None:
        self._attention = attention
        self._pulse = pulse

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, settings: dict[str, Any]
    ) -> Tensor:
        self._pulse()
        layer: int = module.layer_idx  # type: ignore[assignment]
        self._attention.cells.store(layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
        return self._attention.attend(layer, query[0].transpose(0, 1), settings.get("s_aux"))[None]


@torch.inference_mode()
def pin_ropes(model: Any, context_len: int) -> None:
    """Fix ropes that change with the longest text: their frequencies become those of a text of the whole context.

    A step holds texts of many lengths, and cached keys must stay valid while a text grows.
    """
    for module in model.modules():
        if not hasattr(module, "rope_type"):
            continue
        kinds = module.rope_type if isinstance(module.rope_type, dict) else {None: module.rope_type}
        for layer_type, kind in kinds.items():
            if any(name in (kind or "") for name in _LONGER):
                which = {} if layer_type is None else {"layer_type": layer_type}
                last = torch.tensor([[context_len - 1]], device=model.device)
                module(torch.zeros(1, 1, 1, dtype=model.dtype, device=model.device), position_ids=last, **which)
                kinds[layer_type] = "default"
        module.rope_type = kinds if isinstance(module.rope_type, dict) else kinds[None]

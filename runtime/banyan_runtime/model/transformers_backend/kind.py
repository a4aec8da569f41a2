"""The kind of runner that computes with the transformers library's modules."""

from __future__ import annotations

from typing import Any

import torch

from banyan_runtime.model import fused
from banyan_runtime.model.choice import Choice
from banyan_runtime.model.fused import FusedKernels
from banyan_runtime.model.layers import Kernels, PlainKernels
from banyan_runtime.model.torch_forward import TorchForward, over_pool
from banyan_runtime.model.transformers_backend.decoder import TransformersDecoder, pin_ropes
from banyan_runtime.step import Pulse


class TransformersModel:
    """A model of the library, as `forward.Model`."""

    def __init__(self, choice: Choice, model: Any, pulse: Pulse) -> None:
        self._choice = choice
        self._pulse = pulse
        pin_ropes(model, choice.context_len)
        self.weights_bytes = sum(parameter.nbytes for parameter in model.parameters())
        kernels: Kernels = PlainKernels()
        if fused.supports(choice.device, choice.kv_dtype):
            kernels = FusedKernels(torch.cuda.get_device_name(choice.device))  # of which it takes sampler and mail
        self._decoder = TransformersDecoder(choice.spec, model, kernels, pulse)

    def forward(self, pool_tokens: int, page_size: int, *, autotune: bool = False) -> TorchForward:
        return over_pool(self._choice, self._decoder, self._pulse, pool_tokens, page_size)

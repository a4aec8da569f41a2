"""The kind of runner that computes with the transformers library's modules."""

from __future__ import annotations

from typing import Any

import torch

from banyan_runtime.model import fused
from banyan_runtime.model.capture import CudaRecorder
from banyan_runtime.model.choice import Choice
from banyan_runtime.model.fused import FusedKernels
from banyan_runtime.model.graphs import NO_SIZES, Sizes
from banyan_runtime.model.layers import Kernels, PlainKernels
from banyan_runtime.model.pool import KvPool
from banyan_runtime.model.torch_forward import TorchForward
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
        choice = self._choice
        assert choice.attention is not None
        pool = KvPool(choice.spec, pool_tokens, page_size, choice.dtype, choice.device, choice.kv_dtype)
        attention = choice.attention(choice.spec, pool, self._pulse)
        sizes = Sizes.upto(choice.graphs.rows, choice.graphs.tokens)
        self._decoder.sampler.compile(choice.spec.vocab_size, choice.dtype, choice.device)
        return TorchForward(self._decoder, attention, pool, CudaRecorder() if sizes != NO_SIZES else None, sizes)

"""The forward pass in torch, on the CPU and on CUDA: the reference for every other one."""

from __future__ import annotations

import logging
from typing import Final, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from banyan_runtime.config import ServerConfig
from banyan_runtime.model import blocks, fused, loader
from banyan_runtime.model import device as devices
from banyan_runtime.model.attention import Attention, Replayed
from banyan_runtime.model.blank import blank
from banyan_runtime.model.blocks import Parameter
from banyan_runtime.model.capture import CudaRecorder, Recorder
from banyan_runtime.model.choice import Choice
from banyan_runtime.model.decoder import Decoder, StepDecoder
from banyan_runtime.model.forward import Captured, Picked
from banyan_runtime.model.fused import FusedKernels
from banyan_runtime.model.fused_products import MOST_ROWS
from banyan_runtime.model.graphs import NO_SIZES, Sizes, StepGraphs
from banyan_runtime.model.kernel_choices import KernelChoices
from banyan_runtime.model.layers import Kernels, PlainKernels
from banyan_runtime.model.pool import KvPool
from banyan_runtime.model.post import Arriving
from banyan_runtime.model.rope import Ropes
from banyan_runtime.model.table import DeviceTable, SlotTable
from banyan_runtime.models.config import Feature
from banyan_runtime.step import I32, Pulse, SamplingColumns, Step, TableShape, TokenMask

log = logging.getLogger("banyan")

_MANY: Final = 64  # tokens: what is compiled for more depends on their number no more
_LARGE: Final = 2048  # tokens: a step of more may be larger than any that there is memory for


class TorchModel:
    """Weights in the form that torch computes with. Takes them over."""

    name = "torch"
    own_attention = False
    takes_blocks = False
    torch_threads = True
    implements = frozenset[Feature](get_args(Feature))
    fast_bf16 = False

    @staticmethod
    def refusal(config: ServerConfig, device: torch.device) -> str | None:
        return None

    def __init__(self, choice: Choice, parameters: dict[str, Parameter], pulse: Pulse) -> None:
        self._choice = choice
        self._pulse = pulse
        weights = loader.dequantized(parameters, choice.dtype, choice.device)
        self.weights_bytes = blocks.nbytes(weights.values())
        kernels: Kernels = PlainKernels()
        self._choices: KernelChoices | None = None
        if fused.supports(choice.device, choice.kv_dtype):
            kernels = FusedKernels(torch.cuda.get_device_name(choice.device))
            self._choices = kernels.choices
        ropes = Ropes(choice.spec, choice.context_len, choice.dtype, choice.device)
        self._decoder = Decoder(choice.spec, weights, kernels, ropes, pulse)
        if self._choices is not None:
            log.info("Kernels by product and rows (--autotune measures them): %s", self._choices.line())

    def forward(self, pool_tokens: int, page_size: int, *, autotune: bool = False) -> TorchForward:
        return over_pool(self._choice, self._decoder, self._pulse, pool_tokens, page_size, self._choices if autotune else None)


def over_pool(
    choice: Choice, decoder: StepDecoder, pulse: Pulse, pool_tokens: int, page_size: int, autotuned: KernelChoices | None = None
) -> TorchForward:
    """Allocate the KV pool of a decoder. `autotuned`: the kernel choices to measure before graphs are captured."""
    assert choice.attention is not None
    pool = KvPool(choice.spec, pool_tokens, page_size, choice.dtype, choice.device, choice.kv_dtype)
    attention = choice.attention(choice.spec, pool, pulse)
    sizes = Sizes.upto(choice.graphs.rows, choice.graphs.tokens)
    recorder = CudaRecorder() if sizes != NO_SIZES else None
    decoder.sampler.compile(choice.spec.vocab_size, choice.dtype, choice.device)
    return TorchForward(decoder, attention, pool, recorder, sizes, autotuned)


class TorchForward:
    batch_invariant = False  # the libraries' order of summation depends on the number of rows

    def __init__(
        self,
        decoder: StepDecoder,
        attention: Attention,
        pool: KvPool,
        recorder: Recorder | None = None,
        sizes: Sizes = NO_SIZES,
        autotuned: KernelChoices | None = None,
    ) -> None:
        """With a recorder, steps of such sizes are captured, if the attention can be. `autotuned`: the choices to measure before."""
        self.decoder = decoder
        self.attention = attention
        self._pool = pool
        self._recorder = recorder
        self._sizes = sizes
        self._autotuned = autotuned
        self._graphs: StepGraphs | None = None
        self._table: DeviceTable | None = None

    def retell(self, table: SlotTable) -> None:
        if self._table is not None:
            self._table.take(table)
        if self._graphs is not None:
            self._graphs.begin()

    def replayed(self, step: Step, table: SlotTable) -> Tensor | None:
        return None if self._graphs is None else self._graphs.hidden(step, table)

    @property
    def kv_bytes(self) -> int:
        return self._pool.bytes

    def reserve(self, rows: int, positions: int, latest: Tensor) -> Captured | None:
        self.decoder.reserve(positions)
        if not isinstance(self.attention, Replayed):
            return None
        self._table = self.attention.reserve(shape := TableShape(rows, positions))
        few = range(1, MOST_ROWS + 1) if self._recorder is None or not self._sizes.tokens else ()
        for tokens in (*few, min(max([_MANY, *self._sizes.tokens]), _LARGE) + 1):
            self._compute_once(shape, tokens)
        if self._recorder is None:
            return None
        sizes = self._sizes.within(rows)
        self._graphs = StepGraphs(self.decoder, self.attention, sizes, latest, self._recorder, shape, self._autotuned)
        return self._graphs.captured

    def _compute_once(self, shape: TableShape, tokens: int) -> None:
        """A step of so many tokens, launched kernel by kernel, and whose keys nobody sees: no request waits until kernels for such are
        there."""
        count = min(shape.positions, tokens)
        step = blank(lengths := np.array([count], np.int32), lengths)
        table = SlotTable(shape)
        table.apply(step)
        self.logits(self.hidden(step, torch.zeros(count, dtype=torch.int64, device=self._pool.device), table)[-1:])

    def hidden(self, step: Step, token_ids: Tensor, table: SlotTable) -> Tensor:
        self.attention.plan(step, table)
        return self.decoder.hidden(token_ids, devices.tensor(step.positions, self._pool.device, torch.int64), self.attention)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.decoder.logits(hidden)

    def pick(self, hidden: Tensor, columns: SamplingColumns | None, positions: I32) -> Picked:
        sampler = self.decoder.sampler
        if columns is not None and not sampler.settings:
            return Picked(*sampler(self.logits(hidden), columns, positions))
        told = None if columns is None else sampler.told(columns, positions)
        if self._graphs is not None and (replayed := self._graphs.pick(hidden, told)) is not None:
            return replayed
        settings = None if told is None else devices.tensor(told, hidden.device, torch.int32)
        tokens, failed = (torch.empty(len(hidden), dtype=dtype, device=hidden.device) for dtype in (torch.int64, torch.bool))
        self.decoder.pick(hidden, settings, tokens, failed)
        return Picked(tokens, failed)

    def deliver(self, tokens: Tensor, failed: Tensor, owners: Tensor, latest: Tensor) -> Arriving | None:
        return self.decoder.mail.deliver(tokens, failed, owners, latest)

    def allow(self, logits: Tensor, mask: TokenMask, picked: npt.NDArray[np.int64]) -> None:
        self.decoder.sampler.allow(logits, mask, picked)

    def sample(self, logits: Tensor, columns: SamplingColumns, positions: I32) -> tuple[Tensor, Tensor]:
        return self.decoder.sampler(logits, columns, positions)

    def normed(self, hidden: Tensor) -> Tensor:
        return self.decoder.normed(hidden)

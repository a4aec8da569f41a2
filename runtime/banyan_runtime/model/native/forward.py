"""The forward pass in C++, on the CPU."""

from __future__ import annotations

import ctypes
import logging
from typing import Final, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from banyan_runtime.config import ServerConfig
from banyan_runtime.errors import ConfigError
from banyan_runtime.model import blocks, edits, host
from banyan_runtime.model.block_values import BlockKind
from banyan_runtime.model.blocks import Blocks, Parameter
from banyan_runtime.model.choice import Choice
from banyan_runtime.model.forward import Picked
from banyan_runtime.model.mail import Mail
from banyan_runtime.model.native import build, loading
from banyan_runtime.model.native.library import PULSE, Activation, Draws, Kind, LayerSpec, Library, Spec
from banyan_runtime.model.native.library import Step as NativeStep
from banyan_runtime.model.pool import cell_bytes
from banyan_runtime.model.post import Arriving
from banyan_runtime.model.rope import growth, rotations
from banyan_runtime.model.table import SlotTable
from banyan_runtime.models import config as models
from banyan_runtime.models.config import DecoderSpec, Feature
from banyan_runtime.step import I32, Pulse, SamplingColumns, Step, TokenMask

log = logging.getLogger("banyan")

_KINDS: Final = {torch.float32: Kind.F32, torch.bfloat16: Kind.BF16}
_BLOCK_KINDS: Final[dict[BlockKind, Kind]] = {kind: Kind[kind] for kind in get_args(BlockKind)}
_ACTIVATIONS: Final[dict[models.Activation, Activation]] = {"silu": Activation.SILU, "gelu_tanh": Activation.GELU_TANH}
_KEPT_LOGITS: Final = 1 << 24  # numbers: 64 MB, more than decoding takes
_ONE_PART: Final = frozenset({"embed", "head", "gate", "up", "inputs_gate"})
_HALVES: Final = {"gate_up": ("gate", "up"), "gate_up_bias": ("gate_bias", "up_bias")}
_MODEL: Final = -1  # index of the layer of parameters that are no layer's


class NativeModel:
    """Weights packed by the library. Takes them over: each leaves the dict when it is packed."""

    name = "native"
    own_attention = True
    takes_blocks = True
    torch_threads = False
    implements = frozenset[Feature](get_args(Feature))
    fast_bf16 = True

    @staticmethod
    def refusal(config: ServerConfig, device: torch.device) -> str | None:
        if device.type != "cpu":
            return f"it computes on the CPU, not on {device.type}"
        if config.attention_backend is not None:
            return f"--attention-backend={config.attention_backend} is the torch runner's"
        if config.kv_cache_dtype != "auto":
            return f"--kv-cache-dtype={config.kv_cache_dtype} is the torch runner's"
        try:
            loading.load()
        except build.NotBuilt as error:
            return str(error)
        return None

    def __init__(self, choice: Choice, parameters: dict[str, Parameter], pulse: Pulse) -> None:
        self._choice = choice
        self._library = loading.load()
        log.info("The native runner computes, in %d threads (%s).", host.cores(), self._library.name)
        self.pulse = pulse
        self._pulse = PULSE(pulse)  # the library calls it as long as it lives
        layers = [_layer(choice.spec, layer) for layer in choice.spec.layers]
        self._decoder = self._library.create(ctypes.byref(_model(choice)), (LayerSpec * len(layers))(*layers), self._pulse)
        if not self._decoder:
            raise _no_memory()
        self.weights_bytes = blocks.nbytes(parameters.values())
        for name in list(parameters):
            self._take(name, parameters.pop(name))
            pulse()

    def __del__(self) -> None:
        if decoder := getattr(self, "_decoder", None):
            self._library.destroy(decoder)

    def forward(self, pool_tokens: int, page_size: int, *, autotune: bool = False) -> NativeForward:
        slots = pool_tokens + page_size  # the first page is padding
        if not self._library.cache(self._decoder, slots):
            raise _no_memory()
        kv_bytes = slots * cell_bytes(self._choice.spec, self._choice.dtype)
        return NativeForward(self, self._library, self._decoder, self._choice, kv_bytes)

    def _take(self, name: str, value: Parameter) -> None:
        layer, part = _MODEL, name
        if name.startswith("layers."):
            _, index, part = name.split(".")
            layer = int(index)
        names = _HALVES.get(part, (part,))
        for half, parts in zip(names, _cut(value, len(names)), strict=True):
            # The library finds an output of these by its panel alone, and parts begin panels of their own.
            assert len(parts) == 1 or half not in _ONE_PART, (name, len(parts))
            for part_of_it in parts:
                self._put(layer, half, part_of_it)

    def _put(self, layer: int, name: str, value: Blocks | Tensor) -> None:
        """A vector, or rows of a matrix, below those that are there."""
        if not isinstance(value, Blocks) and value.ndim == 1:
            vector = value.float().contiguous()
            taken = self._library.vector(self._decoder, layer, name.encode(), vector.data_ptr(), len(vector))
        else:
            if isinstance(value, Blocks):
                kind, at, rows, width = _BLOCK_KINDS[value.kind], value.data.ctypes.data, value.rows, value.columns
            else:
                value = value.contiguous()
                kind, at, (rows, width) = _KINDS[value.dtype], value.data_ptr(), value.shape
            taken = self._library.matrix(self._decoder, layer, name.encode(), kind, at, rows, width)
        assert taken >= 0, f"the library has no parameter {name}"
        if not taken:
            raise _no_memory()


def _model(choice: Choice) -> Spec:
    spec = choice.spec
    inputs = spec.layer_inputs

    def rounded(scale: float) -> float:
        """Scales of embeddings are numbers of the model's dtype, as `layers.embedded` has them."""
        return float(torch.tensor(scale, dtype=choice.dtype).item())

    return Spec(
        vocabulary=spec.vocab_size, hidden=spec.hidden_size, layers=len(spec.layers), ropes=len(spec.ropes), tied=spec.tied,
        half_cache=choice.dtype == torch.bfloat16, threads=host.cores(), layer_norm=spec.norm.kind == "layer", eps=spec.norm.eps,
        inputs=inputs.size if inputs else 0, inputs_activation=_ACTIVATIONS[inputs.activation] if inputs else 0,
        embed_scale=rounded(spec.embed_scale), inputs_scale=rounded(inputs.size**0.5) if inputs else 1.0,
        logit_scale=spec.logit_scale, logit_soft_cap=spec.logit_soft_cap or 0.0,
    )  # fmt: skip


def _layer(spec: DecoderSpec, layer: models.Layer) -> LayerSpec:
    attention, mlp = layer.attention, layer.mlp
    return LayerSpec(
        heads=attention.heads, kv_heads=attention.kv_heads, head_dim=attention.head_dim, inner=mlp.inner, window=attention.window or 0,
        rope=-1 if attention.rope is None else spec.ropes.index(attention.rope),
        kv_layer=-1 if attention.kv_layer is None else attention.kv_layer,
        row_norms=attention.qk_norm == "row", norm_after_rope=attention.norm_after_rope, value_is_key=attention.value_is_key,
        value_norm=attention.value_norm, gated=mlp.gated, activation=_ACTIVATIONS[mlp.activation], scale=attention.scale,
        soft_cap=attention.soft_cap or 0.0, residual_scale=layer.residual_scale,
    )  # fmt: skip


def _cut(value: Parameter, count: int) -> list[list[Blocks | Tensor]]:
    """A parameter cut into `count` of equally many rows; of each its parts."""
    parts: tuple[Blocks | Tensor, ...] = value if isinstance(value, tuple) else (value,)
    sizes = [part.rows if isinstance(part, Blocks) else part.shape[0] for part in parts]
    each = sum(sizes) // count
    found: list[list[Blocks | Tensor]] = [[] for _ in range(count)]
    first = 0
    for part, size in zip(parts, sizes, strict=True):
        for index, shares in enumerate(found):
            begin, end = max(index * each - first, 0), min((index + 1) * each - first, size)
            if begin < end:
                shares.append(part.taken(slice(begin, end)) if isinstance(part, Blocks) else part[begin:end])
        first += size
    return found


class NativeForward:
    batch_invariant = True  # every sum has one order, whatever is computed beside it (src/matrix.h, src/attention.h)

    def __init__(self, owner: NativeModel, library: Library, decoder: int, choice: Choice, kv_bytes: int) -> None:
        self.kv_bytes = kv_bytes
        self._owner = owner  # of the decoder
        self._library = library
        self._decoder = decoder
        self._choice = choice
        self._mail = Mail()
        self._logits = torch.empty(0)
        self._kept = _Columns(0)  # for decode steps
        self._drawn: _Sampling | None = None  # of the last step that drew

    def reserve(self, rows: int, positions: int, latest: Tensor) -> None:
        if not self._library.reserve(self._decoder, rows, positions):
            raise _no_memory()
        for index, rope in enumerate(self._choice.spec.ropes):
            cosines, sines = rotations(rope, self._choice.context_len, range(positions))
            factors = growth(rope, range(positions))
            at = [None if table is None else table.data_ptr() for table in (cosines, sines, factors)]
            if not self._library.rope(self._decoder, index, rope.dim, positions, *at):
                raise _no_memory()
        self._kept = _Columns(rows)

    def replayed(self, step: Step, table: SlotTable) -> Tensor | None:
        return None

    def retell(self, table: SlotTable) -> None:
        """It reads the table itself."""

    def hidden(self, step: Step, token_ids: Tensor, table: SlotTable) -> Tensor:
        tokens = len(step.token_ids)
        spec = self._choice.spec
        hidden = torch.empty(tokens, spec.hidden_size)
        inputs = torch.empty(tokens, len(spec.layers), spec.layer_inputs.size) if spec.layer_inputs else None
        columns = self._kept if tokens <= self._kept.tokens else _Columns(tokens)
        self._library.step(self._decoder, columns.filled(step, token_ids.data_ptr(), table, inputs), hidden.data_ptr())
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        self._owner.pulse()
        rows = hidden.shape[0]
        logits = self._room_for_logits(rows)
        hidden = hidden.contiguous()
        self._library.logits(self._decoder, hidden.data_ptr(), rows, logits.data_ptr())
        return logits

    def pick(self, hidden: Tensor, columns: SamplingColumns | None, positions: I32) -> Picked:
        if columns is not None:
            return Picked(*self.sample(self.logits(hidden), columns, positions))
        self._owner.pulse()
        hidden = hidden.contiguous()
        tokens = torch.empty(hidden.shape[0], dtype=torch.int64)
        self._library.likeliest(self._decoder, hidden.data_ptr(), hidden.shape[0], tokens.data_ptr())
        failed = tokens < 0
        return Picked(tokens.clamp_(min=0), failed)

    def deliver(self, tokens: Tensor, failed: Tensor, owners: Tensor, latest: Tensor) -> Arriving | None:
        return self._mail.deliver(tokens, failed, owners, latest)

    def allow(self, logits: Tensor, mask: TokenMask, picked: npt.NDArray[np.int64]) -> None:
        edits.allow(logits, mask, picked)

    def sample(self, logits: Tensor, columns: SamplingColumns, positions: I32) -> tuple[Tensor, Tensor]:
        tokens = torch.empty(len(logits), dtype=torch.int64)
        self._library.sample(self._decoder, logits.data_ptr(), len(logits), self._sampling(columns).at(positions), tokens.data_ptr())
        failed = tokens < 0
        return tokens.clamp_(min=0), failed

    def normed(self, hidden: Tensor) -> Tensor:
        hidden = hidden.contiguous()
        normed = torch.empty_like(hidden)
        self._library.normed(self._decoder, hidden.data_ptr(), hidden.shape[0], normed.data_ptr())
        return normed

    def _sampling(self, columns: SamplingColumns) -> _Sampling:
        if self._drawn is None or not self._drawn.fit(columns):
            self._drawn = _Sampling(columns)
        return self._drawn

    def _room_for_logits(self, rows: int) -> Tensor:
        """fp32 [rows, vocab_size], until it is asked for again."""
        vocabulary = self._choice.spec.vocab_size
        if rows * vocabulary > _KEPT_LOGITS:
            return torch.empty(rows, vocabulary)
        if self._logits.shape[0] < rows:
            self._logits = torch.empty(rows, vocabulary)
        return self._logits[:rows]


class _Columns:
    """A step's columns as the library reads them, in memory that stays: to ask numpy for addresses costs more than to copy the
    columns of a decode step."""

    def __init__(self, tokens: int) -> None:
        """For so many tokens, and as many sequences, at most."""
        self.tokens = tokens
        self._memory = np.empty((5, tokens), dtype=np.int32)
        first, each = self._memory.ctypes.data, 4 * tokens
        positions, out_slots, rows, query_lens, kv_lens = (first + each * index for index in range(5))
        self._about = NativeStep(positions=positions, out_slots=out_slots, rows=rows, query_lens=query_lens, kv_lens=kv_lens)
        self._pointer = ctypes.pointer(self._about)

    def filled(self, step: Step, token_ids: int, table: SlotTable, inputs: Tensor | None) -> ctypes._Pointer[NativeStep]:
        """With the token ids at that address, and room for what layers add. Valid until the next call."""
        about, memory = self._about, self._memory
        tokens, sequences = len(step.token_ids), len(step.rows)
        memory[0, :tokens] = step.positions
        memory[1, :tokens] = step.out_slots
        memory[2, :sequences] = step.rows
        memory[3, :sequences] = step.query_lens
        memory[4, :sequences] = step.kv_lens
        about.tokens, about.sequences, about.token_ids = tokens, sequences, token_ids
        about.table, about.table_width = table.address, table.slots.shape[1]
        about.inputs = None if inputs is None else inputs.data_ptr()
        return self._pointer


class _Sampling:
    """How tokens are drawn, as the library reads it: decode steps over the same rows share all but their positions."""

    def __init__(self, columns: SamplingColumns) -> None:
        self._of = columns
        self._positions = np.empty(len(columns.temperature), dtype=np.int32)
        own = (columns.temperature, columns.top_p, columns.min_p, columns.top_k)
        self._kept = [np.ascontiguousarray(column) for column in (*own, columns.seed)]
        *first, seed = (column.ctypes.data for column in self._kept)
        self._pointer = ctypes.pointer(Draws(*first, self._positions.ctypes.data, seed))

    def fit(self, columns: SamplingColumns) -> bool:
        return columns is self._of

    def at(self, positions: I32) -> ctypes._Pointer[Draws]:
        """Of tokens at these positions. Valid until the next call."""
        self._positions[:] = positions
        return self._pointer


def _no_memory() -> ConfigError:
    return ConfigError(
        f"the kernel gave no memory or no threads ({host.cores()} are wanted; OMP_NUM_THREADS says otherwise) for the model; use a "
        "machine or limits with more, or a smaller model"
    )

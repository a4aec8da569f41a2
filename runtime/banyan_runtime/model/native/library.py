"""The library as Python calls it: ctypes, which gives up Python's lock for the length of a call."""

from __future__ import annotations

import ctypes as c
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Any, Final


class Kind(IntEnum):
    """How the numbers of a matrix are written; as in matrix.h."""

    F32 = 0
    BF16 = 1
    Q8_0 = 2
    Q4_0 = 3
    Q4_1 = 4
    Q4_K = 5
    Q6_K = 6
    Q5_K = 7
    Q3_K = 8
    Q2_K = 9
    Q5_0 = 10
    Q5_1 = 11
    IQ4_NL = 12
    IQ4_XS = 13
    MXFP4 = 14


class Activation(IntEnum):
    """As in activations.h."""

    SILU = 0
    GELU_TANH = 1


class Spec(c.Structure):
    """A model; as in spec.h."""

    _fields_ = [
        *((name, c.c_int32) for name in (
            "vocabulary", "hidden", "layers", "ropes", "tied", "half_cache", "threads", "layer_norm", "inputs", "inputs_activation",
        )),
        *((name, c.c_float) for name in ("eps", "embed_scale", "inputs_scale", "logit_scale", "logit_soft_cap")),
    ]  # fmt: skip


class LayerSpec(c.Structure):
    """A layer; as in spec.h."""

    _fields_ = [
        *((name, c.c_int32) for name in (
            "heads", "kv_heads", "head_dim", "inner", "window", "rope", "kv_layer", "row_norms", "norm_after_rope", "value_is_key",
            "value_norm", "gated", "activation",
        )),
        *((name, c.c_float) for name in ("scale", "soft_cap", "residual_scale")),
    ]  # fmt: skip


class Step(c.Structure):
    _fields_ = [
        ("tokens", c.c_int32),
        ("sequences", c.c_int32),
        *((name, c.c_void_p) for name in ("token_ids", "positions", "out_slots", "rows", "query_lens", "kv_lens", "table")),
        ("table_width", c.c_int64),
        ("inputs", c.c_void_p),
    ]


class Draws(c.Structure):
    _fields_ = [(name, c.c_void_p) for name in ("temperature", "top_p", "min_p", "top_k", "position", "seed")]


PULSE: Final = c.CFUNCTYPE(None)
_Decoder = c.c_void_p
_SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {  # what it gives, what it takes
    "banyan_lanes": (c.c_int32,),
    "banyan_check": (c.c_char_p,),
    "banyan_create": (_Decoder, c.POINTER(Spec), c.POINTER(LayerSpec), PULSE),
    "banyan_destroy": (None, _Decoder),
    "banyan_matrix": (c.c_int32, _Decoder, c.c_int32, c.c_char_p, c.c_int32, c.c_void_p, c.c_int64, c.c_int64),
    "banyan_vector": (c.c_int32, _Decoder, c.c_int32, c.c_char_p, c.c_void_p, c.c_int64),
    "banyan_cache": (c.c_int32, _Decoder, c.c_int64),
    "banyan_reserve": (c.c_int32, _Decoder, c.c_int32, c.c_int64),
    "banyan_rope": (c.c_int32, _Decoder, c.c_int32, c.c_int32, c.c_int64, c.c_void_p, c.c_void_p, c.c_void_p),
    "banyan_weights_bytes": (c.c_int64, _Decoder),
    "banyan_step": (None, _Decoder, c.POINTER(Step), c.c_void_p),
    "banyan_normed": (None, _Decoder, c.c_void_p, c.c_int32, c.c_void_p),
    "banyan_logits": (None, _Decoder, c.c_void_p, c.c_int32, c.c_void_p),
    "banyan_sample": (None, _Decoder, c.c_void_p, c.c_int32, c.POINTER(Draws), c.c_void_p),
    "banyan_likeliest": (None, _Decoder, c.c_void_p, c.c_int32, c.c_void_p),
}


class Library:
    """The functions of one compiled file, by their names without the prefix. Raises OSError for a file that cannot be loaded."""

    def __init__(self, path: Path) -> None:
        loaded = c.CDLL(str(path))
        self.name = path.stem
        self._functions: dict[str, Callable[..., Any]] = {}
        for name, (gives, *takes) in _SIGNATURES.items():
            function = getattr(loaded, name)
            function.restype, function.argtypes = gives, takes
            self._functions[name.removeprefix("banyan_")] = function

    def __getattr__(self, name: str) -> Callable[..., Any]:
        try:
            return self._functions[name]
        except KeyError:
            raise AttributeError(name) from None

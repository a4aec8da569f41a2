"""Rotary embeddings of a GGUF file as `rope_parameters` of config.json."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from banyan_runtime.errors import ModelError
from banyan_runtime.hub.files import shown
from banyan_runtime.hub.gguf.keys import Keys

FACTORS: Final = "rope_freqs.weight"  # what frequencies are divided by
LONG_FACTORS: Final = "rope_factors_long.weight"  # the same of LongRoPE
SHORT_FACTORS: Final = "rope_factors_short.weight"
_LLAMA3: Final = (1.0, 4.0)  # low_freq_factor, high_freq_factor of every known model
_CONTEXTS: Final = tuple(1 << power for power in range(5, 18))  # that such a model may have had before it was stretched
_NO_TURN: Final = 1e20  # a frequency that is divided by more than this does not turn


def settings(keys: Keys) -> dict[str, Any]:
    """Of all layers. Raises ModelError for a kind of scaling that is not supported."""
    theta = keys.number("rope.freq_base", 10_000.0)
    kind = keys.text("rope.scaling.type", "none")
    if keys.tensor(LONG_FACTORS) is not None:
        return {"rope_type": "longrope", "rope_theta": theta, **_longrope(keys)}
    if keys.tensor(FACTORS) is not None:
        return {"rope_theta": theta, **_stretched(keys, theta, _factors(keys, FACTORS))}
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": keys.number("rope.scaling.factor")}
    if kind == "yarn":
        return {"rope_type": "yarn", "rope_theta": theta, **_yarn(keys)}
    raise ModelError(
        f"{keys.fields.where}: '{keys.name('rope.scaling.type')}' is {shown(kind)}; supported are none, linear, yarn, and the factors of "
        "Llama 3 and LongRoPE; another model is needed"
    )


def two(keys: Keys, local_theta: float | None = None) -> dict[str, Any]:
    """Of a model whose layers with windows have a rope without scaling. `local_theta`: its theta where the file does not say; None: that
    of the other layers."""
    full = proportional(keys) if keys.architecture == "gemma4" else settings(keys)
    theta = keys.number("rope.freq_base_swa", full["rope_theta"] if local_theta is None else local_theta)
    return {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": theta}}


def proportional(keys: Keys) -> dict[str, Any]:
    """The file divides the frequencies that do not turn by a number near infinity."""
    factors = _factors(keys, FACTORS)
    turned = sum(factor < _NO_TURN for factor in factors)
    if any(factor != 1.0 for factor in factors[:turned]):
        raise _strange(keys, FACTORS)
    share = turned / len(factors)
    return {"rope_type": "proportional", "rope_theta": keys.number("rope.freq_base", 1e6), "partial_rotary_factor": share}


def _factors(keys: Keys, name: str) -> list[float]:
    """Of each pair of a head that turns."""
    pairs, factors = keys.size("rope.dimension_count", keys.head_dim) // 2, keys.tensor(name)
    if factors is None or factors.kind != "F32" or factors.shape != (pairs,):
        found = "missing" if factors is None else f"{factors.kind} of shape {list(factors.shape)}, not F32 of [{pairs}]"
        raise ModelError(f"{keys.fields.where}: tensor '{name}' is {found}; fetch it again")
    lines = factors.lines(keys.fields.header.memory())
    return [float(str(value)) for value in np.ascontiguousarray(lines).view("<f4")[0]]


def _longrope(keys: Keys) -> dict[str, Any]:
    return {
        "short_factor": _factors(keys, SHORT_FACTORS),
        "long_factor": _factors(keys, LONG_FACTORS),
        "original_max_position_embeddings": keys.size("rope.scaling.original_context_length"),
    }


def _yarn(keys: Keys) -> dict[str, Any]:
    """What is not there is as transformers has it by default, which is as llama.cpp has it. Its attn_factor comes on top of what follows
    from the factor."""
    found: dict[str, Any] = {"factor": keys.number("rope.scaling.factor")}
    original = "original_max_position_embeddings"
    if keys.has("rope.scaling.original_context_length"):
        found[original] = keys.size("rope.scaling.original_context_length")
    for key in ("beta_fast", "beta_slow"):
        if keys.has(f"rope.scaling.yarn_{key}"):
            found[key] = keys.number(f"rope.scaling.yarn_{key}")
    for key in ("attn_factor", "yarn_attn_factor"):
        if keys.has(f"rope.scaling.{key}"):
            found["attention_factor"] = keys.number(f"rope.scaling.{key}") * (1.0 + 0.1 * math.log(max(1.0, found["factor"])))
    if keys.has("rope.scaling.yarn_log_multiplier"):
        found |= {"mscale": 1.0, "mscale_all_dim": keys.number("rope.scaling.yarn_log_multiplier")}
    if keys.has("attention.temperature_scale"):
        found["llama_4_scaling_beta"] = keys.number("attention.temperature_scale")
    return found


def _stretched(keys: Keys, theta: float, factors: Sequence[float]) -> dict[str, Any]:
    """The settings that make these factors by the rule of Llama 3: converters write down its result alone."""
    factor = max(factors)
    for context in _CONTEXTS:
        expected = _llama3(theta, len(factors), factor, context)
        if all(abs(found - value) <= 1e-4 * value for found, value in zip(factors, expected, strict=True)):
            low, high = _LLAMA3
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": context,
            }
    raise _strange(keys, FACTORS)


def _strange(keys: Keys, name: str) -> ModelError:
    return ModelError(
        f"{keys.fields.where}: tensor '{name}' holds factors that follow no known rule; put the model's config.json beside the file and "
        "name their folder, or serve its safetensors"
    )


def _llama3(theta: float, count: int, factor: float, context: int) -> list[float]:
    """By what each frequency is divided."""
    low, high = _LLAMA3
    divisors = []
    for index in range(count):
        turns = context / (2 * math.pi * theta ** (index / count))  # of this frequency in the original context
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors

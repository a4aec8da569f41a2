"""What the model's files say about generation: the end-of-text tokens and the sampling fields that requests leave open."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from banyan_runtime.config import ServerConfig
from banyan_runtime.errors import ConfigError, ModelError
from banyan_runtime.front.sampling import RANGES, Range
from banyan_runtime.hub.files import read_object_if_any, shown, token_ids

_RANGES: Final[Mapping[str, Range]] = {**RANGES, "top_k": Range(-1, 2**31 - 1)}
FROM_MODEL: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class GenerationDefaults:
    """`openai` fills the OpenAI routes, `native` fills /generate, which knows nothing of the model's own settings."""

    openai: Mapping[str, float]
    native: Mapping[str, float]
    eos_ids: frozenset[int]

    @staticmethod
    def load(config: ServerConfig, folder: Path, tokenizer_eos: int | None) -> GenerationDefaults:
        """From generation_config.json, or the end token of config.json, and --preferred-sampling-params."""
        generation = read_object_if_any(folder / "generation_config.json")
        preferred = _preferred(config.preferred_sampling_params)
        model = {name: value for name in FROM_MODEL if (value := generation.get(name)) is not None}
        for name, value in model.items():
            if (problem := _problem(name, value)) is not None:
                raise ModelError(f"{folder / 'generation_config.json'}: {problem}; correct it")
        ids = set(token_ids(generation, "eos_token_id", str(folder / "generation_config.json")))
        if "eos_token_id" not in generation:
            ids |= token_ids(read_object_if_any(folder / "config.json"), "eos_token_id", str(folder / "config.json"))
        if tokenizer_eos is not None:
            ids.add(tokenizer_eos)
        return GenerationDefaults(openai={**model, **preferred}, native=preferred, eos_ids=frozenset(ids))


def _preferred(text: str | None) -> dict[str, float]:
    values: dict[str, Any] = {} if text is None else json.loads(text)
    for name, value in values.items():
        if (problem := _problem(name, value)) is not None:
            raise ConfigError(problem, field="--preferred-sampling-params")
    return values


def _problem(name: str, value: Any) -> str | None:
    if name not in _RANGES:
        return f"{name} is no sampling field that can have a default; known are {', '.join(_RANGES)}"
    if isinstance(value, bool) or not isinstance(value, int | float) or value not in _RANGES[name]:
        return f"{name} is {shown(value)}, which is out of its range"
    return None

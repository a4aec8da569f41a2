"""What the model's files say about vectors: what they are made of, and whether their first dimensions can stand alone."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from banyan_runtime import wire
from banyan_runtime.config import ServerConfig
from banyan_runtime.errors import ConfigError, ModelError
from banyan_runtime.front.errors import invalid
from banyan_runtime.front.parsing import shown as shown_number
from banyan_runtime.hub.files import parse_object, read_bytes, read_object_if_any, shown

_MODULES: Final = "modules.json"
_POOLING: Final = "1_Pooling"
_MODES: Final = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
_KNOWN: Final = ("Transformer", "Pooling", "Normalize")  # of a sentence-transformers model; vectors have length 1 in any case
_PROMPTS: Final = "config_sentence_transformers.json"
_INSTRUCTED: Final = re.compile(r"(Instruct: ?)[^\n]+(\nQuery: ?)")  # how models that were trained with instructions are asked
_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class Embedding:
    """How prompts become vectors."""

    pooling: int  # of wire.POOLINGS
    size: int  # dimensions of a vector
    sizes: frozenset[int] | None  # to which it may be cut (Matryoshka); empty: any; None: it may not
    around: tuple[str, str] = ("Instruct: ", "\nQuery: ")  # what stands before an instruction, and between it and the query

    @staticmethod
    def load(config: ServerConfig, folder: Path, model_config: Mapping[str, Any]) -> Embedding:
        """From --pooling-type, else sentence-transformers' files; without both the last token. Raises ModelError, ConfigError."""
        settings = {**model_config, **json.loads(config.json_model_override_args)}
        where = _pooling_folder(folder)
        pooling = config.pooling_type or _listed(folder, where) or "last"
        return Embedding(wire.POOLINGS[pooling], int(settings.get("hidden_size", 0)), _sizes(settings, folder), _around(folder))

    def instructed(self, query: str, instruction: str) -> str:
        """A query that says what it is asked for."""
        return f"{self.around[0]}{instruction}{self.around[1]}{query}"

    def check(self, dimensions: int) -> None:
        """Raises ApiError for a number of dimensions that a vector cannot be cut to."""
        if not 1 <= dimensions <= self.size:
            code = "integer_below_min_value" if dimensions < 1 else "integer_above_max_value"
            raise invalid("dimensions", f"dimensions must be between 1 and {self.size}, got {shown_number(dimensions)}.", code)
        if dimensions == self.size or self.sizes == frozenset():
            return
        if self.sizes is None:
            raise invalid(
                "dimensions",
                f"dimensions is {dimensions}, but this model does not support matryoshka representation: its vectors have "
                f"{self.size} dimensions, and fewer would lead to poor results.",
            )
        if dimensions not in self.sizes:
            listed = ", ".join(map(str, sorted(self.sizes)))
            raise invalid("dimensions", f"dimensions must be one of {listed} for this model, got {dimensions}.")


def _sizes(settings: Mapping[str, Any], folder: Path) -> frozenset[int] | None:
    """vLLM's keys of config.json, which --json-model-override-args can set too."""
    sizes = settings.get("matryoshka_dimensions")
    if sizes is None:
        return frozenset() if settings.get("is_matryoshka") is True else None
    if not isinstance(sizes, list) or not sizes or not all(type(size) is int and size > 0 for size in sizes):
        raise ModelError(f"{folder / 'config.json'}: 'matryoshka_dimensions' is {shown(sizes)}, not a list of sizes")
    return frozenset(sizes)


def _around(folder: Path) -> tuple[str, str]:
    """As the model's own prompt for queries has it, where there is one with an instruction."""
    prompts = (read_object_if_any(folder / _PROMPTS) or {}).get("prompts")
    for prompt in prompts.values() if isinstance(prompts, dict) else ():
        if isinstance(prompt, str) and (found := _INSTRUCTED.fullmatch(prompt)) is not None:
            return found[1], found[2]
    return Embedding.around


def _listed(folder: Path, where: str | None) -> str | None:
    """The pooling that the model's own file names; `where`: the folder it must lie in. None: there is none."""
    path = folder / (where or _POOLING) / "config.json"
    modes = read_object_if_any(path)
    if not modes:
        if where is None:
            return None
        raise ConfigError(f"{folder / _MODULES} names {path}, which is not there; say --pooling-type last, mean or cls")
    chosen = [name for name, value in modes.items() if name.startswith("pooling_mode") and value is True]
    named = modes.get("pooling_mode")  # of newer files: the mode's name
    if isinstance(named, str) and not chosen:
        chosen = [f"pooling_mode_{named}" if named == "lasttoken" else f"pooling_mode_{named}_token" + "s" * (named == "mean")]
    if len(chosen) != 1 or chosen[0] not in _MODES:
        asked = ", ".join(chosen) or "none"
        raise ConfigError(f"{path}: the pooling ({shown(asked)}) is not supported; say --pooling-type last, mean or cls to use another")
    return _MODES[chosen[0]]


def _pooling_folder(folder: Path) -> str | None:
    """The folder that modules.json names. Raises ModelError for modules that would change the vectors, and are not there."""
    try:
        content = read_bytes(folder / _MODULES, _BYTES)
    except FileNotFoundError:
        return None
    listed = parse_object(b'{"modules":' + content + b"}", str(folder / _MODULES))["modules"]
    found: str | None = None
    for module in listed if isinstance(listed, list) else [listed]:
        entry = module if isinstance(module, dict) else {}
        kind, path = str(entry.get("type", "")).rpartition(".")[2], str(entry.get("path", ""))
        if kind not in _KNOWN:
            raise ModelError(
                f"{folder / _MODULES}: the module {shown(kind)} is not supported; supported are {', '.join(_KNOWN)}. Without it the "
                "vectors would be others than the model's"
            )
        if kind == "Pooling":
            if not path or "/" in path or path.startswith("."):
                raise ModelError(f"{folder / _MODULES}: {shown(path)} is no folder beside it")
            found = path
    return found

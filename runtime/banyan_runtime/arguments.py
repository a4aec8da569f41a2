"""The command line of `banyan-runtime serve`: a flag for each option of `ServerConfig`, and what is said of other flags."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from collections.abc import Sequence
from typing import Any, Final, NoReturn

from banyan_runtime.config import ServerConfig, as_tuples
from banyan_runtime.errors import ConfigError
from banyan_runtime.options import flag

_ONE_DEVICE: Final = "a server runs on one device; scale with replicas"
REFUSED: Final = {
    "tensor_parallel_size": _ONE_DEVICE,
    "tp_size": _ONE_DEVICE,
    "tp": _ONE_DEVICE,
    "nnodes": _ONE_DEVICE,
    "node_rank": _ONE_DEVICE,
    "dist_init_addr": _ONE_DEVICE,
    "lora_": "adapters are not built yet",
    "max_loras_per_batch": "adapters are not built yet",
    "speculative_": "drafts come from the request's own text (--speculative-algorithm NGRAM)",
}
"""Options of SGLang's that Banyan does not have yet, with the reason. A name that ends in an underscore is the beginning of many."""
ONE_DEVICE: Final = {"tensor_parallel_size": "1", "tp_size": "1", "tp": "1", "nnodes": "1", "node_rank": "0"}
"""The values of refused options that ask for what there is."""
ALWAYS_ON: Final = frozenset({"enable_metrics", "enable_cache_report"})
"""Switches of SGLang's for what Banyan always does."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare every option of `ServerConfig` on `parser`; nothing is checked yet."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for spec in dataclasses.fields(ServerConfig):
        group = groups.setdefault(spec.metadata["group"], parser.add_argument_group(spec.metadata["group"]))
        default = None if spec.default_factory is not dataclasses.MISSING or spec.default in (None, dataclasses.MISSING) else spec.default
        text = spec.metadata["help"] + ("" if default is None or default is False else f" [{default}]")
        kwargs: dict[str, Any] = {"dest": spec.name, "default": argparse.SUPPRESS, "help": text.replace("%", "%%")}
        kind = str(spec.type)
        if kind == "bool":
            kwargs["action"] = "store_true"
        elif kind.startswith("tuple[str"):
            kwargs |= {"nargs": "+", "metavar": spec.metadata["metavar"]}
        else:
            kwargs |= {"type": {"int": int, "float": float}.get(kind.split(" ")[0], str), "metavar": spec.metadata["metavar"]}
        if spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING:
            kwargs["required"] = True
        names = [flag(spec.name)] + (["--model"] if spec.name == "model_path" else [])
        group.add_argument(*names, **kwargs)


def parse(argv: Sequence[str]) -> ServerConfig:
    """The configuration that a command line asks for.

    Raises ConfigError for an unknown option, a bad value, or an option in `REFUSED`.
    """
    _check_text(argv)
    parser = _Parser(prog="banyan-runtime serve", allow_abbrev=False)
    add_options(parser)
    namespace, rest = parser.parse_known_args(list(argv))
    _refuse_others(rest)
    return ServerConfig(**as_tuples(vars(namespace)))


def _refuse_others(rest: Sequence[str]) -> None:
    """Raises ConfigError for the first of these words that asks for something that Banyan does not have."""
    words = iter(rest)
    for word in words:
        option, equals, value = word.partition("=")
        name = option.removeprefix("--").replace("-", "_")
        if name in ALWAYS_ON and not equals:
            continue
        reason = next((reason for start, reason in REFUSED.items() if name == start or (start[-1] == "_" and name.startswith(start))), None)
        if not option.startswith("--") or reason is None:
            options = [flag(spec.name) for spec in dataclasses.fields(ServerConfig)]
            (closest,) = difflib.get_close_matches(option, options, n=1, cutoff=0)
            raise ConfigError(f"unknown option; the closest one is {closest}, 'banyan-runtime serve --help' lists all", field=option)
        if (value if equals else next(words, "")) != ONE_DEVICE.get(name):
            raise ConfigError(f"is not supported: {reason}; remove it", field=option)


def _check_text(argv: Sequence[str]) -> None:
    """Values go into JSON, metrics and logs, so bytes that are no UTF-8, which Python keeps as lone surrogates, are refused."""
    name = ""
    for word in argv:
        if word.startswith("--"):
            name = word.partition("=")[0]
        try:
            word.encode()
        except UnicodeEncodeError:
            raise ConfigError("is not valid UTF-8; use another value", field=ascii(name).strip("'") or "the first argument") from None

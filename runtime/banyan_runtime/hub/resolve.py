"""Where a `--model-path` leads: a folder as it is, one that is made for a GGUF file, or a model that is fetched first, into a folder
that is checked each time."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote

from banyan_runtime.errors import AccessError, ConfigError, ModelError, UnavailableError
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
    """The folder of the model: as it is, made for a GGUF file, or fetched if need be, and mended where it was damaged. Without
    `tokenizer` nobody will read one there.

    A folder is never looked up on a network. Raises ModelError for a folder without config.json, AccessError for one that may
    not be read, ConfigError for another kind of address, and what `gguf.unfold` and `cache.ensure` raise.
    """
    found, cache = address.parse(model_path, revision), cache_dir(download_dir)
    if found is not None:
        return fetch(found, cache, progress, budget=manifest.START_BYTES)
    path, file = _local(model_path)
    if file is None:
        return path
    from banyan_runtime.hub.gguf.unfold import unfold

    progress("loading", 0, f"the metadata of {file.name}")
    return unfold(file, None if file == path else path, cache, tokenizer=tokenizer)


def fetch(found: Address, cache: Path, progress: Report = silent, *, into: Path | None = None, budget: int | None = None) -> Path:
    """The folder of a fetched model: below `cache`, or `into` itself. `budget`: as of `manifest.check`. Raises as `resolve`."""
    from banyan_runtime.hub.cache import ensure

    if isinstance(found, Catalog):
        from banyan_runtime.hub.fetch import CatalogRecipe

        catalog.entry(found.name)
        return ensure(CatalogRecipe(found.name), into or place(found, cache), progress, budget=budget)
    from banyan_runtime.hub.remote import note_version, present

    home = place(found, cache)
    try:
        recipe = present(found, lambda version: into or home / version, home, progress)
        folder = ensure(recipe, into or home / recipe.version, progress, budget=budget)
    except UnavailableError as error:
        if str(found) in str(error):
            raise
        raise type(error)(f"{found}: {error}") from error
    if into is None:
        note_version(home, found, recipe.version)
    return folder


def place(found: Address, cache: Path) -> Path:
    """The folder of a model in the cache; of one from a hub or a bucket, the folder of its versions."""
    models = cache / "models"
    match found:
        case Catalog(name):
            return models / name
        case HubRepo(name):
            return models / "hf" / name.replace("/", "--")
        case BucketPrefix(bucket, prefix):
            return models / "s3" / f"{bucket}--{quote(prefix, safe='')}"[:200]


def _expanded(model_path: str) -> Path:
    """The path with a first '~' replaced."""
    try:
        return Path(model_path).expanduser()
    except RuntimeError:
        raise ModelError(f"--model-path={model_path}: the home folder that '~' stands for is not known; write the whole path") from None


def _local(model_path: str) -> tuple[Path, Path | None]:
    """The folder or file that a path names, and the GGUF file that holds the model, if one does."""
    path = _expanded(model_path)
    try:
        if path.is_file():
            if not is_gguf(path):
                raise ModelError(f"--model-path={model_path}: is no GGUF file; give one, or the folder of a model")
            return path, path
        if not path.is_dir():
            raise ModelError(
                f"--model-path={model_path}: no such folder; give the folder of a model, a .gguf file, hf://ORG/NAME, "
                "s3://BUCKET/PREFIX, or catalog://NAME ('banyan-runtime models list')"
            )
        file = find(path)
        if file is None and not (path / "config.json").is_file():
            raise ModelError(f"--model-path={model_path}: the folder holds no config.json and no .gguf file, so it is not a model folder")
    except PermissionError:
        raise AccessError(
            f"--model-path={model_path}: user {os.geteuid()} may not read it; give that user read access (fsGroup, or chmod a+rX)"
        ) from None
    return path, file

"""Where a `--model-path` leads: a folder as it is, or a catalog model that is fetched first."""

from __future__ import annotations

import os
from pathlib import Path

from banyan_runtime.errors import AccessError, ConfigError, ModelError
from banyan_runtime.hub import catalog
from banyan_runtime.hub.progress import Report, silent

SCHEME = "catalog://"


def check(model_path: str) -> None:
    """Refuse, as `resolve` does, what can be judged at once: an unknown name, a folder that holds no model. Fetches nothing."""
    if model_path.startswith(SCHEME):
        catalog.entry(model_path.removeprefix(SCHEME))
    else:
        resolve(model_path)


def resolve(model_path: str, download_dir: str | None = None, progress: Report = silent) -> Path:
    """The folder of the model, fetched if need be.

    A folder is never looked up on a network. Raises ModelError for a folder without config.json, AccessError for one that may
    not be read, ConfigError for another kind of address.
    """
    if model_path.startswith(SCHEME):
        from banyan_runtime.hub.fetch import cache_dir, fetch

        name = model_path.removeprefix(SCHEME)
        return fetch(name, cache_dir(download_dir) / "models" / name, progress)
    if "://" in model_path:
        raise ConfigError(f"--model-path={model_path}: only a folder or {SCHEME}NAME can be served")
    folder = Path(model_path).expanduser()
    try:
        if not folder.is_dir():
            raise ModelError(
                f"--model-path={model_path}: no such folder; give the folder of a model, or {SCHEME}NAME ('banyan-runtime models list')"
            )
        if not (folder / "config.json").is_file():
            raise ModelError(f"--model-path={model_path}: the folder holds no config.json, so it is not a model folder")
    except PermissionError:
        raise AccessError(
            f"--model-path={model_path}: user {os.geteuid()} may not read it; give that user read access (fsGroup, or chmod a+rX)"
        ) from None
    return folder

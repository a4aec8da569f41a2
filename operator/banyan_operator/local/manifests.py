"""Manifest files: found, read, checked, and read again when they change."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from banyan_operator.api import KINDS, SpecError, check_update, parse
from banyan_operator.kube.objects import Key, key_of
from banyan_operator.local.errors import LocalError
from banyan_operator.local.objects import NAMESPACE
from banyan_operator.plan import Manifest

SUFFIXES = (".yaml", ".yml", ".json")
REFERENCED = ("Secret", "ConfigMap")


@dataclass(frozen=True, slots=True)
class Contents:
    """What the files say."""

    objects: Mapping[Key, Manifest]  # resources, Secrets and ConfigMaps
    ignored: tuple[str, ...]  # 'kind/name' of what local mode has no use for


class Manifests:
    """The files given with -f, and the folders given with --secret."""

    def __init__(self, paths: Sequence[Path], secrets: Mapping[str, Path]) -> None:
        """Raises LocalError for a path that does not exist."""
        for path in (*paths, *secrets.values()):
            if not path.exists():
                raise LocalError(f"{path}: no such file or folder")
        for name, folder in secrets.items():
            if not folder.is_dir():
                raise LocalError(f"--secret {name}={folder}: must be a folder that holds a file for each key")
        self._paths = [path.resolve() for path in paths]
        self._secrets = secrets
        self._seen: object = None

    @property
    def folders(self) -> list[Path]:
        """Where the manifests lie."""
        return list(dict.fromkeys(path if path.is_dir() else path.parent for path in self._paths))

    def changed(self) -> bool:
        """Whether anything changed since the last call; True the first time."""
        seen = [(path, stat.st_mtime_ns, stat.st_size, stat.st_ino) for path in self._files() if (stat := _stat(path))]
        before, self._seen = self._seen, seen
        return seen != before

    def read(self) -> Contents:
        """Raises LocalError for what is no valid manifest; the message names file, object, field and remedy."""
        objects: dict[Key, Manifest] = {}
        ignored: list[str] = []
        for path in self._manifest_files():
            for document in _documents(path):
                where = f"{path}: {document.get('kind', 'object without kind')}/{(document.get('metadata') or {}).get('name', '?')}"
                kind = document.get("kind")
                if kind not in KINDS and kind not in REFERENCED:
                    ignored.append(where.removeprefix(f"{path}: "))
                    continue
                manifest = _checked(where, document)
                if key_of(manifest) in objects:
                    raise LocalError(f"{where} is there twice; remove one")
                objects[key_of(manifest)] = manifest
        for name, folder in self._secrets.items():
            secret = _secret(name, folder)
            objects[key_of(secret)] = secret
        if not any(key.kind in KINDS for key in objects):
            raise LocalError(f"{', '.join(map(str, self._paths))}: no {' and no '.join(KINDS)} in there")
        return Contents(objects, tuple(ignored))

    def _manifest_files(self) -> Iterator[Path]:
        for path in self._paths:
            if path.is_dir():
                yield from sorted(file for file in path.iterdir() if file.suffix in SUFFIXES and file.is_file())
            else:
                yield path

    def _files(self) -> Iterator[Path]:
        yield from self._manifest_files()
        for folder in self._secrets.values():
            yield from sorted(folder.iterdir())


def check_change(new: Manifest, old: Manifest) -> None:
    """Raises LocalError when a field changed that must not; in a cluster the API server refuses that."""
    try:
        check_update(parse(new), parse(old))
    except SpecError as error:
        raise LocalError(f"{new['kind']}/{new['metadata']['name']}: {error}") from None


def _stat(path: Path) -> Any:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _documents(path: Path) -> Iterator[Manifest]:
    try:
        documents = list(yaml.safe_load_all(path.read_text()))
    except (OSError, UnicodeDecodeError) as error:
        raise LocalError(f"{path}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise LocalError(f"{path}: is not YAML: {' '.join(str(error).split())}") from None
    for document in documents:
        if document is None:
            continue
        if not isinstance(document, dict):
            raise LocalError(f"{path}: holds a {type(document).__name__} where an object is expected")
        if document.get("kind") == "List":
            yield from document.get("items") or []
        else:
            yield document


def _checked(where: str, document: Manifest) -> Manifest:
    if document["kind"] in KINDS:
        try:
            parse(document)
        except SpecError as error:
            raise LocalError(f"{where}: {error}") from None
    metadata = document.get("metadata")
    if not isinstance(metadata, dict) or not isinstance(metadata.get("name"), str):
        raise LocalError(f"{where}: metadata.name is required")
    # a status in a file is some other world's; it is dropped, as the API server drops it
    kept = {key: value for key, value in document.items() if key != "status"}
    return {**kept, "metadata": {**metadata, "namespace": metadata.get("namespace") or NAMESPACE}}


def _secret(name: str, folder: Path) -> Manifest:
    data = {file.name: base64.b64encode(file.read_bytes()).decode() for file in sorted(folder.iterdir()) if file.is_file()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name, "namespace": NAMESPACE}, "data": data}

"""Manifest files: found, read, checked, and read again when they change."""

from __future__ import annotations

import base64
import binascii
import json
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
        """Whether anything changed since the last call; True the first time. What cannot be looked at counts as gone."""
        seen: list[Any] = []
        try:
            seen += [(path, stat.st_mtime_ns, stat.st_size, stat.st_ino) for path in self._files() if (stat := _stat(path))]
        except OSError as error:
            seen.append(str(error))
        before, self._seen = self._seen, seen
        return seen != before

    def read(self) -> Contents:
        """Raises LocalError for what is no valid manifest; the message names file, object, field and remedy."""
        try:
            return self._read()
        except OSError as error:
            raise LocalError(f"{error.filename}: cannot be read: {error.strerror}") from None

    def _read(self) -> Contents:
        objects: dict[Key, Manifest] = {}
        ignored: list[str] = []
        for path in self._manifest_files():
            for document in _documents(path):
                kind, metadata = document.get("kind", "object without kind"), document.get("metadata")
                name = f"{kind}/{metadata.get('name', '?') if isinstance(metadata, dict) else '?'}"
                if not isinstance(kind, str) or (kind not in KINDS and kind not in REFERENCED):
                    ignored.append(name)
                    continue
                where = f"{path}: {name}"
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
        loaded = list(yaml.safe_load_all(path.read_text()))
        documents = json.loads(json.dumps(loaded, default=str))  # YAML knows dates and numbers as keys, the API only JSON
    except (OSError, UnicodeDecodeError) as error:
        raise LocalError(f"{path}: cannot be read: {error}") from None
    except (yaml.YAMLError, TypeError, ValueError, RecursionError) as error:
        raise LocalError(f"{path}: is not YAML: {' '.join(str(error).split())}") from None
    for document in documents:
        if document is None:
            continue
        items = [document]
        if isinstance(document, dict) and document.get("kind") == "List":
            items = document.get("items") or []
            if not isinstance(items, list):
                raise LocalError(f"{path}: List: items holds a {type(items).__name__} where a list is expected")
        for item in items:
            if not isinstance(item, dict):
                raise LocalError(f"{path}: holds a {type(item).__name__} where an object is expected")
            yield item


def _checked(where: str, document: Manifest) -> Manifest:
    metadata = document.get("metadata")
    if not isinstance(metadata, dict) or not isinstance(metadata.get("name"), str):
        raise LocalError(f"{where}: metadata.name is required")
    # what another API server noted of the object (uid, owners, status) means nothing here
    known = {"name": metadata["name"], "namespace": metadata.get("namespace") or NAMESPACE}
    if not isinstance(known["namespace"], str):
        raise LocalError(f"{where}: metadata.namespace: {known['namespace']!r} is no text")
    for field in ("labels", "annotations"):
        if texts := _texts(where, f"metadata.{field}", metadata.get(field)):
            known[field] = texts
    manifest = {**{key: value for key, value in document.items() if key != "status"}, "metadata": known}
    if document["kind"] in KINDS:
        try:
            parse(manifest)
        except SpecError as error:
            raise LocalError(f"{where}: {error}") from None
    else:
        for field in ("data", "stringData", "binaryData"):
            if field in document:
                manifest[field] = _texts(where, field, document[field])
        for field in ("data",) if document["kind"] == "Secret" else ("binaryData",):
            for key, text in manifest.get(field, {}).items():
                try:
                    base64.b64decode(text, validate=False)
                except binascii.Error:
                    raise LocalError(f"{where}: {field}.{key}: is not base64; write plain text in stringData") from None
    return manifest


def _texts(where: str, field: str, value: Any) -> dict[str, str]:
    """A mapping of names to texts; empty where there is none."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise LocalError(f"{where}: {field}: {value!r} is no mapping")
    for name, text in value.items():
        if not isinstance(text, str):
            raise LocalError(f"{where}: {field}.{name}: {text!r} is no text; write it in quotes")
    return value


def _secret(name: str, folder: Path) -> Manifest:
    data = {file.name: base64.b64encode(file.read_bytes()).decode() for file in sorted(folder.iterdir()) if file.is_file()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name, "namespace": NAMESPACE}, "data": data}

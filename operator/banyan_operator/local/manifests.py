"""Manifest files: found, read, checked, and read again when they change."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from banyan_operator.api import KINDS, SpecError, check_update, parse
from banyan_operator.kube.kinds import GROUP, Manifest
from banyan_operator.kube.objects import Key, key_of
from banyan_operator.local.errors import LocalError
from banyan_operator.local.status import NAMESPACE

SUFFIXES: Final = (".yaml", ".yml", ".json")
REFERENCED: Final = ("Secret", "ConfigMap")
_ANEW: Final = "What is to run anew needs another name, or a start with --fresh, which forgets all that ran"
_KEY_RULE: Final = "use letters, digits, '-', '_' and '.', 253 at most, not beginning with '..'"


@dataclass(frozen=True, slots=True)
class Contents:
    """What the files say: resources as manifests, of Secrets and ConfigMaps the keys, as bytes, in `data`."""

    files: Mapping[Path, Mapping[Key, Manifest]]  # by file, or folder of a Secret
    ignored: tuple[str, ...] = ()  # 'kind/name' of what local mode has no use for
    refused: tuple[str, ...] = ()  # why a file is not taken over; what it held before stays

    @property
    def objects(self) -> dict[Key, Manifest]:
        return {key: manifest for found in self.files.values() for key, manifest in found.items()}


class Manifests:
    """The files given with -f, and the folders given with --secret."""

    def __init__(self, paths: Sequence[Path], secrets: Mapping[str, Path]) -> None:
        """Raises LocalError for a path that does not exist."""
        for path in (*paths, *secrets.values()):
            if not path.exists():
                raise LocalError(f"{path}: no such file or folder")
        self._paths = [path.resolve() for path in paths]
        self._secrets = secrets
        self._seen: object = None

    @property
    def folders(self) -> list[Path]:
        """Where the manifests lie."""
        return list(dict.fromkeys(path if path.is_dir() else path.parent for path in self._paths))

    def changed(self) -> bool:
        """Whether anything changed since the last call; True the first time. What cannot be looked at counts as gone."""
        seen: list[object] = []
        try:
            for path in (*self._files(), *(file for folder in self._secrets.values() for file in sorted(folder.iterdir()))):
                stat = path.stat()
                seen.append((path, stat.st_mtime_ns, stat.st_size, stat.st_ino))
        except OSError as error:
            seen.append(str(error))
        before, self._seen = self._seen, seen
        return seen != before

    def read(self, before: Contents | None = None) -> Contents:
        """Raises LocalError for what is no valid manifest; the message names file, object, field and remedy. With `before`, what was
        read last, a file with a mistake is told of in the contents, and what it held stays.
        """
        files: dict[Path, Mapping[Key, Manifest]] = {}
        ignored, refused = list[str](), list[str]()
        known: set[Key] = set()
        for path, name in self._sources():
            try:
                files[path] = _secret(name, path) if name else _objects(path, ignored)
                if twice := known & files[path].keys():
                    raise LocalError(f"{path}: {_name(next(iter(twice)))} is there twice; remove one")
            except LocalError as error:
                if before is None:
                    raise
                refused.append(str(error))
                files[path] = before.files.get(path, {})
            known |= files[path].keys()
        if not any(key.kind in KINDS for key in known):
            raise LocalError(f"{', '.join(map(str, self._paths))}: no {' and no '.join(KINDS)} in there")
        return Contents(files, tuple(ignored), tuple(refused))

    def _sources(self) -> Iterator[tuple[Path, str]]:
        """Manifest files, and folders with the name of their Secret."""
        try:
            yield from ((path, "") for path in self._files())
        except OSError as error:
            raise LocalError(f"{error.filename}: cannot be read: {error.strerror}") from None
        yield from ((folder, name) for name, folder in self._secrets.items())

    def _files(self) -> Iterator[Path]:
        for path in self._paths:
            if path.is_dir():
                yield from sorted(file for file in path.iterdir() if file.suffix in SUFFIXES and file.is_file())
            else:
                yield path


def check_change(new: Manifest, old: Manifest) -> None:
    """Raises LocalError when a field changed that must not; in a cluster the API server refuses that. `old` may be of another version."""
    try:
        check_update(parse(new), parse(old, strict=False))
    except SpecError as error:
        raise LocalError(f"{_name(key_of(new))}: {error}. {_ANEW}") from None


def _name(key: Key) -> str:
    return f"{key.kind}/{key.name}"


def _objects(path: Path, ignored: list[str]) -> dict[Key, Manifest]:
    """Of one file. Names of what local mode has no use for are added to `ignored`. Raises LocalError."""
    found: dict[Key, Manifest] = {}
    for document in _documents(path):
        kind, metadata = document.get("kind", "object without kind"), document.get("metadata")
        name = f"{kind}/{metadata.get('name', '?') if isinstance(metadata, dict) else '?'}"
        if kind in (*KINDS, *REFERENCED):
            manifest = _checked(f"{path}: {name}", document)
            if key_of(manifest) in found:
                raise LocalError(f"{path}: {name} is there twice; remove one")
            found[key_of(manifest)] = manifest
        elif str(document.get("apiVersion")).partition("/")[0] == GROUP:
            raise LocalError(f"{path}: {name}: {GROUP} has no kind {kind!r}; it has {' and '.join(KINDS)}")
        else:
            ignored.append(name)
    return found


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice, as kubectl does: one of the two would be passed over in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge"]
        for key in keys:
            if sum(key.value == one.value for one in keys) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key.value[:64]!r} stands there twice", key.start_mark)
        return super().construct_mapping(node, deep)


def _documents(path: Path) -> Iterator[Manifest]:
    try:
        loaded = list(yaml.load_all(path.read_text(), _Loader))
        documents = json.loads(json.dumps(loaded, default=str))  # YAML knows dates and numbers as keys, the API only JSON
    except (OSError, UnicodeDecodeError) as error:
        raise LocalError(f"{path}: cannot be read: {error}") from None
    except (yaml.YAMLError, TypeError, ValueError, RecursionError) as error:
        raise LocalError(f"{path}: is not YAML: {' '.join(str(error).split())}") from None
    for document in documents:
        items = [document]
        if isinstance(document, dict) and document.get("kind") == "List":
            items = document.get("items") or []
        for item in items if isinstance(items, list) else [items]:
            if isinstance(item, dict):
                yield item
            elif item is not None:
                raise LocalError(f"{path}: holds a {type(item).__name__} where an object is expected")


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
        return manifest
    return {"kind": document["kind"], "metadata": known, "data": _data(where, document)}


def _data(where: str, document: Manifest) -> dict[str, bytes]:
    """The keys of a Secret or ConfigMap."""
    found: dict[str, bytes] = {}
    in_base64 = "data" if document["kind"] == "Secret" else "binaryData"
    for field in ("data", "binaryData", "stringData"):
        for key, text in _texts(where, field, document.get(field)).items():
            if not _is_key(key):
                raise LocalError(f"{where}: {field}.{key}: {key!r} is no name of a key; {_KEY_RULE}")
            try:
                found[key] = base64.b64decode(text) if field == in_base64 else text.encode()
            except binascii.Error:
                raise LocalError(f"{where}: {field}.{key}: is not base64; write plain text in stringData") from None
    return found


def _texts(where: str, field: str, value: Any) -> dict[str, str]:
    """A mapping of names to texts; empty where there is none."""
    if value is not None and not isinstance(value, dict):
        raise LocalError(f"{where}: {field}: {value!r} is no mapping")
    for name, text in (value or {}).items():
        if not isinstance(text, str):
            raise LocalError(f"{where}: {field}.{name}: {text!r} is no text; write it in quotes")
    return value or {}


def _is_key(name: str) -> bool:
    """Whether an API server takes `name` for a key of a Secret or ConfigMap. It becomes the name of a file."""
    return re.fullmatch(r"[-._a-zA-Z0-9]{1,253}", name) is not None and name != "." and not name.startswith("..")


def _secret(name: str, folder: Path) -> dict[Key, Manifest]:
    """As kubectl makes it of a folder: files that bear no name of a key are left out."""
    try:
        files = [file for file in sorted(folder.iterdir()) if _is_key(file.name) and file.is_file()]
        data = {file.name: file.read_bytes() for file in files}
    except OSError as error:
        raise LocalError(f"{error.filename}: cannot be read: {error.strerror}") from None
    return {Key("Secret", NAMESPACE, name): {"kind": "Secret", "metadata": {"name": name, "namespace": NAMESPACE}, "data": data}}

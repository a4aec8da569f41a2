"""Manifest files: found, read, checked, and read again when they change."""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as field_of
from pathlib import Path
from typing import Any

import yaml

from banyan_operator.api import KINDS, SpecError, check_update, parse
from banyan_operator.kube.kinds import GROUP
from banyan_operator.kube.objects import Key, key_of
from banyan_operator.local.errors import LocalError
from banyan_operator.local.objects import NAMESPACE
from banyan_operator.plan import Manifest

SUFFIXES = (".yaml", ".yml", ".json")
REFERENCED = ("Secret", "ConfigMap")
_ANEW = "What is to run anew needs another name, or a start with --fresh, which forgets all that ran"
_KEY_RULE = "use letters, digits, '-', '_' and '.', 253 at most, not beginning with '..'"


@dataclass(frozen=True, slots=True)
class Contents:
    """What the files say."""

    objects: Mapping[Key, Manifest]  # resources, Secrets and ConfigMaps
    ignored: tuple[str, ...]  # 'kind/name' of what local mode has no use for
    places: Mapping[Key, Path]  # the file or folder of each object
    refused: tuple[str, ...] = ()  # why a manifest is not taken over; what it was before stays


@dataclass(slots=True)
class _Reading:
    """What was found so far, put beside what there was before."""

    before: Contents | None
    objects: dict[Key, Manifest] = field_of(default_factory=dict)
    ignored: list[str] = field_of(default_factory=list)
    places: dict[Key, Path] = field_of(default_factory=dict)
    refused: list[str] = field_of(default_factory=list)
    held: set[Path] = field_of(default_factory=set)  # places of what is refused

    def take(self, manifest: Manifest, place: Path, where: str) -> None:
        """Raises LocalError for an object that is there already; as it was before it stays."""
        key = key_of(manifest)
        if key in self.objects:
            if self.before is not None and key in self.before.objects:
                self.objects[key] = self.before.objects[key]
            raise LocalError(f"{where} is there twice; remove one")
        self.objects[key], self.places[key] = manifest, place

    @contextlib.contextmanager
    def refusing(self, place: Path) -> Iterator[None]:
        """What is wrong holds back nothing but itself, where something was there before."""
        try:
            yield
        except (LocalError, OSError) as error:
            if self.before is None:
                raise
            self.refused.append(str(error) if isinstance(error, LocalError) else _unreadable(error))
            self.held.add(place)

    def contents(self) -> Contents:
        if self.before is not None:  # nobody knows which object a manifest was meant to be that cannot be understood
            for key, place in self.before.places.items():
                if place in self.held and key not in self.objects:
                    self.objects[key], self.places[key] = self.before.objects[key], place
        return Contents(self.objects, tuple(self.ignored), self.places, tuple(self.refused))


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

    def read(self, before: Contents | None = None) -> Contents:
        """Raises LocalError for what is no valid manifest; the message names file, object, field and remedy. With `before`, what was
        read last, a manifest that is wrong is told of in the contents, and what it was stays; so do other objects of its file that are
        not found any more.
        """
        try:
            return self._read(_Reading(before))
        except OSError as error:
            raise LocalError(_unreadable(error)) from None

    def _read(self, reading: _Reading) -> Contents:
        for path in self._manifest_files():
            with reading.refusing(path):
                for document in _documents(path):
                    with reading.refusing(path):
                        _take(reading, path, document)
        for name, folder in self._secrets.items():
            with reading.refusing(folder):
                reading.take(_secret(name, folder), folder, f"--secret {name}={folder}: Secret/{name}")
        found = reading.contents()
        if not any(key.kind in KINDS for key in found.objects):
            raise LocalError(f"{', '.join(map(str, self._paths))}: no {' and no '.join(KINDS)} in there")
        return found

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


def _take(reading: _Reading, path: Path, document: Manifest) -> None:
    """Raises LocalError."""
    kind, metadata = document.get("kind", "object without kind"), document.get("metadata")
    name = f"{kind}/{metadata.get('name', '?') if isinstance(metadata, dict) else '?'}"
    if not isinstance(kind, str) or (kind not in KINDS and kind not in REFERENCED):
        if str(document.get("apiVersion")).partition("/")[0] == GROUP:
            raise LocalError(f"{path}: {name}: {GROUP} has no kind {kind!r}; it has {' and '.join(KINDS)}")
        reading.ignored.append(name)
        return
    where = f"{path}: {name}"
    reading.take(_checked(where, document), path, where)


def check_change(new: Manifest, old: Manifest) -> None:
    """Raises LocalError when a field changed that must not; in a cluster the API server refuses that. `old` may be of another version."""
    try:
        check_update(parse(new), parse(old, strict=False))
    except SpecError as error:
        raise LocalError(f"{new['kind']}/{new['metadata']['name']}: {error}. {_ANEW}") from None


def _unreadable(error: OSError) -> str:
    return f"{error.filename}: cannot be read: {error.strerror}"


def _stat(path: Path) -> Any:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice, as kubectl does: one of the two would be passed over in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"the key {key.value[:64]!r} stands there twice", key.start_mark)
                seen.add(key.value)
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
                for key in manifest[field]:
                    if not _is_key(key):
                        raise LocalError(f"{where}: {field}.{key}: {key!r} is no name of a key; {_KEY_RULE}")
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


def _is_key(name: str) -> bool:
    """Whether an API server takes `name` for a key of a Secret or ConfigMap. It becomes the name of a file."""
    return re.fullmatch(r"[-._a-zA-Z0-9]{1,253}", name) is not None and name != "." and not name.startswith("..")


def _secret(name: str, folder: Path) -> Manifest:
    """As kubectl makes it of a folder: files that bear no name of a key are left out."""
    files = [file for file in sorted(folder.iterdir()) if _is_key(file.name) and file.is_file()]
    data = {file.name: base64.b64encode(file.read_bytes()).decode() for file in files}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name, "namespace": NAMESPACE}, "data": data}

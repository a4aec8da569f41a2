"""The volumes of a pod as folders on this machine."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Final

from banyan_operator.plan import Manifest

Find = Callable[[str, str], Mapping[str, bytes] | None]
"""(kind, name) → the keys of the Secret or ConfigMap, if there is one."""

_CLAIM: Final = re.compile("pvc://([^/]+)")
CACHE_VOLUME = "cache"
MODELS_CLAIM = "models"


class Missing(Exception):
    """A container cannot start for want of something; `reason` is the kubelet's word for it."""

    def __init__(self, message: str, reason: str = "CreateContainerConfigError") -> None:
        super().__init__(message)
        self.reason = reason


class Volumes:
    """Makes the folders and files of pods under `root`, and knows where claims lead."""

    def __init__(self, root: Path, cache: Path, claims: Mapping[str, Path], beside: Callable[[], Sequence[Path]]) -> None:
        """`cache`: the user's own cache, shared by all pods. `claims`: claim name → folder, as the user said. `beside`: the
        folders that the manifests lie in; one in them with the name of a claim is that claim."""
        self._root = root
        self._cache = cache
        self._claims = dict(claims)
        self._beside = beside

    def pod_folder(self, pod: str) -> Path:
        return self._root / "pods" / pod

    def where(self, claim: str) -> Path:
        """The folder that a PersistentVolumeClaim stands for, whether or not it is there yet."""
        if claim in self._claims:
            return self._claims[claim]
        for folder in self._beside():
            if (folder / claim).is_dir():
                return folder / claim
        return self._cache / "models" if claim == MODELS_CLAIM else self._root / "volumes" / claim

    def claim(self, name: str) -> Path:
        """The folder of a PersistentVolumeClaim; made where it is one of ours."""
        folder = self.where(name)
        return folder if name in self._claims else _made(folder)

    def mount(self, pod: Manifest, find: Find) -> dict[str, Path]:
        """Volume name → folder. Files of Secrets and ConfigMaps are brought up to date, so it may be called again.

        Raises Missing for a Secret or ConfigMap that is not there, and for a kind of volume that local mode has not.
        """
        own = self.pod_folder(pod["metadata"]["name"]) / "volumes"
        return {volume["name"]: self._folder(volume, own, find) for volume in pod["spec"].get("volumes", ())}

    def discard(self, pod: str) -> None:
        shutil.rmtree(self.pod_folder(pod), ignore_errors=True)

    def _folder(self, volume: Manifest, own: Path, find: Find) -> Path:
        name = volume["name"]
        if "persistentVolumeClaim" in volume:
            return self.claim(volume["persistentVolumeClaim"]["claimName"])
        if "emptyDir" in volume:
            # one download for all pods and all runs: here the cache is the user's own, as it is for the runtime alone
            return _made(self._cache) if name == CACHE_VOLUME else _made(own / name)
        if "hostPath" in volume:
            return Path(volume["hostPath"]["path"])
        sources = volume["projected"]["sources"] if "projected" in volume else [volume]
        folder = _made(own / name)
        _write_all(folder, dict(pair for source in sources for pair in _files(source, find)))
        return folder


def claims_of(value: object, cache: str) -> Iterator[str]:
    """The claims that a manifest speaks of, anywhere in it: as `pvc://CLAIM/…`, as a volume's `claimName`, or as a cache that has one made,
    of the name `cache`."""
    if isinstance(value, str) and (found := _CLAIM.match(value)):
        yield found[1]
    elif isinstance(value, Mapping):
        if isinstance(name := value.get("claimName"), str):
            yield name
        elif value.get("type") == "PersistentVolumeClaim":
            yield cache
        value = [*value.values()]
    if isinstance(value, list):
        for part in value:
            yield from claims_of(part, cache)


def keys_of(kind: str, name: str, find: Find, *, optional: bool) -> Mapping[str, bytes]:
    """Of a Secret or ConfigMap. Raises Missing where it is not there and not `optional`."""
    found = find(kind, name)
    if found is None and not optional:
        raise Missing(f'{kind.lower()} "{name}" not found')
    return found or {}


def _files(source: Manifest, find: Find) -> Iterator[tuple[str, bytes]]:
    """Relative path and content of every file that a Secret or ConfigMap source stands for."""
    for kind, field, name_field in (("Secret", "secret", "secretName"), ("ConfigMap", "configMap", "name")):
        if field not in source:
            continue
        what = source[field]
        name = what.get(name_field) or what["name"]
        data = keys_of(kind, name, find, optional=bool(what.get("optional")))
        for item in what.get("items") or [{"key": key, "path": key} for key in data]:
            if item["key"] not in data:
                if what.get("optional"):
                    continue
                raise Missing(f'references non-existent {kind.lower()} key: {item["key"]} in "{name}"')
            path = PurePosixPath(item["path"])
            if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in item["path"]:
                raise Missing(f"{kind.lower()} \"{name}\": items.path {item['path']!r} must be a relative path without '..'")
            yield item["path"], data[item["key"]]
        return
    kinds = ", ".join(key for key in source if key != "name")
    raise Missing(f"local mode has no volumes of type {kinds}", "VolumeNotReady")


def _write_all(folder: Path, files: Mapping[str, bytes]) -> None:
    """Make `folder` hold exactly `files`, each replaced in one piece and readable by the user alone."""
    for path, content in files.items():
        target = folder / path
        if target.is_file() and target.read_bytes() == content:
            continue
        _made(target.parent)
        new = target.with_name(f".{target.name}.new")
        new.touch(mode=0o600)
        new.write_bytes(content)
        new.replace(target)
    for target in list(folder.rglob("*")):
        if target.is_file() and str(target.relative_to(folder)) not in files:
            target.unlink()


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder

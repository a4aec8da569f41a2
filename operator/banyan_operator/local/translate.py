"""A container's spec as a command on this machine. Pure: what it needs to know of the machine is handed in."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from banyan_operator.local.ports import HOST
from banyan_operator.local.volumes import Find, Missing, keys_of
from banyan_operator.plan import Manifest

_REFERENCE = re.compile(r"\$(\$|\(([A-Za-z_.-][A-Za-z0-9_.-]*)\))")
_LOCAL_URL = re.compile(r"^(https?://(?:127\.0\.0\.1|localhost)):(\d+)")
SHARED_MEMORY = "/dev/shm"
_EVERYWHERE = ("0.0.0.0", "::", "[::]")


@dataclass(frozen=True, slots=True)
class Command:
    """What to run."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    workdir: str | None


@dataclass(frozen=True, slots=True)
class Place:
    """What this machine gave a pod."""

    folders: Mapping[str, Path]  # volume name → folder
    ports: Mapping[int, int]  # port in the pod spec → port here
    devices: Sequence[str]  # accelerators of this container
    base_env: Mapping[str, str]  # what an image would bring
    termination_log: Path


def pod_ports(pod: Manifest) -> list[int]:
    """Every port that the pod's containers listen on, as its spec numbers them."""
    found: set[int] = set()
    for container in _containers(pod):
        found |= {port["containerPort"] for port in container.get("ports", ())}
        for variable in container.get("env", ()):
            value = str(variable.get("value", ""))
            if variable["name"].startswith("BANYAN_") and variable["name"].endswith("_PORT") and value.isdigit():
                found.add(int(value))
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            port = container.get(kind, {}).get("httpGet", {}).get("port")
            if isinstance(port, int):
                found.add(port)
    return sorted(found)


def port_number(container: Manifest, port: int | str) -> int:
    """The number of a port that may be written by its name."""
    if isinstance(port, int):
        return port
    return next(int(one["containerPort"]) for one in container.get("ports", ()) if one.get("name") == port)


def command(pod: Manifest, container: Manifest, place: Place, find: Find) -> Command:
    """Raises Missing when something that the container refers to does not exist."""
    if not container.get("command"):
        raise Missing(f"container {container['name']} has no command, and local mode has no image to take one from")
    mounts = _mounts(container, place.folders)
    env = _environment(pod, container, place, mounts, find)
    words = [*container["command"], *container.get("args", ())]
    workdir = container.get("workingDir")
    full = {**place.base_env, **env}
    full["CUDA_VISIBLE_DEVICES"] = ",".join(place.devices)
    full["BANYAN_TERMINATION_LOG"] = str(place.termination_log)
    return Command(
        argv=tuple(expand(word, env) for word in words),
        env=full,
        workdir=_real_path(workdir, mounts) if workdir else None,
    )


def expand(text: str, env: Mapping[str, str]) -> str:
    """$(NAME) → its value, $$ → $; an unknown name stays as it is written."""

    def value(match: re.Match[str]) -> str:
        if match[1] == "$":
            return "$"
        return env.get(match[2], match[0])

    return _REFERENCE.sub(value, text)


Mounts = list[tuple[str, Path]]


def _mounts(container: Manifest, folders: Mapping[str, Path]) -> Mounts:
    """Mount path and folder, the longest path first. Shared memory is where it is everywhere."""
    found = [
        (mount["mountPath"].rstrip("/"), folders[mount["name"]] / mount.get("subPath", ""))
        for mount in container.get("volumeMounts", ())
        if mount["mountPath"] != SHARED_MEMORY
    ]
    return sorted(found, key=lambda pair: len(pair[0]), reverse=True)


def _real_path(value: str, mounts: Mounts) -> str:
    for path, folder in mounts:
        if value == path or value.startswith(path + "/"):
            return str(folder / PurePosixPath(value[len(path) :].lstrip("/"))) + ("/" if value.endswith("/") else "")
    return value


def _environment(pod: Manifest, container: Manifest, place: Place, mounts: Mounts, find: Find) -> dict[str, str]:
    env: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        env |= _env_from(source, find)
    for variable in container.get("env", ()):
        name = variable["name"]
        if "valueFrom" in variable:
            value = _value_from(pod, container, variable["valueFrom"], find)
            if value is not None:
                env[name] = value
        else:
            env[name] = expand(_here(name, str(variable.get("value", "")), place.ports, mounts), env)
    return env


def _here(name: str, value: str, ports: Mapping[int, int], mounts: Mounts) -> str:
    """A literal value as it must be on this machine: own address, free port, real folder."""
    if name.endswith("_HOST") and value in _EVERYWHERE:
        return HOST
    if name.endswith("_PORT") and value.isdigit() and int(value) in ports:
        return str(ports[int(value)])
    url = _LOCAL_URL.match(value)
    if url and int(url[2]) in ports:
        return f"{url[1]}:{ports[int(url[2])]}{value[url.end() :]}"
    return _real_path(value, mounts)


def _env_from(source: Manifest, find: Find) -> dict[str, str]:
    kind, field = ("Secret", "secretRef") if "secretRef" in source else ("ConfigMap", "configMapRef")
    ref = source[field]
    keys = keys_of(kind, ref["name"], find, optional=bool(ref.get("optional")))
    return {source.get("prefix", "") + key: _text(kind, ref["name"], key, value) for key, value in keys.items()}


def _text(kind: str, name: str, key: str, value: bytes) -> str:
    """A value of a Secret or ConfigMap that is to be a variable."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise Missing(f'{kind.lower()} "{name}": the value of {key} is not UTF-8, so it cannot be a variable; write it as text') from None


def _value_from(pod: Manifest, container: Manifest, source: Mapping[str, Any], find: Find) -> str | None:
    if "fieldRef" in source:
        return _field(pod, source["fieldRef"]["fieldPath"])
    for kind, field in (("Secret", "secretKeyRef"), ("ConfigMap", "configMapKeyRef")):
        if field in source:
            ref, optional = source[field], bool(source[field].get("optional"))
            keys = keys_of(kind, ref["name"], find, optional=optional)
            if ref["key"] in keys:
                return _text(kind, ref["name"], ref["key"], keys[ref["key"]])
            if optional:
                return None
            raise Missing(f"couldn't find key {ref['key']} in {kind} {ref['name']}")
    raise Missing(f"container {container['name']}: local mode cannot fill in {', '.join(source)}")


def _field(pod: Manifest, path: str) -> str:
    metadata = pod["metadata"]
    if path in ("metadata.name", "metadata.namespace", "metadata.uid"):
        return str(metadata[path.removeprefix("metadata.")])
    if path in ("status.podIP", "status.hostIP"):
        return HOST
    if path in ("spec.nodeName", "spec.serviceAccountName"):
        return str(pod["spec"].get(path.removeprefix("spec."), "local"))
    for group in ("labels", "annotations"):
        prefix = f"metadata.{group}['"
        if path.startswith(prefix):
            return str(metadata.get(group, {}).get(path.removeprefix(prefix).removesuffix("']"), ""))
    raise Missing(f"local mode cannot fill in fieldRef {path}")


def _containers(pod: Manifest) -> Iterable[Manifest]:
    return (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"])

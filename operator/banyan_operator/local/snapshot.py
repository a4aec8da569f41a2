"""status.json: what a running local mode shows of itself, for `banyan-operator status`, for scripts, and for the screen."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from banyan_operator.kube.objects import condition, key_of
from banyan_operator.local.errors import LocalError, NotRunningError, StateError
from banyan_operator.plan import Manifest

State = Literal["running", "stopping", "stopped"]

FILE = "status.json"
LOCK = "lock"
FINISHED = ("Succeeded", "Failed", "Cancelled", "Expired")
"""Phases of a BatchJob that are its last."""
_SHOWN = 200  # characters of what is wrong with it, which may be all of it
_REMEDY = "restore it; or start with --fresh, or delete it, and which BatchJobs ran is forgotten"


@dataclass(frozen=True, slots=True)
class PodLine:
    name: str
    phase: str
    ready: bool
    restarts: int
    logs: str  # folder with a file for each container


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything at one moment."""

    state: State
    pid: int
    version: str
    resources: tuple[Manifest, ...]  # as `kubectl get -o json` shows them
    pods: tuple[PodLine, ...]
    loading: Mapping[str, Mapping[str, Any]]  # 'Kind/name' of what starts a server → the body of its /readyz

    def write(self, folder: Path) -> None:
        """Into status.json, in one piece: a reader never sees half of it, nor does the next start after a power cut. Waits for the disk.

        Raises OSError where the folder cannot be written.
        """
        new = folder / f".{FILE}.new"
        with new.open("w") as file:
            file.write(json.dumps(asdict(self), indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        new.replace(folder / FILE)
        with contextlib.suppress(OSError):  # it is written; some volumes cannot be asked for more
            _sync_folder(folder)

    @staticmethod
    def read(folder: Path) -> Snapshot:
        """The last one written. Raises NotRunningError where there is none, StateError for one that cannot be read: what ran must not
        be taken for new."""
        try:
            found = json.loads((folder / FILE).read_text())
            known = {each.name for each in fields(PodLine)}  # a later version may show more
            snapshot = Snapshot(
                state=found["state"],
                pid=found["pid"],
                version=found["version"],
                resources=tuple(found["resources"]),
                pods=tuple(PodLine(**{name: value for name, value in pod.items() if name in known}) for pod in found["pods"]),
                loading=found["loading"],
            )
            for resource in snapshot.resources:
                _check(resource)
        except (FileNotFoundError, NotADirectoryError):
            raise NotRunningError(f"{folder}: nothing runs there; start it with 'banyan-operator local -f DIR'") from None
        except OSError as error:
            raise StateError(f"{folder / FILE} cannot be read: {error.strerror}; {_REMEDY}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StateError(f"{folder / FILE} is not what this version writes ({repr(error)[:_SHOWN]}); {_REMEDY}") from None
        if snapshot.state != "stopped" and owner(folder) != snapshot.pid:  # it was killed before it could say so
            return Snapshot(**{**{name: getattr(snapshot, name) for name in Snapshot.__slots__}, "state": "stopped"})
        return snapshot

    def of_kind(self, kind: str) -> list[Manifest]:
        return [resource for resource in self.resources if resource["kind"] == kind]


def _check(resource: Manifest) -> None:
    """Raises one of what `Snapshot.read` takes for damage where it has not the form of a Kubernetes object."""
    key_of(resource)
    if not isinstance(resource["metadata"]["uid"], str) or not isinstance(resource["spec"], dict):
        raise TypeError(f"metadata.uid or spec of {key_of(resource)}")
    status = resource.get("status", {})
    if not isinstance(status, dict) or not all(isinstance(one, dict) for one in status.get("conditions", [])):
        raise TypeError(f"status of {key_of(resource)}")


def _sync_folder(folder: Path) -> None:
    """Make a rename durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def phase(resource: Manifest) -> str:
    return str(resource.get("status", {}).get("phase", "Pending"))


def reason(resource: Manifest) -> str:
    """Why a resource is not as it should be, in the words of its conditions."""
    if resource["kind"] == "InferenceServer":
        order = [("Accepted", "False"), ("Ready", "False"), ("Ready", "Unknown")]
    else:
        order = [
            ("Failed", "True"),
            ("Accepted", "False"),
            ("Complete", "True"),
            ("Cancelled", "True"),
            ("Expired", "True"),
            ("Running", "False"),
            ("Running", "Unknown"),
        ]
    for kind, status in order:
        found = condition(resource, kind)
        if found.get("status") == status:
            return f"{found['reason']}: {found['message']}" if found["message"] else str(found["reason"])
    return ""


# --- state folders ---


def state_folder(manifests: Path) -> Path:
    """Where local mode keeps its state for these manifests unless it is told: a folder of their own for each checkout."""
    path = manifests.resolve()
    name = path.name if path.is_dir() else path.stem
    return state_home() / f"{name}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:8]}"


def state_home() -> Path:
    """Where the state folders of this user lie."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else home("choose the folder with --state-dir") / ".local" / "state") / "banyan"


def home(instead: str) -> Path:
    """The user's home. Raises StateError where there is none: a user whom the system does not know, as containers have, without HOME.

    `instead`: what helps besides setting it.
    """
    try:
        return Path.home()
    except RuntimeError:
        raise StateError(f"user {os.getuid()} has no home folder: HOME is not set; set it, or {instead}") from None


def only_running() -> Path:
    """The state folder of the one local mode that runs. Raises NotRunningError for none, LocalError for several."""
    found = [folder.parent for folder in sorted(state_home().glob(f"*/{LOCK}")) if owner(folder.parent) is not None]
    if not found:
        raise NotRunningError("no local mode runs; start it with 'banyan-operator local -f DIR', or name its folder with --state-dir")
    if len(found) > 1:
        raise LocalError("several run; choose one with --state-dir: " + ", ".join(map(str, found)))
    return found[0]


def owner(folder: Path) -> int | None:
    """The process id of the operator that works in `folder`, if one does. Raises StateError where that cannot be seen."""
    try:
        with (folder / LOCK).open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(file.read() or 0)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise StateError(f"{folder / LOCK} cannot be read: {error.strerror}") from None
    return None

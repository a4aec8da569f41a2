"""The state folder: its lock, and status.json, which a running local mode shows of itself to `banyan-operator status` and to scripts."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, Final, Literal

from banyan_operator.kube.kinds import Manifest
from banyan_operator.kube.objects import key_of
from banyan_operator.local.errors import BusyError, LocalError, NotRunningError, StateError

State = Literal["running", "stopping", "stopped"]

FILE: Final = "status.json"
LOCK: Final = "lock"
CLEARED: Final = ("pods", "logs")  # what an earlier operator left
LOOK_S: Final = 0.5
"""How long the lock of a state folder may be held by a `status` that looks whether somebody works there."""
_SHOWN: Final = 200  # characters of what is wrong with status.json, which may be all of it
_REMEDY: Final = "restore it; or start with --fresh, or delete it, and which BatchJobs ran is forgotten"
_ELSEWHERE: Final = "choose another folder with --state-dir"


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
    loading: Mapping[str, Mapping[str, Any]]  # 'kind/name' of what starts a server → the body of its /readyz

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
            snapshot = Snapshot(**{**found, "resources": tuple(found["resources"]), "pods": tuple(PodLine(**pod) for pod in found["pods"])})
            for resource in snapshot.resources:
                _check(resource)
        except (FileNotFoundError, NotADirectoryError):
            raise NotRunningError(f"{folder}: nothing runs there; start it with 'banyan-operator local -f DIR'") from None
        except OSError as error:
            raise StateError(f"{folder / FILE} cannot be read: {error.strerror}; {_REMEDY}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StateError(f"{folder / FILE} is not what this version writes ({repr(error)[:_SHOWN]}); {_REMEDY}") from None
        if snapshot.state != "stopped" and owner(folder) != snapshot.pid:  # it was killed before it could say so
            return replace(snapshot, state="stopped")
        return snapshot


def _check(resource: Manifest) -> None:
    """Raises one of what `Snapshot.read` takes for damage where it has not the form of a Kubernetes object."""
    status = resource.get("status", {})
    conditions = status.get("conditions", [])
    texts = (key_of(resource).name, resource["metadata"]["uid"])
    if not all(isinstance(one, str) for one in texts) or not all(isinstance(one, dict) for one in (resource["spec"], *conditions)):
        raise TypeError(f"metadata.uid, spec or status of {key_of(resource)}")


def _sync_folder(folder: Path) -> None:
    """Make a rename durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
    """The user's home. Raises StateError for a user whom the system does not know, as containers have, without HOME.

    `instead`: what helps besides setting it.
    """
    try:
        return Path.home()
    except RuntimeError:
        raise StateError(f"user {os.getuid()} has no home folder: HOME is not set; set it, or {instead}") from None


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Hold `folder` for this operator alone, and clear away what the last one left.

    Raises BusyError when somebody else has it, StateError when it cannot be written.
    """
    with contextlib.ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            left = next((name for name in CLEARED if (folder / name).exists()), None)
            if left is not None and not (folder / LOCK).exists():
                raise StateError(f"{folder} holds '{left}', which local mode did not make and would clear away; {_ELSEWHERE}")
            lock = held.enter_context((folder / LOCK).open("a+"))
            _lock(lock)
            os.ftruncate(lock.fileno(), 0)
            os.write(lock.fileno(), str(os.getpid()).encode())  # past the buffer, which would be written again when it is closed
        except BlockingIOError:
            lock.seek(0)
            raise BusyError(f"{folder} is in use by process {lock.read() or 'unknown'}; stop that one, or {_ELSEWHERE}") from None
        except OSError as error:
            raise StateError(f"{folder} cannot be used: {error.strerror}; {_ELSEWHERE}") from None
        for name in CLEARED:
            shutil.rmtree(folder / name, ignore_errors=True)
        yield


def _lock(file: IO[str]) -> None:
    """Lock for this process alone. Raises BlockingIOError when an operator has it; who only looks has it for an instant."""
    deadline = time.monotonic() + LOOK_S
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(LOOK_S / 10)


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
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return int((folder / LOCK).read_text() or 0)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise StateError(f"{folder / LOCK} cannot be read: {error.strerror}") from None
    return None

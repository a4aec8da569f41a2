"""`banyan-operator local`: the parts of local mode put together, and the loop that runs them."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from banyan_operator import __version__, api
from banyan_operator.api import KINDS
from banyan_operator.desired.names import Names
from banyan_operator.kube.objects import Key, is_true, key_of
from banyan_operator.local.accelerators import Accelerators, find_devices
from banyan_operator.local.asking import Asking
from banyan_operator.local.clock import SteadyClock
from banyan_operator.local.errors import BusyError, LocalError, NotRunningError, StateError
from banyan_operator.local.kubelet import Kubelet, Machine
from banyan_operator.local.manifests import Contents, Manifests, check_change
from banyan_operator.local.objects import Objects
from banyan_operator.local.ports import Ports
from banyan_operator.local.prospect import all_done
from banyan_operator.local.snapshot import FINISHED, LOCK, PodLine, Snapshot, State, home, phase, state_folder
from banyan_operator.local.view import View, label, label_of
from banyan_operator.local.volumes import Volumes, claims_of
from banyan_operator.local.world import LocalWorld
from banyan_operator.plan import Manifest, Settings
from banyan_operator.times import seconds

TURN_S = 1.0
"""A turn comes at least this often: retries of Jobs fall due, files change, and nobody says so."""
INTERRUPTED = 130
LOOK_S = 0.5
"""How long the lock of a state folder may be held by a `status` that looks whether somebody works there."""
CLEARED = ("pods", "logs")
"""What an earlier operator left in the state folder."""


@dataclass(frozen=True, slots=True)
class Options:
    """The command line of `local`."""

    manifests: Sequence[Path]
    state_dir: Path | None = None
    volumes: Mapping[str, Path] = field(default_factory=dict)
    secrets: Mapping[str, Path] = field(default_factory=dict)
    until_done: bool = False
    fresh: bool = False

    def folder(self) -> Path:
        """The state folder: the one given, or one of the first manifest's folder."""
        return self.state_dir.resolve() if self.state_dir is not None else state_folder(self.manifests[0])


def run(options: Options, view: View) -> int:
    """Run until stopped (exit code 0), or with `until_done` until all is done (0) or something failed (1); stopped before, 130.

    Raises LocalError for what the user has to put right.
    """
    manifests = Manifests(options.manifests, options.secrets)
    contents = manifests.read()
    folder = options.folder()
    with _claimed(folder), view:
        return asyncio.run(LocalMode(options, folder, manifests, contents, view).run())


@contextlib.contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    """Hold `folder` for this operator alone, and clear away what the last one left.

    Raises BusyError when somebody else has it, StateError when it cannot be written.
    """
    with contextlib.ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _check_ours(folder)
            lock = held.enter_context((folder / LOCK).open("a+"))
            _lock(lock)
            os.ftruncate(lock.fileno(), 0)
            os.write(lock.fileno(), str(os.getpid()).encode())  # past the buffer, which would be written again when it is closed
        except BlockingIOError:
            lock.seek(0)
            owner = lock.read().strip() or "unknown"
            raise BusyError(f"{folder} is in use by process {owner}; stop that one, or choose another folder with --state-dir") from None
        except OSError as error:
            raise StateError(f"{folder} cannot be used: {error.strerror}; choose another folder with --state-dir") from None
        for left in CLEARED:
            shutil.rmtree(folder / left, ignore_errors=True)
        yield


def _check_ours(folder: Path) -> None:
    """Raise StateError where what we would clear away was made by somebody else."""
    if (folder / LOCK).exists():
        return
    for name in CLEARED:
        if (folder / name).exists():
            raise StateError(
                f"{folder} holds '{name}', which local mode did not make and would clear away; choose another folder with --state-dir"
            )


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


class LocalMode:
    """One run of local mode."""

    def __init__(self, options: Options, folder: Path, manifests: Manifests, contents: Contents, view: View) -> None:
        self._options = options
        self._folder = folder
        self._manifests = manifests
        self._view = view
        self._woken = asyncio.Event()
        self._stops = 0  # signals received
        self._applied: dict[Key, Manifest] = {}
        self._contents = contents
        self._refused: frozenset[str] = frozenset()  # what was said of edits that are not applied
        self._written: Snapshot | None = None
        self._unwritten = ""  # why status.json could not be written
        clock = self._clock = SteadyClock()
        self._objects = Objects(clock)
        ports = Ports()
        self._volumes = Volumes(folder, _cache_folder(), options.volumes, lambda: manifests.folders)
        machine = Machine(
            volumes=self._volumes,
            accelerators=Accelerators(find_devices()),
            ports=ports,
            logs=folder / "logs",
        )
        self._kubelet = Kubelet(self._objects, machine, clock, self._woken.set, view.say)
        self._asking = Asking(clock, self._woken.set)
        settings = Settings(runtime_image="local", operator_version=__version__, platform="local")
        self._world = LocalWorld(self._objects, self._kubelet, self._asking, ports, settings, folder.name, clock, view.say)
        if not options.fresh:
            self._remember_jobs(contents)
        self._manifests.changed()
        self._apply(contents)

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        self._view.say(f"state and logs: {self._folder}")
        self._say_claims()
        code = INTERRUPTED if self._options.until_done else 0
        try:
            while not (self._stops or self._view.gone):
                self._reread()
                due = await self._world.turn()
                await self._publish("running")
                if self._options.until_done and (prospect := all_done(self._world.resources())).over:
                    for problem in prospect.problems:
                        self._view.say(problem)
                    code = 1 if prospect.problems else 0
                    break
                await self._sleep(due)
            self._view.say("stopping; once more Ctrl-C kills")
            await self._wind_down()
        finally:
            await self._world.close()
            await self._kubelet.close()
            await self._asking.close()
            await self._publish("stopped")
        return code

    def _stop(self) -> None:
        self._stops += 1
        self._woken.set()

    async def _sleep(self, due: float | None) -> None:
        wait = TURN_S if due is None else min(TURN_S, max(0.0, due - self._clock()))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait):
                await self._woken.wait()
        self._woken.clear()

    async def _wind_down(self) -> None:
        """Give every pod its grace to end; a second signal ends that."""
        self._kubelet.pre_stop = False
        self._stops = min(self._stops, 1)
        while True:
            due = await self._world.wind_down()
            await self._publish("stopping")
            if self._kubelet.idle:
                return
            if self._stops > 1:
                self._kubelet.kill_all()
            await self._sleep(due)

    # --- manifests ---

    def _say_claims(self) -> None:
        """Where claims lead, since nothing else tells that from a misspelt --volume."""
        resources = [manifest for key, manifest in self._applied.items() if key.kind in KINDS]
        spoken_of = sorted({claim for one in resources for claim in claims_of(one, Names.of(api.parse(one)).cache_claim)})
        for claim in spoken_of:
            self._view.say(f"pvc://{claim} is {self._volumes.where(claim)}")
        for claim in sorted(self._options.volumes.keys() - set(spoken_of)):
            named = f"they name {', '.join(spoken_of)}" if spoken_of else "they name none"
            self._view.say(f"--volume {claim}: the manifests name no claim '{claim}'; {named}")

    def _reread(self) -> None:
        """Take edits of the files over. What is wrong holds back nothing but itself, and is spoken of once."""
        if not self._manifests.changed():
            return
        try:
            self._apply(self._manifests.read(self._contents))
        except LocalError as error:
            self._tell_refused([str(error)])
        self._kubelet.refresh_files()

    def _apply(self, contents: Contents) -> None:
        objects, refused = dict(contents.objects), list(contents.refused)
        for key, manifest in contents.objects.items():
            old = self._applied.get(key)
            if old is not None and old != manifest and key.kind in KINDS:
                try:
                    check_change(manifest, old)
                except LocalError as error:
                    refused.append(str(error))
                    objects[key] = old
        for key in sorted(self._applied.keys() - objects.keys(), key=str):
            if key.kind in KINDS:
                self._view.say(f"{label_of(key)} is no longer in the manifests: it is stopped")
            self._objects.delete(key)
        for key, manifest in objects.items():
            if self._applied.get(key) != manifest:
                self._objects.apply(manifest)
        for what in contents.ignored:
            self._view.say(f"{what}: local mode has no use for it")
        self._applied = objects
        self._contents = replace(contents, objects=objects)
        self._tell_refused(refused)

    def _tell_refused(self, refused: Sequence[str]) -> None:
        for text in refused:
            if text not in self._refused:
                self._view.say(f"not applied, it stays as it was: {text}")
        self._refused = frozenset(refused)

    def _remember_jobs(self, contents: Contents) -> None:
        """A BatchJob is the same over a restart, as it is in a cluster: one that has ended stays ended, and one that was at work goes on
        where it was. What its manifest says by now is an edit like any other.

        Raises StateError where nobody can tell what ran.
        """
        try:
            before = Snapshot.read(self._folder).resources
        except NotRunningError:
            return
        for job in before:
            if job["kind"] != "BatchJob" or key_of(job) not in contents.objects or not job.get("status"):
                continue
            status = job["status"]
            if phase(job) in FINISHED:
                self._view.say(f"{label(job)} has ended {_ago(job)}; start with --fresh to run it again")
            else:
                status = {name: value for name, value in status.items() if name != "jobs"}  # they went with their processes
            self._applied[key_of(job)] = self._objects.restore({**job, "status": status})

    # --- what is shown ---

    async def _publish(self, state: State) -> None:
        loading = {label(resource): body for resource in self._world.resources() if (body := self._world.readyz(resource))}
        snapshot = Snapshot(
            state=state,
            pid=os.getpid(),
            version=__version__,
            resources=tuple(self._world.resources()),
            pods=tuple(self._pod_line(pod) for pod in self._objects.of_kind("Pod")),
            loading=loading,
        )
        if snapshot != self._written:
            await self._write(snapshot)
        self._view.show(snapshot)

    async def _write(self, snapshot: Snapshot) -> None:
        """A status that cannot be written ends no server: it is said once, and written as soon as that works again."""
        try:
            await asyncio.to_thread(snapshot.write, self._folder)  # meanwhile requests go through the proxies, however slow the disk
        except OSError as error:
            if self._unwritten != str(error):
                self._view.say(f"the status cannot be written, 'banyan-operator status' shows an old one: {error}")
            self._written, self._unwritten = None, str(error)
        else:
            self._written, self._unwritten = snapshot, ""

    def _pod_line(self, pod: Manifest) -> PodLine:
        status = pod.get("status", {})
        statuses = (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ()))
        return PodLine(
            name=pod["metadata"]["name"],
            phase="Terminating" if "deletionTimestamp" in pod["metadata"] else status.get("phase", "Pending"),
            ready=is_true(pod, "Ready"),
            restarts=sum(one["restartCount"] for one in statuses),
            logs=str(self._folder / "logs" / pod["metadata"]["name"]),
        )


def _ago(job: Manifest) -> str:
    ended = job["status"].get("completionTime")
    return f"{int((time.time() - seconds(ended)) / 60)} minutes ago" if ended else "before"


def _cache_folder() -> Path:
    """The user's cache, the same that `banyan-runtime models fetch` fills."""
    cache = os.environ.get("BANYAN_CACHE")
    return Path(cache) if cache else home("set BANYAN_CACHE to a folder for models") / ".cache" / "banyan"

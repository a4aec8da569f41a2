"""`banyan-operator local`: reads the manifests, gives each resource a runner, and lets them work until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp

from banyan_operator import __version__, api
from banyan_operator.api import KINDS
from banyan_operator.desired.names import Names
from banyan_operator.kube.addresses import SERVICE_PORT
from banyan_operator.kube.kinds import Manifest
from banyan_operator.kube.objects import Key, key_of
from banyan_operator.local.accelerators import Accelerators, find_devices
from banyan_operator.local.batch_runner import BatchRunner
from banyan_operator.local.errors import LocalError, NotRunningError
from banyan_operator.local.manifests import Contents, Manifests, check_change
from banyan_operator.local.pod import Machine, Pod
from banyan_operator.local.ports import Ports
from banyan_operator.local.prospect import all_done
from banyan_operator.local.proxy import Proxy
from banyan_operator.local.runner import Runner
from banyan_operator.local.server_runner import ServerRunner
from banyan_operator.local.state import PodLine, Snapshot, State, claimed, home, state_folder
from banyan_operator.local.status import has_ended, label, label_of
from banyan_operator.local.view import View
from banyan_operator.local.volumes import Volumes, claims_of
from banyan_operator.times import seconds, stamp

TURN_S: Final = 1.0
"""Longest time between two turns. Nothing signals a retry that is due, a changed file, or a worker's progress."""
INTERRUPTED: Final = 130
GIVE_UP_S: Final = 10.0  # a process that was killed is gone in milliseconds, unless it waits for a disk that does not answer
_GIVEN: Final = ("uid", "generation", "creationTimestamp")


@dataclass(frozen=True, slots=True)
class Options:
    """The command line of `local`."""

    manifests: Sequence[Path]
    state_dir: Path | None = None
    volumes: Mapping[str, Path] = field(default_factory=dict)
    secrets: Mapping[str, Path] = field(default_factory=dict)
    until_done: bool = False
    fresh: bool = False


def run(options: Options, view: View) -> int:
    """Run until stopped (exit code 0), or with `until_done` until all is done (0) or something failed (1); stopped before, 130.

    Raises LocalError for what the user has to put right.
    """
    manifests = Manifests(options.manifests, options.secrets)
    contents = manifests.read()
    folder = options.state_dir.resolve() if options.state_dir is not None else state_folder(options.manifests[0])
    with claimed(folder), view:
        return asyncio.run(_run(options, folder, manifests, contents, view))


async def _run(options: Options, folder: Path, manifests: Manifests, contents: Contents, view: View) -> int:
    connector = aiohttp.TCPConnector(force_close=True, ssl=False)
    async with aiohttp.ClientSession(connector=connector) as http:
        return await LocalMode(options, folder, manifests, contents, view, http).run()


class LocalMode:
    """One run of local mode."""

    def __init__(
        self, options: Options, folder: Path, manifests: Manifests, contents: Contents, view: View, http: aiohttp.ClientSession
    ) -> None:
        """Raises StateError where nobody can tell which BatchJobs ran."""
        self._options = options
        self._folder = folder
        self._manifests = manifests
        self._view = view
        self._woken = asyncio.Event()
        self._stops = 0  # signals received
        self._contents = contents
        self._objects: dict[Key, Manifest] = {}  # as they are carried out
        self._runners: dict[Key, Runner] = {}
        self._leaving: list[Runner] = []
        self._refused: frozenset[str] = frozenset()  # what was said of edits that are not applied
        self._not_here: set[str] = set()
        self._written: Snapshot | None = None
        self._unwritten = ""  # why status.json could not be written
        self._machine = Machine(
            volumes=Volumes(folder, _cache_folder(), options.volumes, lambda: manifests.folders),
            accelerators=Accelerators(find_devices()),
            ports=Ports(),
            http=http,
            logs=folder / "logs",
            find=lambda key: self._objects.get(key, {}).get("data"),
            say=view.say,
            changed=self._woken.set,
        )
        self._before = {} if options.fresh else self._batches_before(contents)
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
                await self._turn()
                await self._publish("running")
                if self._options.until_done and (prospect := all_done(self._resources())).over:
                    for problem in prospect.problems:
                        self._view.say(problem)
                    code = 1 if prospect.problems else 0
                    break
                await self._sleep()
            self._view.say("stopping; once more Ctrl-C kills")
            await self._wind_down()
        finally:
            await self._kill_all()
            await self._publish("stopped")
        return code

    def _stop(self) -> None:
        self._stops += 1
        self._woken.set()

    async def _sleep(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TURN_S):
                await self._woken.wait()
        self._woken.clear()

    async def _turn(self) -> None:
        """Let every runner do what is due. One of a name that was there before waits until that one is gone."""
        gone = {runner.key for runner in self._leaving}
        for key, manifest in self._objects.items():
            if key.kind in KINDS and key not in self._runners and key not in gone:
                self._runners[key] = await self._runner(manifest)
        for runner in (*self._runners.values(), *self._leaving):
            runner.turn()
        for runner in [one for one in self._leaving if not one.pods]:
            await runner.close()
            self._leaving.remove(runner)
        batches = [runner for runner in self._runners.values() if isinstance(runner, BatchRunner)]
        await asyncio.gather(*(runner.ask_progress(self._machine.http) for runner in batches))
        for runner in sorted(self._runners.values(), key=lambda one: isinstance(one, BatchRunner)):
            runner.fill_status()

    async def _runner(self, manifest: Manifest) -> Runner:
        key = key_of(manifest)
        resource = self._before.pop(key, None) or _with(
            manifest, {"uid": str(uuid.uuid4()), "generation": 1, "creationTimestamp": stamp(time.time())}
        )
        if key.kind == "BatchJob":
            return BatchRunner(resource, self._machine, self._server)
        port = (manifest["spec"].get("service") or {}).get("port", SERVICE_PORT)
        listener = self._machine.ports.listen(f"{self._folder.name}/{key.namespace}/{key.name}:{port}")
        proxy = Proxy(key.name, listener)
        await proxy.start()
        return ServerRunner(resource, self._machine, proxy)

    def _server(self, key: Key) -> ServerRunner | None:
        runner = self._runners.get(key)
        return runner if isinstance(runner, ServerRunner) else None

    async def _wind_down(self) -> None:
        """Give every pod its grace to end; a second signal ends that."""
        self._stops = min(self._stops, 1)
        for runner in self._runners.values():
            runner.leave()
        while any(runner.pods for runner in self._all()):
            for runner in self._all():
                runner.turn()
            await self._publish("stopping")
            if self._stops > 1:
                for pod in self._pods():
                    pod.kill()
            await self._sleep()

    async def _kill_all(self) -> None:
        """What the kernel itself holds on to is given up."""
        deadline = time.monotonic() + GIVE_UP_S
        while (left := [pod for pod in self._pods() if not pod.over]) and time.monotonic() < deadline:
            for pod in left:
                pod.kill()
            await asyncio.sleep(0.05)
        for runner in self._all():
            await runner.close()

    def _all(self) -> list[Runner]:
        return [*self._runners.values(), *self._leaving]

    def _pods(self) -> list[Pod]:
        return [pod for runner in self._all() for pod in runner.pods]

    # --- manifests ---

    def _say_claims(self) -> None:
        """Where claims lead, since nothing else tells that from a misspelt --volume."""
        resources = [manifest for key, manifest in self._objects.items() if key.kind in KINDS]
        spoken_of = sorted({claim for one in resources for claim in claims_of(one, Names.of(api.parse(one)).cache_claim)})
        for claim in spoken_of:
            self._view.say(f"pvc://{claim} is {self._machine.volumes.where(claim)}")
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
        for pod in self._pods():
            pod.refresh()

    def _apply(self, contents: Contents) -> None:
        objects, refused = contents.objects, list(contents.refused)
        for key, manifest in list(objects.items()):
            runner = self._runners.get(key)
            live = runner.resource if runner else self._before.get(key)
            if live is None or key.kind not in KINDS or (old := _applied(live)) == manifest:
                continue
            try:
                check_change(manifest, old)
            except LocalError as error:
                refused.append(str(error))
                objects[key] = old
                continue
            edited = _edited(live, manifest)
            if runner:
                runner.update(edited)
            else:
                self._before[key] = edited
        for key in sorted(self._runners.keys() - objects.keys(), key=str):
            self._view.say(f"{label_of(key)} is no longer in the manifests: it is stopped")
            self._leaving.append(self._runners.pop(key))
            self._leaving[-1].leave()
        for what in contents.ignored:
            self._view.say(f"{what}: local mode has no use for it")
        self._contents, self._objects = contents, objects
        for line in sorted({line for one in objects.values() for line in _without_effect(one)} - self._not_here):
            self._view.say(f"local mode: {line}")
            self._not_here.add(line)
        self._tell_refused(refused)

    def _tell_refused(self, refused: Sequence[str]) -> None:
        for text in refused:
            if text not in self._refused:
                self._view.say(f"not applied, it stays as it was: {text}")
        self._refused = frozenset(refused)

    def _batches_before(self, contents: Contents) -> dict[Key, Manifest]:
        """BatchJobs of an earlier run: one that has ended stays ended, and one that was at work goes on where it was. What its
        manifest says by now is an edit like any other."""
        try:
            found = Snapshot.read(self._folder).resources
        except NotRunningError:
            return {}
        before = [one for one in found if one["kind"] == "BatchJob" and key_of(one) in contents.objects and one.get("status")]
        for job in filter(has_ended, before):
            self._view.say(f"{label(job)} has ended {_ago(job)}; start with --fresh to run it again")
        return {key_of(job): job for job in before}

    # --- what is shown ---

    def _resources(self) -> list[Manifest]:
        """Servers first, then what needs them."""
        known = [runner.resource for runner in self._runners.values()]
        return [one for kind in KINDS for one in known if one["kind"] == kind]

    async def _publish(self, state: State) -> None:
        loading = {label(runner.resource): body for runner in self._runners.values() if (body := runner.readyz)}
        pods = tuple(_pod_line(pod, self._machine.logs) for pod in self._pods())
        snapshot = Snapshot(state, os.getpid(), __version__, tuple(self._resources()), pods, loading)
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


def _with(manifest: Manifest, given: Mapping[str, Any]) -> Manifest:
    return {**manifest, "metadata": {**manifest["metadata"], **given}}


def _edited(live: Manifest, manifest: Manifest) -> Manifest:
    """`manifest` as what `live` becomes by it."""
    generation = live["metadata"]["generation"] + (manifest["spec"] != live["spec"])
    edited = _with(manifest, {**{name: live["metadata"][name] for name in _GIVEN}, "generation": generation})
    return {**edited, "status": live["status"]} if "status" in live else edited


def _applied(live: Manifest) -> Manifest:
    """The manifest that a resource was made of last."""
    metadata = {name: value for name, value in live["metadata"].items() if name not in _GIVEN}
    return {name: value for name, value in live.items() if name != "status"} | {"metadata": metadata}


def _without_effect(manifest: Manifest) -> Iterator[str]:
    """What a cluster would enforce and this machine does not."""
    spec = manifest.get("spec") or {}
    own = spec.get("server") or {}
    for part in (spec, own):
        if (part.get("resources") or {}).get("limits"):
            yield "resources.limits of cpu and memory are not enforced"
        for name in ("nodeSelector", "affinity"):
            if name in (part.get("scheduling") or {}):
                yield f"{name} has no effect"


def _pod_line(pod: Pod, logs: Path) -> PodLine:
    return PodLine(
        name=pod.name,
        phase="Terminating" if pod.stopping else pod.phase,
        ready=pod.ready,
        restarts=sum(one.restarts for one in pod.containers),
        logs=str(logs / pod.name),
    )


def _ago(job: Manifest) -> str:
    ended = job["status"].get("completionTime")
    return f"{int((time.time() - seconds(ended)) / 60)} minutes ago" if ended else "before"


def _cache_folder() -> Path:
    """The user's cache, the same that `banyan-runtime models fetch` fills."""
    cache = os.environ.get("BANYAN_CACHE")
    return Path(cache) if cache else home("set BANYAN_CACHE to a folder for models") / ".cache" / "banyan"

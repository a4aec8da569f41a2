"""Carries out what the pods want: starts and stops processes, asks probes, and writes what became of them into the store."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from banyan_operator.kube.objects import Key, key_of
from banyan_operator.local import environment, podlife, probes, translate
from banyan_operator.local.accelerators import Accelerators
from banyan_operator.local.objects import Objects
from banyan_operator.local.ports import Ports
from banyan_operator.local.process import KILL_S, Process
from banyan_operator.local.termination import Termination
from banyan_operator.local.translate import Place
from banyan_operator.local.volumes import Find, Missing, Volumes
from banyan_operator.plan import Manifest

LOG_TAIL_BYTES = 2048
"""What the kubelet keeps of the log where a container left no message."""
START_ERROR = 128
GIVE_UP_S = KILL_S + 8.0  # a process that was killed is gone in milliseconds, unless it waits for a disk that does not answer


@dataclass(slots=True)
class Running:
    """A pod with its processes and what it holds of this machine."""

    manifest: Manifest
    pod: podlife.Pod
    ports: dict[int, int]
    processes: dict[str, Process] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Machine:
    """What pods are given a part of."""

    volumes: Volumes
    accelerators: Accelerators
    ports: Ports
    logs: Path


class Kubelet:
    """All pods of this machine. `turn` is called when something changed and when the time that it returned has come."""

    def __init__(
        self, objects: Objects, machine: Machine, clock: Callable[[], float], wake: Callable[[], None], say: Callable[[str], None]
    ) -> None:
        """`wake`: called when a turn is due because of news. `say`: called with a line for the person at the screen."""
        self._objects = objects
        self._machine = machine
        self._clock = clock
        self._wake = wake
        self._say = say
        self._running: dict[str, Running] = {}
        self._lives: set[asyncio.Task[None]] = set()  # of containers
        self._checks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._session: aiohttp.ClientSession | None = None
        self._bug: BaseException | None = None
        self.pre_stop = True
        """Whether preStop waits are kept; not when everything stops and nobody sends requests any more."""

    @property
    def idle(self) -> bool:
        """No pod is left."""
        return not self._running

    def port(self, pod: Manifest, number: int) -> int | None:
        """The port here of a pod's port, or None for a pod that is gone."""
        running = self._running.get(pod["metadata"]["uid"])
        return running.ports.get(number) if running is not None else None

    def turn(self) -> float | None:
        """Do what is due, and say when something will be."""
        if self._bug is not None:
            raise self._bug
        now = self._clock()
        dues: list[float] = []
        for manifest in self._objects.of_kind("Pod"):
            running = self._running.get(manifest["metadata"]["uid"]) or self._admit(manifest, now)
            running.manifest = manifest
            due = self._lead(running, now)
            if due is not None:
                dues.append(due)
        return min(dues, default=None)

    def kill_all(self) -> None:
        """SIGKILL to everything, now."""
        for running in self._running.values():
            for process in running.processes.values():
                process.kill()

    async def close(self) -> None:
        """Kill what is left and wait until it is gone. What the kernel itself holds on to is given up."""
        self._closed = True
        self.kill_all()
        for check in self._checks:
            check.cancel()
        if self._lives:
            await asyncio.wait(self._lives, timeout=GIVE_UP_S)
        for life in self._lives:
            life.cancel()
        await asyncio.gather(*self._lives, *self._checks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def _admit(self, manifest: Manifest, now: float) -> Running:
        pod = podlife.Pod(manifest, now)
        name = manifest["metadata"]["name"]
        ports = {number: self._machine.ports.take(f"{name}/{number}") for number in translate.pod_ports(manifest)}
        running = Running(manifest, pod, ports)
        self._running[pod.uid] = running
        return running

    def _lead(self, running: Running, now: float) -> float | None:
        pod, metadata = running.pod, running.manifest["metadata"]
        if not pod.deleted and not pod.finished:
            pod.unschedulable = self._machine.accelerators.assign(running.manifest)
        if "deletionTimestamp" in metadata:
            pod.delete(now, float(metadata["deletionGracePeriodSeconds"]), pre_stop=self.pre_stop)
        for action in pod.turn(now):
            self._do(running, action)
        for note in pod.notes:
            self._say(note)
        pod.notes.clear()
        if pod.finished or pod.gone:
            self._release(running)
        news = (pod.finished or not pod.gone) and self._objects.set_status(key_of(running.manifest), pod.status(now))
        if pod.gone and not news:  # else in the next turn: what its containers said at their end is to be seen first
            del self._running[pod.uid]
            self._machine.volumes.discard(pod.uid)
            self._objects.remove(key_of(running.manifest))
            return None
        return now if pod.gone else pod.due()

    def _release(self, running: Running) -> None:
        self._machine.accelerators.release(running.pod.uid)
        while running.ports:
            self._machine.ports.give_back(running.ports.popitem()[1])

    def _do(self, running: Running, action: podlife.Action) -> None:
        match action:
            case podlife.Start(name):
                self._spawn(self._run(running, name), self._lives)
            case podlife.Check(name, kind):
                self._spawn(self._check(running, name, kind), self._checks)
            case podlife.Terminate(name):
                running.processes[name].terminate()
            case podlife.Kill(name):
                running.processes[name].kill()

    def _spawn(self, work: Coroutine[Any, Any, None], among: set[asyncio.Task[None]]) -> None:
        task = asyncio.ensure_future(work)
        among.add(task)
        task.add_done_callback(among.discard)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._bug = task.exception()
            self._wake()

    async def _run(self, running: Running, name: str) -> None:
        """One life of one container, from its start to its end."""
        pod = running.pod
        folder = self._machine.volumes.pod_folder(pod.uid)
        log = self._machine.logs / pod.name / f"{name}.log"
        container = pod[name].spec
        try:
            with Termination(folder / f"{name}.termination") as termination:
                command = self._command(running, container, termination.path)
                process = await Process.start(_found(command), command.env, Path(command.workdir or folder), log)
                code = await self._end_of(running, name, process)
                words = _last_words(container, code, termination, log)
        except Missing as error:
            pod.cannot_start(name, error.reason, str(error), self._clock())
        except OSError as error:
            pod.ended(name, START_ERROR, str(error), self._clock(), "StartError")
        else:
            pod.ended(name, code, words, self._clock())
        self._wake()

    async def _end_of(self, running: Running, name: str, process: Process) -> int:
        """The exit code of a container that has just been started."""
        running.processes[name] = process
        running.pod.runs(name, self._clock(), f"process://{process.pid}")
        self._wake()
        try:
            if self._closed:  # it was on its way
                process.kill()
            return await process.wait()
        finally:
            process.kill()

    def _command(self, running: Running, container: Manifest, termination: Path) -> translate.Command:
        pod = running.pod
        find = self._find(running)
        folders = self._machine.volumes.mount(running.manifest, find)
        self._machine.volumes.pod_folder(pod.uid).mkdir(parents=True, exist_ok=True)
        place = Place(
            folders=folders,
            ports=running.ports,
            devices=self._machine.accelerators.of(pod.uid, container["name"]),
            base_env=environment.of_an_image(os.environ),
            termination_log=termination,
        )
        return translate.command(running.manifest, container, place, find)

    async def _check(self, running: Running, name: str, kind: probes.ProbeKind) -> None:
        container = running.pod[name]
        tracker = container.probes.get(kind)
        if tracker is None:  # it ended in the meantime
            return
        probe = tracker.probe
        number = translate.port_number(container.spec, probe.port)
        url = f"{probe.scheme}://{podlife.ADDRESS}:{running.ports[number]}{probe.path}"
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True, ssl=False))
        ok, text = await probes.http_get(self._session, url, probe.timeout)
        if container.probes.get(kind) is tracker:
            running.pod.checked(name, kind, ok, text, self._clock())
            self._wake()

    def refresh_files(self) -> None:
        """Bring the files of Secrets and ConfigMaps in running pods up to date; those that went missing stay as they are."""
        for running in self._running.values():
            try:
                self._machine.volumes.mount(running.manifest, self._find(running))
            except Missing:
                pass
            except OSError as error:
                self._say(f"{running.pod.name}: its files cannot be renewed: {error}")

    def _find(self, running: Running) -> Find:
        namespace = running.manifest["metadata"]["namespace"]
        return lambda kind, name: self._objects.get(Key(kind, namespace, name))


def _found(command: translate.Command) -> list[str]:
    """Banyan's own commands are those of the Python that runs the operator, wherever PATH leads."""
    name, *words = command.argv
    if "/" not in name:
        beside = Path(sys.executable).parent / name
        if name.startswith("banyan-") and beside.exists():
            return [str(beside), *words]
        if shutil.which(name, path=command.env.get("PATH")) is None:
            raise FileNotFoundError(f'exec: "{name}": executable file not found in $PATH')
    return list(command.argv)


def _last_words(container: Manifest, code: int, termination: Termination, log: Path) -> str:
    """The termination message of a container that ended."""
    message = termination.read()
    try:
        if not message and code and container.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            with log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
                message = file.read().decode(errors="replace").strip()
    except OSError:  # the folder may be gone already
        return ""
    return message

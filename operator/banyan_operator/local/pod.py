"""A pod template as processes: init containers, sidecars, then the rest; probed, restarted with back-off, stopped in order."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import aiohttp

from banyan_operator.desired.metadata import SPEC_HASH
from banyan_operator.kube.kinds import Manifest
from banyan_operator.kube.objects import Key
from banyan_operator.local import environment, translate
from banyan_operator.local.accelerators import Accelerators
from banyan_operator.local.ports import HOST, Ports
from banyan_operator.local.process import Process
from banyan_operator.local.volumes import Missing, Volumes
from banyan_operator.observed import pods
from banyan_operator.observed.pods import End
from banyan_operator.observed.termination import TerminationMessage
from banyan_operator.times import stamp

FIRST_BACKOFF_S: Final = 10.0
LONGEST_BACKOFF_S: Final = 300.0
BACKOFF_FORGOTTEN_S: Final = 600.0
"""As the kubelet: the first restart is immediate, then 10 s, doubled up to 300 s; forgotten after ten good minutes."""
RETRY_S: Final = 2.0  # where a Secret is missing
STARTUP_CHECK_S: Final = 1.0  # somebody sits before the screen and waits
MESSAGE_BYTES: Final = 4096  # what the kubelet keeps of a termination message
LOG_TAIL_BYTES: Final = 2048  # and of the log where a container left none
START_ERROR: Final = 128
STOPPED: Final = 143  # of what was stopped before it ran
_NAME_LETTERS: Final = "bcdfghjklmnpqrstvwxz2456789"


@dataclass(frozen=True, slots=True)
class Machine:
    """What pods are given a part of, and whom they tell."""

    volumes: Volumes
    accelerators: Accelerators
    ports: Ports
    http: aiohttp.ClientSession
    logs: Path
    find: Callable[[Key], Mapping[str, bytes] | None]  # the keys of Secrets and ConfigMaps
    say: Callable[[str], None]
    changed: Callable[[], None]


@dataclass(slots=True, eq=False)
class Container:
    """One container, and what became of its process."""

    spec: Manifest
    sidecar: bool = False
    process: Process | None = None
    running_since: float | None = None  # unix seconds
    started: bool = False
    ready: bool = False
    restarts: int = 0
    end: End | None = None  # of the last run
    waiting: tuple[str, str] = ("ContainerCreating", "")  # the kubelet's reason and message
    told: asyncio.Event = field(default_factory=asyncio.Event)  # its run is to end
    up: asyncio.Event = field(default_factory=asyncio.Event)  # it has started once, or never will

    @property
    def name(self) -> str:
        return str(self.spec["name"])

    def observed(self) -> pods.Container:
        restarts = self.waiting[0] == "CrashLoopBackOff"
        ended = self.process is None and self.end is not None and not restarts
        return pods.Container(
            name=self.name,
            image=self.spec.get("image", ""),
            ready=self.ready,
            started=self.started,
            restarts=self.restarts,
            waiting="" if self.process or ended else self.waiting[0],
            waiting_message="" if self.process or ended else self.waiting[1],
            running_since=stamp(self.running_since) if self.process and self.running_since else None,
            ended=self.end if ended else None,
            last_end=None if ended else self.end,
        )


class Pod:
    """One copy of a pod template. `run` once; `stop` and `kill` end it."""

    def __init__(self, prefix: str, namespace: str, template: Manifest, machine: Machine) -> None:
        self.name = prefix + "".join(random.choices(_NAME_LETTERS, k=5))
        metadata = {**template["metadata"], "name": self.name, "namespace": namespace, "uid": str(uuid.uuid4())}
        self._manifest: Manifest = {"metadata": metadata, "spec": template["spec"]}
        self._spec: Manifest = template["spec"]
        self._machine = machine
        self.revision: str = (metadata.get("annotations") or {}).get(SPEC_HASH, "")
        self.ports = {number: machine.ports.take(f"{self.name}/{number}") for number in translate.pod_ports(self._manifest)}
        init = self._spec.get("initContainers", ())
        self._init = [Container(one, one.get("restartPolicy") == "Always") for one in init]
        self._main = [Container(one) for one in self._spec["containers"]]
        self._grace_s = float(self._spec.get("terminationGracePeriodSeconds", 30))
        self._created = time.time()
        self._unschedulable: str | None = None
        self._pre_stop = True
        self._ending = asyncio.Event()  # nothing of it is started any more
        self.stopping = False
        self.over = False
        self.failed = False
        self.readyz: Mapping[str, Any] | None = None
        """The body of /readyz of a container that runs and has a probe there."""

    @property
    def containers(self) -> list[Container]:
        return [*self._init, *self._main]

    @property
    def ready(self) -> bool:
        """Whether it takes requests."""
        needed = [one for one in self.containers if one.sidecar or one in self._main]
        return not self._ending.is_set() and all(one.ready for one in needed)

    @property
    def phase(self) -> str:
        if self.over:
            return "Failed" if self.failed else "Succeeded"
        return "Running" if any(one.process or one.end for one in self._main) else "Pending"

    def observed(self) -> pods.Pod:
        """As the operator's diagnosis sees a pod."""
        unready = [one.name for one in self._main if not one.ready]
        return pods.Pod(
            name=self.name,
            revision=self.revision,
            created=stamp(self._created),
            deleted=stamp(time.time()) if self.stopping else None,
            phase=self.phase,
            ready=self.ready,
            ready_message=f"containers with unready status: [{' '.join(unready)}]",
            unschedulable=self._unschedulable,
            containers=tuple(one.observed() for one in self.containers),
        )

    def url(self, number: int) -> str:
        return f"http://{HOST}:{self.ports[number]}"

    def refresh(self) -> None:
        """Bring files of Secrets and ConfigMaps up to date; those that went missing stay as they are."""
        try:
            self._machine.volumes.mount(self._manifest, self._find)
        except Missing:
            pass
        except OSError as error:
            self._machine.say(f"{self.name}: its files cannot be renewed: {error}")

    # --- its life ---

    def stop(self, *, pre_stop: bool = True) -> None:
        """Let it end within its grace period. `pre_stop` False: without the pause in which endpoints drain."""
        self._pre_stop = pre_stop
        self.stopping = True
        self._ending.set()
        self._machine.accelerators.look.set()
        for container in self.containers:
            container.up.set()
            if not container.sidecar:  # those go when the rest has ended
                container.told.set()

    def kill(self) -> None:
        self.stop()
        for container in self.containers:
            if container.process is not None:
                container.process.kill()

    async def run(self) -> None:
        """Until its main containers have ended for good and the sidecars after them."""
        sidecars: list[tuple[Container, asyncio.Task[int]]] = []
        try:
            await self._wait_for_accelerators()
            self.failed = not await self._run_init(sidecars) or any(await asyncio.gather(*map(self._keep, self._main)))
        finally:
            self._ending.set()
            for container, task in reversed(sidecars):
                container.told.set()
                await task
            self._machine.accelerators.release(self.name)
            while self.ports:
                self._machine.ports.give_back(self.ports.popitem()[1])
            self._machine.volumes.discard(self.name)
            self.over = True
            self._machine.changed()

    async def _wait_for_accelerators(self) -> None:
        accelerators = self._machine.accelerators
        while (text := accelerators.assign(self.name, self._spec)) is not None and not self._ending.is_set():
            self._unschedulable = text
            self._machine.changed()
            accelerators.look.clear()
            await accelerators.look.wait()
        self._unschedulable = None

    async def _run_init(self, sidecars: list[tuple[Container, asyncio.Task[int]]]) -> bool:
        """Whether the main containers may start. Those that go on beside them are put into `sidecars`."""
        for container in self._init:
            if not container.sidecar:
                if await self._keep(container):
                    return False
                continue
            sidecars.append((container, asyncio.create_task(self._keep(container))))
            await container.up.wait()
        return not self._ending.is_set()

    async def _keep(self, container: Container) -> int:
        """Run a container, again where its policy says so; the exit code of the last run."""
        back_off, code = 0.0, STOPPED
        while not self._ending.is_set():
            began = time.monotonic()
            try:
                code = await self._run_once(container)
            except Missing as error:
                if container.waiting != (error.reason, str(error)):
                    self._machine.say(f"{self.name}: {container.name} cannot start: {error}")
                container.waiting = error.reason, str(error)
                self._machine.changed()
                await self._pause(RETRY_S)
                continue
            except OSError as error:
                code, container.end = START_ERROR, End("StartError", START_ERROR, TerminationMessage.parse(str(error)), stamp(time.time()))
            self._machine.changed()
            if self._ending.is_set():
                break
            if code or container.sidecar:
                self._machine.say(f"{self.name}: {container.name} ended with exit code {code}")
            if not self._restarts(container, code):
                break
            back_off = 0.0 if time.monotonic() - began > BACKOFF_FORGOTTEN_S else back_off
            if back_off:
                text = f"back-off {back_off:g}s restarting failed container={container.name} pod={self.name}"
                container.waiting = "CrashLoopBackOff", text
                await self._pause(back_off)
            back_off = min(LONGEST_BACKOFF_S, max(FIRST_BACKOFF_S, back_off * 2))
            container.restarts += 1
        return code

    def _restarts(self, container: Container, code: int) -> bool:
        policy = "Always" if container.sidecar else self._spec.get("restartPolicy", "Always")
        if policy == "Always" and container in self._init and not container.sidecar:
            policy = "OnFailure"
        return policy == "Always" or (policy == "OnFailure" and code != 0)

    async def _run_once(self, container: Container) -> int:
        """The exit code of one run. Raises Missing or OSError where it cannot be started."""
        log = self._machine.logs / self.name / f"{container.name}.log"
        folder = self._machine.volumes.pod_folder(self.name)
        folder.mkdir(parents=True, exist_ok=True)
        with _file_in_memory() as message_file:
            command = self._command(container, Path(f"/proc/{os.getpid()}/fd/{message_file}"))
            if not self._ending.is_set():
                container.told.clear()
            try:
                process = await Process.start(_found(command), command.env, Path(command.workdir or folder), log)
            except ValueError as error:  # a NUL character, or a '=' in the name of a variable
                raise Missing(f"container {container.name}: {error}") from None
            container.process, container.running_since, container.waiting = process, time.time(), ("", "")
            self._machine.changed()
            probing = asyncio.create_task(self._probe(container))
            try:
                code = await self._end_of(container, process)
            finally:
                process.kill()
                probing.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await probing
                container.process, container.started, container.ready = None, False, False
                self.readyz = None
            words = os.pread(message_file, MESSAGE_BYTES, 0).decode(errors="replace").strip()
        if code and not words and "terminationMessagePolicy" in container.spec:
            words = _log_tail(log)
        container.end = End("Error" if code else "Completed", code, TerminationMessage.parse(words), stamp(time.time()))
        return code

    async def _end_of(self, container: Container, process: Process) -> int:
        """Wait for its end, which `told` brings on: preStop, SIGTERM, SIGKILL."""
        over, told = asyncio.create_task(process.wait()), asyncio.create_task(container.told.wait())
        await asyncio.wait((over, told), return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
        if not over.done():
            container.ready = False
            self._machine.changed()
            pause_s = float(container.spec.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0))
            if self._pre_stop and pause_s:
                await asyncio.wait((over,), timeout=pause_s)
            process.terminate()
            await asyncio.wait((over,), timeout=max(1.0, self._grace_s - pause_s))
            process.kill()
        return await over

    def _command(self, container: Container, message_file: Path) -> translate.Command:
        place = translate.Place(
            folders=self._machine.volumes.mount(self._manifest, self._find),
            ports=self.ports,
            devices=self._machine.accelerators.of(self.name, container.name),
            base_env=environment.of_an_image(os.environ),
            termination_log=message_file,
        )
        return translate.command(self._manifest, container.spec, place, self._find)

    def _find(self, kind: str, name: str) -> Mapping[str, bytes] | None:
        return self._machine.find(Key(kind, self._manifest["metadata"]["namespace"], name))

    async def _pause(self, seconds: float) -> None:
        """Wait, but not longer than until the pod is to end."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ending.wait()

    # --- probes ---

    async def _probe(self, container: Container) -> None:
        """The startup probe until it passes, then the others, as long as the process runs."""
        if (startup := container.spec.get("startupProbe")) is not None:
            patience_s, began = startup.get("periodSeconds", 10) * startup.get("failureThreshold", 3), time.monotonic()
            async for ok, _, text in self._answers(container, startup, STARTUP_CHECK_S):
                if ok:
                    break
                if time.monotonic() - began >= patience_s:
                    return self._fail(container, "startup", text)
        container.started, container.ready = True, "readinessProbe" not in container.spec
        container.up.set()
        self._machine.changed()
        await asyncio.gather(self._watch(container, "readiness"), self._watch(container, "liveness"))

    async def _watch(self, container: Container, kind: Literal["readiness", "liveness"]) -> None:
        if (probe := container.spec.get(f"{kind}Probe")) is None:
            return
        async for ok, row, text in self._answers(container, probe, probe.get("periodSeconds", 10)):
            if row < (probe.get("successThreshold", 1) if ok else probe.get("failureThreshold", 3)):
                continue
            if kind == "liveness" and not ok:
                self._fail(container, kind, text)
            elif kind == "readiness" and container.ready != ok and not container.told.is_set():
                container.ready = ok
                self._machine.changed()

    async def _answers(self, container: Container, probe: Manifest, period_s: float) -> AsyncIterator[tuple[bool, int, str]]:
        """Ask for ever: whether an answer is good, how many alike came in a row, and what to say of it."""
        row, last = 0, None
        await asyncio.sleep(probe.get("initialDelaySeconds", 0))
        while True:
            ok, text = await self._ask(container, probe)
            row, last = (row + 1 if ok == last else 1), ok
            yield ok, row, text
            await asyncio.sleep(period_s)

    def _fail(self, container: Container, kind: str, text: str) -> None:
        self._machine.say(f"{self.name}: {container.name} failed its {kind} probe and is restarted ({text})")
        container.told.set()

    async def _ask(self, container: Container, probe: Manifest) -> tuple[bool, str]:
        """Whether a probe's URL answers with 200 to 399, and what the kubelet would say if not. Other kinds of probes always pass."""
        if (get := probe.get("httpGet")) is None:
            return True, ""
        path = get.get("path", "/")
        url = f"{get.get('scheme', 'HTTP').lower()}://{HOST}:{self.ports[translate.port_number(container.spec, get['port'])]}{path}"
        status, body, text = await ask(self._machine.http, url, probe.get("timeoutSeconds", 1))
        if path == "/readyz" and isinstance(body, dict) and body != self.readyz:
            self.readyz = body
            self._machine.changed()
        return 200 <= status < 400, text


async def ask(http: aiohttp.ClientSession, url: str, timeout_s: float) -> tuple[int, Any, str]:
    """The status (0: no answer), the body where it is JSON, and what to say of an answer that is not good."""
    try:
        async with http.get(url, timeout=aiohttp.ClientTimeout(total=timeout_s), allow_redirects=False) as response:
            text = await response.read()
    except TimeoutError:
        return 0, None, f"Get {url}: no answer within {timeout_s:g} s"
    except (aiohttp.ClientError, OSError) as error:
        return 0, None, f"Get {url}: {error}"
    try:
        body = json.loads(text)
    except ValueError:
        body = None
    return response.status, body, f"HTTP probe failed with statuscode: {response.status}"


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


@contextlib.contextmanager
def _file_in_memory() -> Iterator[int]:
    """For a termination message, which a full disk cannot lose then; its descriptor."""
    descriptor = os.memfd_create("termination-log")
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _log_tail(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            return file.read().decode(errors="replace").strip()
    except OSError:  # the folder may be gone already
        return ""

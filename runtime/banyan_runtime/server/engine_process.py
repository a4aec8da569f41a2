"""The engine process: puts a runner and the scheduler together and turns their loop. The only place that knows both.

Started by the front as `python -m banyan_runtime.server.engine_process` with one JSON line on standard input (`Boot`). That pipe
stays open for as long as the front lives, so its end is the sign to go. Messages travel over a `link.Link` to each of its `clients`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

import msgspec

from banyan_runtime import logs, stacks, wire
from banyan_runtime.config import ServerConfig
from banyan_runtime.errors import UserError
from banyan_runtime.link import Link
from banyan_runtime.process import collect_rarely, die_with, end_with_input, resident_bytes, without_collection
from banyan_runtime.server.clients import Clients, Wake
from banyan_runtime.server.grammars import grammars_of
from banyan_runtime.server.pulse import Pulse
from banyan_runtime.server.stages import IDLE, LAUNCH, OUTPUT, RECV, SCHEDULE, Stages, TimedHandle
from banyan_runtime.server.termination import EXIT_INTERNAL
from banyan_runtime.step import Handle, Runner, RunnerInfo, Step, TableShape

if TYPE_CHECKING:
    from banyan_runtime.engine.loop import Engine

log = logging.getLogger("banyan")

LAST_SEND_S: Final = 2.0
SILENT_PHASE_S: Final = 120.0  # a start-up phase that says nothing for so long shows where it is


class Boot(msgspec.Struct, frozen=True):
    """What the front tells its engine before anything else."""

    config: str  # ServerConfig.engine_json()
    model_dir: str
    tokenizer_dir: str
    address: str  # path of the socket that the front listens on
    pulse: str  # file of the counter that both processes share
    parent: int  # process id of the front

    def forget_files(self) -> None:
        """Remove the socket, the counter and their folder, where the front did not live to do it."""
        pulse = Path(self.pulse)
        with contextlib.suppress(OSError):
            pulse.unlink(missing_ok=True)
            Path(self.address).unlink(missing_ok=True)
            pulse.parent.rmdir()


class CountedRunner:
    """A runner that counts the steps it launches, the sign that the loop makes progress, and the time they take."""

    def __init__(self, runner: Runner, stages: Stages) -> None:
        self._runner = runner
        self._stages = stages
        self.steps = 0

    @property
    def info(self) -> RunnerInfo:
        return self._runner.info

    def prepare(self, shape: TableShape) -> None:
        self._runner.prepare(shape)

    def launch(self, step: Step) -> Handle:
        self.steps += 1
        self._stages.end(SCHEDULE)
        handle = self._runner.launch(step)
        self._stages.end(LAUNCH)
        return TimedHandle(handle, self._stages)


class Watchdog:
    """Ends a process whose loop stands still although there is work, by SIGALRM, behind the stacks of all threads.

    A timer of the kernel's does it and a handler in C, so it works even when the step that hangs never gives up Python's lock, and
    it needs no thread: where no more can be started, a step that gets on must not fail for it. Create it on the main thread.
    """

    def __init__(self, timeout_s: float, pulse: Callable[[], None] = lambda: None) -> None:
        self._timeout_s = timeout_s
        self._pulse = pulse
        self._every_s = min(1.0, timeout_s / 10)  # arming is a system call: not at each step
        self._armed_at = float("-inf")
        self._steps = -1
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which ends the process; whoever started us may have had it ignored
        stacks.show_on_signal(signal.SIGALRM, chain=True)

    def progress(self, steps: int, now: float) -> None:
        """There is work, and so many steps have been done since the start."""
        if steps != self._steps and now - self._armed_at >= self._every_s:
            self._steps = steps
            self._arm(now)

    def beat(self) -> None:
        """A step gets on: the pulse that the model gives while it computes."""
        self._pulse()
        if self._armed_at != float("-inf") and (now := time.monotonic()) - self._armed_at >= self._every_s:
            self._arm(now)

    def rest(self) -> None:
        """There is nothing to do."""
        if self._armed_at != float("-inf"):
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._armed_at = float("-inf")
            self._steps = -1

    def _arm(self, now: float) -> None:
        self._armed_at = now
        signal.setitimer(signal.ITIMER_REAL, self._timeout_s)


def read_boot() -> Boot:
    line = bytearray()
    while not line.endswith(b"\n"):
        if not (piece := os.read(0, 65536)):
            os._exit(0)
        line += piece
    return msgspec.json.decode(bytes(line), type=Boot)


def start(
    boot: Boot, config: ServerConfig, send: Send, watchdog: Watchdog, stages: Stages, wake: Wake, lines: Lines
) -> tuple[Engine, CountedRunner, wire.EngineInfo]:
    """Load the model and build the engine over it. Progress goes to the front, and keeps the stack dump away."""

    def progress(phase: str, percent: int, detail: str) -> None:
        with contextlib.suppress(RuntimeError):  # it takes a thread: where none can be had, the start does without
            faulthandler.dump_traceback_later(SILENT_PHASE_S)
        send(wire.StartupProgress(phase, percent, detail))

    progress("loading", 0, "")
    from banyan_runtime.engine.limits import EngineLimits
    from banyan_runtime.engine.loop import Engine
    from banyan_runtime.engine.report import startup_line
    from banyan_runtime.model.runners import load_weights

    die_with(boot.parent)  # not before: the front, which has our message by now, removes the files that we share

    def build(runner: Runner, defaults: ServerConfig) -> tuple[Engine, CountedRunner, wire.EngineInfo]:
        known = runner.info
        limits = EngineLimits.of(defaults, known)
        log.info("%s", startup_line(limits, known))
        if limits.warning is not None:
            log.warning("%s", limits.warning)
        counted = CountedRunner(runner, stages)
        grammars = grammars_of(config, Path(boot.model_dir), Path(boot.tokenizer_dir), known, wake)
        engine = Engine(counted, limits, time.monotonic, lines, grammars)
        return engine, counted, msgspec.structs.replace(limits.engine_info(counted.info), software=software())

    try:
        return load_weights(config, Path(boot.model_dir), progress, watchdog.beat).serve(build)
    finally:
        faulthandler.cancel_dump_traceback_later()


def software() -> dict[str, str]:
    """Versions of what computes here; "" for what is not there."""
    import torch

    try:
        flashinfer = version("flashinfer-python")
    except PackageNotFoundError:
        flashinfer = ""
    return {"torch": str(torch.__version__), "cuda": torch.version.cuda or "", "flashinfer": flashinfer}


class Send:
    """Sends messages to the engine's clients; adds to a snapshot what only the process knows."""

    def __init__(self, clients: Clients, stages: Stages) -> None:
        self._clients = clients
        self._stages = stages

    def __call__(self, message: wire.EngineMessage) -> None:
        if isinstance(message, wire.Stats):
            message.cpu_seconds = time.process_time()
            message.last_step_unix += time.time() - time.monotonic()  # the engine's clock is the monotonic one
            message.resident_bytes = resident_bytes()
            message.scheduler_seconds = self._stages.seconds
        self._clients.send(message)


class Lines:
    """What the loop has to say to the log, kept until it is about to look for messages: the thread that writes the log takes Python's lock
    from a loop that launches a step or sends tokens."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._kept: list[str] = []

    def __call__(self, line: str) -> None:
        self._kept.append(line)

    def tell(self) -> None:
        if self._kept:
            kept, self._kept = self._kept, []
            for line in kept:
                self._log(line)


class Receive:
    """What the engine's loop takes messages from, once a turn; so here the watchdog learns that the loop turns."""

    def __init__(self, clients: Clients, wake: Wake, runner: CountedRunner, watchdog: Watchdog, stages: Stages, lines: Lines) -> None:
        self._clients = clients
        self._lines = lines
        self._wake = wake
        self._runner = runner
        self._watchdog = watchdog
        self._stages = stages

    def __call__(self, wait: bool) -> Iterator[wire.FrontMessage]:
        """What has come; with `wait` not before something has, though it may be no message but a grammar that is ready."""
        self._lines.tell()
        self._stages.end(OUTPUT)
        if wait:
            self._watchdog.rest()
            self._wake.wait()
            self._stages.end(IDLE)
        self._watchdog.progress(self._runner.steps, time.monotonic())
        yield from self._clients.receive()
        self._stages.end(RECV)


def main() -> NoReturn:
    """Run until told to stop. The exit code is that of the `Fatal` message, if one was sent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C reaches the whole group; the front drains, then tells us
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(Exception), without_collection():  # what is wrong with it `start` meets again, and tells
        importlib.import_module("banyan_runtime.model.runners")  # with torch: while the front starts, too
    boot = read_boot()
    end_with_input(boot.forget_files)
    config = ServerConfig.from_engine_json(boot.config)
    writer = logs.configure("engine", level=config.log_level, form=config.log_format)
    clients = Clients(Link.connect(boot.address))
    wake = Wake(lambda: clients.links)
    stages = Stages()
    send, lines = Send(clients, stages), Lines(log.info)
    try:
        watchdog = Watchdog(config.watchdog_timeout, Pulse(Path(boot.pulse)))
        engine, runner, info = start(boot, config, send, watchdog, stages, wake, lines)
        collect_rarely()
        writer.flush()  # the front writes its lines behind ours
        send(wire.Ready(info))
        send(engine.stats(time.monotonic()))
        stages.begin()
        engine.run(Receive(clients, wake, runner, watchdog, stages, lines), send)
        code = 0
    except UserError as error:
        lines.tell()
        send(wire.Fatal(error.message, error.exit_code, error.code, error.field, error.value))
        code = error.exit_code
    except Exception as error:
        lines.tell()
        log.exception("the engine failed")
        send(wire.Fatal(f"{type(error).__name__}: {error}", EXIT_INTERNAL, _code_of(error)))
        code = EXIT_INTERNAL
    clients.close(LAST_SEND_S)
    logs.exit_now(code)  # taking torch apart piece by piece would only keep the front waiting


def _code_of(error: Exception) -> str:
    """`out_of_memory` if the accelerator is full, else `internal_error`."""
    with contextlib.suppress(ImportError):  # which may be what failed
        import torch

        from banyan_runtime.model.device import shortage

        if shortage(error) is not None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return "out_of_memory"
    return "internal_error"


if __name__ == "__main__":
    main()

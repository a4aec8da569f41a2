"""`banyan-runtime batch`: the order of things, signals, last words and exit codes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
import traceback
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, Final, TypeVar

import msgspec
import uvloop

from banyan_runtime.addresses import url_of
from banyan_runtime.batch.display import Display, display
from banyan_runtime.batch.documents import FOLDER
from banyan_runtime.batch.errors import (
    AllLinesFailed,
    InputChanged,
    InputNotFound,
    Interrupted,
    InvalidSpec,
    RunEnded,
    TooManyErrors,
    Unfinished,
    from_store,
)
from banyan_runtime.batch.hands import Hands
from banyan_runtime.batch.instrumented import InstrumentedStore
from banyan_runtime.batch.options import Options, parse
from banyan_runtime.batch.order import Order
from banyan_runtime.batch.progress import Progress
from banyan_runtime.batch.records import ERRORS, MANIFEST, OUTPUT, Manifest
from banyan_runtime.batch.run import Run
from banyan_runtime.batch.sender import Expected, Sender, Target
from banyan_runtime.batch.server import OwnServer, own_server, wait_ready
from banyan_runtime.batch.status import serve_status
from banyan_runtime.errors import UserError
from banyan_runtime.server import termination
from banyan_runtime.storage.local import LocalStore
from banyan_runtime.storage.open import Location, open_uri
from banyan_runtime.storage.patience import WAITING, Patience
from banyan_runtime.storage.s3 import S3Store
from banyan_runtime.storage.store import StoreError

EXIT_SIGINT: Final = 130
THREADS: Final = 8  # calls to the storage at a time
FIRST_S: Final = 20.0  # how long a storage may be away that was never there
WRITE_S: Final = 10.0  # of the grace period, kept for the last checkpoint
LAST_S: Final = 5.0  # of that, kept for ending whatever the storage does
GO_ON: Final = "the same command goes on; if the run has published its results by then, run it again with them as --retry-failed"
OTHER: Final = "choose another --output"

T = TypeVar("T")
Done = Manifest | dict[str, Any]
"""What a phase came to: the manifest, or the last words of one that does not publish."""


def main(argv: Sequence[str]) -> int:
    """Run one batch; returns the exit code."""
    progress = Progress()
    try:
        options = parse(argv)
        command = _Command(options, progress)
        done = uvloop.run(command.until_signal())
        return _publish_words(done, options, command.reason) if isinstance(done, Manifest) else _say_words(done)
    except UserError as error:
        termination.write_termination(termination.words(error) | _counted(progress))
        termination.say(f"FATAL: {error}")
        return error.exit_code
    except Exception as error:
        termination.write_termination(termination.words(error) | _counted(progress))
        termination.say(traceback.format_exc().rstrip())
        return termination.EXIT_INTERNAL


def _publish_words(manifest: Manifest, options: Options, reason: str | None) -> int:
    """`reason`: why the first line failed, where all did and it is known."""
    counts, usage = msgspec.to_builtins(manifest.request_counts), msgspec.to_builtins(manifest.usage)
    told = manifest.request_counts
    message = f"{told.completed} of {told.total} requests completed, {told.failed} failed"
    if (lacking := told.total - told.completed - told.failed) > 0:
        message += f", {lacking} not run"
    files = {"output": manifest.output.uri, "errors": manifest.errors.uri}
    files["manifest"] = manifest.output.uri.removesuffix(OUTPUT) + MANIFEST
    code = "succeeded" if manifest.outcome == "completed" else manifest.outcome.replace("-", "_")
    exit_code, field, value = 0, "", ""  # whoever asked for a partial merge knows that the run failed
    if manifest.outcome == "too-many-errors":
        exit_code, field, value = TooManyErrors.exit_code, "--max-error-percent", str(options.max_error_percent)
        message += f": more than {value} %"
    elif manifest.outcome == "completed" and told.completed == 0:
        code, exit_code = AllLinesFailed.code, AllLinesFailed.exit_code
        message += f"{'' if reason is None else f'; the first: {reason}'}; all reasons are in {manifest.errors.uri}"
    words = {"code": code, "field": field, "value": value, "message": message}
    termination.write_termination(words | files | {"requestCounts": counts, "usage": usage})
    lines = [f"{file.uri}  {file.lines} lines, {file.bytes} bytes" for file in (manifest.output, manifest.errors)]
    termination.say("\n".join([message if exit_code == 0 else f"FATAL: {message}", *lines]))
    return exit_code


def _say_words(words: dict[str, Any]) -> int:
    termination.write_termination(words)
    termination.say(str(words["message"]))
    return 0


def _counted(progress: Progress) -> dict[str, Any]:
    """What a run has counted so far, as a part of its termination message."""
    return {"requestCounts": msgspec.to_builtins(progress.counts), "usage": msgspec.to_builtins(progress.usage)}


def _words(progress: Progress, code: str, message: str) -> dict[str, Any]:
    """The termination message of a phase that does not publish."""
    return {"code": code, "field": "", "value": "", "message": message} | _counted(progress)


def _so_many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


class _Command:
    """One execution of the command."""

    def __init__(self, options: Options, progress: Progress) -> None:
        self._options = options
        self._progress = progress
        self.reason: str | None = None
        self._shown: Display = display()
        planned = options.phase in ("work", "merge")  # by another process, so the storage has been there
        self._patience = Patience(options.storage_timeout if planned else min(FIRST_S, options.storage_timeout), self._notice)
        self._hands = Hands(THREADS, "batch-storage")
        self._run: Run | None = None
        self._task: asyncio.Task[Done] | None = None
        self._signals: list[signal.Signals] = []
        self._until = 0.0  # when the grace period ends

    async def until_signal(self) -> Done:
        """Run; the first SIGTERM or Ctrl-C ends it in good order, the second at once."""
        loop = asyncio.get_running_loop()
        self._task = asyncio.ensure_future(self._execute())
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            return await self._task
        except (asyncio.CancelledError, UserError) as error:
            if not self._signals or (isinstance(error, UserError) and not isinstance(error, Interrupted)):
                raise
            raise self._interrupted() from None
        finally:
            self._hands.close()

    def _interrupted(self) -> Interrupted:
        name = f" --run-id {self._run.name}" if self._run is not None and self._run.name else ""
        hint = f"nothing was published, what is finished is kept, the same command goes on{f' (with{name} from anywhere)' if name else ''}"
        error = Interrupted(f"stopped by {self._signals[0].name}", hint=hint)
        error.exit_code = EXIT_SIGINT if self._signals[0] is signal.SIGINT else Interrupted.exit_code
        return error

    def _on_signal(self, number: signal.Signals) -> None:
        self._signals.append(number)
        if len(self._signals) > 1:
            self._end_now()
        grace_s = self._options.grace_s
        self._until = time.monotonic() + grace_s
        loop = asyncio.get_running_loop()
        loop.call_later(max(0.0, grace_s - LAST_S), self._patience.stop.set)
        killer = threading.Timer(max(0.5, grace_s - 1.0), self._end_now)
        killer.daemon = True
        killer.start()
        phase = self._progress.phase
        if phase == "running" and self._run is not None:
            self._shown.say(f"stopping: {self._progress.in_flight} lines in flight have {self._grace():.0f} s; once more to stop at once")
            self._run.quit()
        elif phase == "publishing":
            self._shown.say("stopping when the results are published; once more to stop at once")
        else:
            if self._run is not None:
                self._run.quit()
            self._patience.stop.set()
            assert self._task is not None
            self._task.cancel()

    def _grace(self) -> float:
        """How long lines in flight may still take, seconds."""
        return max(0.0, self._until - time.monotonic() - WRITE_S)

    def _end_now(self) -> None:
        error = self._interrupted()
        termination.write_termination(termination.words(error) | _counted(self._progress))
        termination.say(f"FATAL: {error}")
        os._exit(error.exit_code)

    def _notice(self, text: str) -> None:
        away = text.startswith(WAITING)
        self._progress.waiting_for_storage = text.removeprefix(WAITING) if away else ""
        self._shown.say(text)

    # --- phases ---

    async def _execute(self) -> Done:
        """Fail early and cheaply: key, input and output are looked at before a server is started or waited for."""
        options, progress, shown = self._options, self._progress, self._shown
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(shown.close)
            if options.progress_port is not None:
                port = await stack.enter_async_context(serve_status(progress, options.progress_host, options.progress_port))
                shown.say(f"progress and metrics on {url_of(options.progress_host, port)}/progress and /metrics")
            api_key = options.api_key()
            run = self._run = Run(self._order(), progress, self._hands, shown.say)
            if (manifest := await self._show_while(run.claim())) is not None:
                if options.phase == "plan" and manifest.outcome != "completed":
                    raise _ended(manifest, options)
                shown.say("this run has published its results already")
                return manifest
            self._patience.limit_s = options.storage_timeout  # it was there: if it goes, it will come back
            try:
                return await self._phases(run, api_key)
            except BaseException:
                if options.phase == "all":
                    await _briefly(run.release())
                raise

    async def _phases(self, run: Run, api_key: str | None) -> Done:
        options, progress = self._options, self._progress
        if options.phase == "plan":
            plan = await self._show_while(run.plan())
            progress.total = plan.total
            if (reason := await self._show_while(run.ended())) is not None:
                manifest = await self._show_while(run.merge(reason))
                if manifest.outcome != "completed":
                    raise _ended(manifest, options)
                return manifest
            words = _words(progress, "planned", f"{_so_many(plan.total, 'request')} in {_so_many(len(plan.shards), 'shard')}")
            return words | {"shards": len(plan.shards), "fenced": progress.fenced}
        if options.phase != "merge":
            await self._work(run, api_key)
        else:
            progress.total = (await self._show_while(run.plan())).total
        if options.phase == "work":
            return _words(progress, "worked", f"all {progress.shards.total} shards have ended")
        progress.phase = "publishing"
        manifest = await self._show_while(run.merge(options.partial or run.stopped))
        progress.phase = "done"
        counts = manifest.request_counts  # of all workers; a process that only merges has worked on no line
        progress.completed, progress.failed = counts.completed, counts.failed
        self._shown.working(progress)
        if counts.failed and not counts.completed:
            self.reason = await self._show_while(run.first_reason())
        return manifest

    async def _work(self, run: Run, api_key: str | None) -> None:
        """Scan the input while the server gets ready, then work."""
        options = self._options
        planning = asyncio.ensure_future(run.plan())
        try:
            async with _server(options) as server:
                work = self._work_with(run, planning, server, api_key)
                await (work if isinstance(server, str) else _while_alive(work, server))
        finally:
            planning.cancel()

    async def _work_with(self, run: Run, planning: asyncio.Future[Any], server: str | OwnServer, api_key: str | None) -> None:
        options, progress = self._options, self._progress
        url = server if isinstance(server, str) else server.url
        waiting = asyncio.ensure_future(wait_ready(url, self._shown, patience_s=options.server_timeout, api_key=api_key))
        await asyncio.wait([planning, waiting], return_when=asyncio.FIRST_COMPLETED)
        try:
            if planning.done():
                planning.result()  # no need to wait for a server if the input is bad
            await waiting
            plan = await self._show_while(planning)
        finally:
            waiting.cancel()
        if isinstance(server, OwnServer):
            run.use_model(await server.model_name())  # it has but one, whatever the lines call it
        names = frozenset(plan.models) if plan.models is not None else None
        models = names if options.model is None else frozenset({options.model})
        served, left = await run.begun()
        expected = Expected(left, models, served_before=served)
        target = Target(url, options.endpoint, api_key, options.request_timeout, options.max_concurrency, key_now=options.key_now)
        async with Sender(target, expected, options.policy) as sender:
            progress.ask_load = lambda: sender.load
            progress.begin(plan.total, time.monotonic())
            try:
                done = await self._show_while(run.work(sender, self._grace))
            except (InputChanged, InputNotFound) as error:
                error.hint = GO_ON
                raise
            progress.end(time.monotonic())
        if not done and run.stopped == "too-many-errors" and options.phase == "work":
            percent = plan.max_error_percent
            message = f"{progress.failed} of {plan.total} lines failed, more than {percent} %"
            raise TooManyErrors(message, field="--max-error-percent", value=percent)
        if not done and run.stopped is None:
            raise Interrupted("stopped")
        if not done and options.phase == "work":
            raise Unfinished(f"the run was ended: {run.stopped}")

    def _order(self) -> Order:
        options = self._options
        output = self._open(options.output, folder=True)
        if options.input is not None:
            _refuse_own_results(self._open(options.input), output, options.input)
        return Order(
            output=output,
            endpoint=options.endpoint,
            input=None if options.input is None else self._open(options.input),
            completes=None if options.retry_failed is None else self._open(options.retry_failed, folder=True),
            open_uri=self._open,
            model=options.model,
            priority=options.priority,
            strict=options.on_invalid_line == "fail",
            overwrite=options.overwrite,
            run=options.run_id,
            allow_unfenced=options.allow_unfenced,
            max_error_percent=options.max_error_percent,
            begun=options.phase in ("work", "merge"),
            patience=self._patience,
            cut=options.cut,
            pace=options.pace,
        )

    def _open(self, uri: str, *, folder: bool = False) -> Location:
        try:
            place = open_uri(uri if not folder or uri.endswith("/") else uri + "/", patience=self._patience)
        except StoreError as error:
            raise from_store(error, reading=not folder) from error
        return Location(InstrumentedStore(place.store, self._progress), place.key) if isinstance(place.store, S3Store) else place

    async def _show_while(self, work: Coroutine[Any, Any, T] | asyncio.Future[T]) -> T:
        """Await `work` and keep the display fresh."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                self._shown.working(self._progress)
                await asyncio.wait([task], timeout=self._shown.refresh_s)
        except asyncio.CancelledError:
            task.cancel()
            return await task  # cleans up and raises
        self._shown.working(self._progress)
        return task.result()


def _ended(manifest: Manifest, options: Options) -> RunEnded:
    """Why work is not planned that will never be done. Whoever comes later in a run finds its results, however it ended."""
    told = manifest.request_counts
    how = {"cancelled": "was cancelled", "expired": "has expired", "failed": "has failed", "too-many-errors": "had too many errors"}
    return RunEnded(
        f"run {manifest.run} {how[manifest.outcome]} and has published what was done by then; "
        f"{told.total - told.completed - told.failed} of {_so_many(told.total, 'request')} were not run",
        value=options.output,
        hint="give this output as --retry-failed, with another --output: that runs them, and those that failed",
    )


def _refuse_own_results(source: Location, output: Location, named: str) -> None:
    """What is read must not be what is written."""
    place, results = _place(source), _place(output)
    if place in [f"{results}/{name}" for name in (OUTPUT, ERRORS, MANIFEST)]:
        raise InvalidSpec("it is one of the files that results are written to", field="--input", value=named, hint=OTHER)
    if place == results:
        raise InvalidSpec("it is the folder that results are written to", field="--input", value=named, hint=OTHER)
    if f"{place}/".startswith(f"{results}/{FOLDER}/"):
        raise InvalidSpec(f"{FOLDER}/ holds what runs remember of their work; give a file of requests", field="--input", value=named)


def _place(where: Location) -> str:
    store = where.store
    if isinstance(store, LocalStore):
        return str((store.path(where.key) if where.key else store.root).resolve())
    return where.uri.rstrip("/")


async def _briefly(work: Coroutine[Any, Any, None]) -> None:
    """Do it if it takes no time: the process is about to end."""
    with contextlib.suppress(Exception):
        await asyncio.wait_for(work, 2.0)


async def _while_alive(batch: Coroutine[None, None, None], server: OwnServer) -> None:
    """The result of `batch`, unless our own server ends before."""
    running, watching = asyncio.ensure_future(batch), asyncio.ensure_future(server.watch())
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.wait([running, watching], return_when=asyncio.FIRST_COMPLETED)
    running.cancel()  # it records what is finished
    watching.cancel()
    await asyncio.wait([running, watching])
    if running.cancelled() and not watching.cancelled():
        watching.result()
    return running.result()


@contextlib.asynccontextmanager
async def _server(options: Options) -> AsyncIterator[str | OwnServer]:
    if options.model_path is None:
        assert options.server is not None
        yield options.server
        return
    names = () if options.model is None else ("--served-model-name", options.model)
    vectors = ("--enable-embeddings",) if options.endpoint == "/v1/embeddings" else ()
    async with own_server(options.model_path, (*names, *vectors, *options.server_arguments)) as server:
        yield server

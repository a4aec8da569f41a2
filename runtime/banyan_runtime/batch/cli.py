"""`banyan-runtime batch`: the order of things, signals, last words and exit codes."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import traceback
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, Final, TypeVar

import msgspec
import uvloop

from banyan_runtime.batch import sink as sinks
from banyan_runtime.batch.client import Client
from banyan_runtime.batch.display import Display, display
from banyan_runtime.batch.errors import Interrupted, from_store
from banyan_runtime.batch.instrumented import InstrumentedStore
from banyan_runtime.batch.lines import LineParser
from banyan_runtime.batch.options import Options, parse
from banyan_runtime.batch.progress import Progress
from banyan_runtime.batch.records import MANIFEST, OUTPUT, Manifest
from banyan_runtime.batch.server import OwnServer, own_server, wait_ready
from banyan_runtime.batch.source import Scan, Source
from banyan_runtime.batch.status import serve_status
from banyan_runtime.batch.worker import Job, Worker, check
from banyan_runtime.errors import UserError
from banyan_runtime.server import termination
from banyan_runtime.storage.open import Location, open_uri
from banyan_runtime.storage.s3 import S3Store
from banyan_runtime.storage.store import StoreError

EXIT_SIGINT: Final = 130

T = TypeVar("T")


def main(argv: Sequence[str]) -> int:
    """Run one batch; returns the exit code."""
    progress = Progress()
    try:
        manifest = uvloop.run(_until_signal(parse(argv), progress))
    except UserError as error:
        termination.write_termination(_words(progress, type(error).__name__, str(error)))
        termination.say(f"FATAL: {error}")
        return error.exit_code
    except Exception as error:
        termination.write_termination(_words(progress, "InternalError", f"{type(error).__name__}: {error}"))
        termination.say(traceback.format_exc().rstrip())
        return termination.EXIT_INTERNAL
    counts = manifest.request_counts
    message = f"{counts.completed} of {counts.total} requests completed, {counts.failed} failed"
    words = {"code": "Succeeded", "message": message, "output": manifest.output.uri, "errors": manifest.errors.uri}
    words["manifest"] = manifest.output.uri.removesuffix(OUTPUT) + MANIFEST
    termination.write_termination(words | {"requestCounts": msgspec.to_builtins(counts), "usage": msgspec.to_builtins(manifest.usage)})
    files = [f"{file.uri}  {file.lines} lines, {file.bytes} bytes" for file in (manifest.output, manifest.errors)]
    termination.say("\n".join([message, *files]))
    return 0


def _words(progress: Progress, code: str, message: str) -> dict[str, Any]:
    """The termination message of a run that has counted so far."""
    counts, usage = msgspec.to_builtins(progress.counts), msgspec.to_builtins(progress.usage)
    return {"code": code, "message": message, "requestCounts": counts, "usage": usage}


async def _until_signal(options: Options, progress: Progress) -> Manifest:
    """Run; SIGTERM and Ctrl-C cancel the run, which then leaves nothing behind."""
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(_run(options, progress))
    received: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        if not received:  # a second signal must not disturb the cleaning up
            task.cancel()
        received.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    try:
        return await task
    except asyncio.CancelledError:
        if not received:
            raise
        error = Interrupted(f"stopped by {received[0].name}; nothing was published")
        error.exit_code = EXIT_SIGINT if received[0] is signal.SIGINT else Interrupted.exit_code
        raise error from None


async def _run(options: Options, progress: Progress) -> Manifest:
    """Fail early and cheaply: key, input and output are looked at before a server is started or waited for."""
    shown = display()
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(shown.close)
        if options.progress_port is not None:
            port = await stack.enter_async_context(serve_status(progress, options.progress_host, options.progress_port))
            shown.say(f"progress and metrics on http://{options.progress_host}:{port}/progress and /metrics")
        api_key = options.api_key()
        source = await asyncio.to_thread(lambda: Source.find(_open(options.input, progress)))
        output = _open(options.output, progress, folder=True)
        outputs = await asyncio.to_thread(lambda: sinks.prepare(output, run=options.run_id, overwrite=options.overwrite))
        if isinstance(outputs, Manifest):
            shown.say("this run has published its results already")
            return outputs
        if not outputs.fenced:
            shown.say(f"warning: {output.uri} is in a storage without conditional writes; let no second run write there")
        async with _server(options) as server:
            batch = _batch(options, server, api_key, source, outputs, progress, shown)
            return await (batch if isinstance(server, str) else _while_alive(batch, server))


async def _batch(
    options: Options,
    server: str | OwnServer,
    api_key: str | None,
    source: Source,
    outputs: sinks.Outputs,
    progress: Progress,
    shown: Display,
) -> Manifest:
    """Check the input while the server gets ready, then run."""
    parser = LineParser(options.endpoint, options.model)
    scanning = asyncio.ensure_future(asyncio.to_thread(_scan, source, parser, options.on_invalid_line == "fail"))
    try:
        url = server if isinstance(server, str) else server.url
        await wait_ready(url, shown, patience_s=options.server_timeout)
        if isinstance(server, OwnServer):
            parser = LineParser(options.endpoint, await server.model_name())  # it has but one, whatever the lines call it
        scan = await _shown(scanning, progress, shown)
    except BaseException:
        source.stop()
        scanning.cancel()
        raise
    if not scan.all_ids_checked:
        shown.say("warning: the input is too long to check all custom_ids; later duplicates are sent")
    job = Job(options.run_id, options.endpoint, options.max_concurrency, options.policy)
    sink = await asyncio.to_thread(sinks.Sink, outputs, options.run_id)
    async with Client(url, options.endpoint, api_key=api_key, timeout_s=options.request_timeout) as client:
        run = Worker(job, client, sink, progress).run(source, parser, scan)
        return await _shown(asyncio.ensure_future(run), progress, shown)


def _scan(source: Source, parser: LineParser, strict: bool) -> Scan:
    scan = source.scan(parser)
    if strict:
        check(scan, source, parser)
    return scan


async def _shown(task: asyncio.Future[T], progress: Progress, shown: Display) -> T:
    """Await `task` and keep the display fresh."""
    try:
        while not task.done():
            shown.working(progress)
            await asyncio.wait([task], timeout=shown.refresh_s)
    except asyncio.CancelledError:
        task.cancel()
        return await task  # cleans up and raises, or carries a publication to its end
    shown.working(progress)
    return task.result()


async def _while_alive(batch: Coroutine[None, None, Manifest], server: OwnServer) -> Manifest:
    """The result of `batch`, unless our own server ends before."""
    running, watching = asyncio.ensure_future(batch), asyncio.ensure_future(server.watch())
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.wait([running, watching], return_when=asyncio.FIRST_COMPLETED)
    running.cancel()  # it cleans up, or carries a publication to its end
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
    async with own_server(options.model_path, (*names, *options.server_arguments)) as server:
        yield server


def _open(uri: str, progress: Progress, *, folder: bool = False) -> Location:
    try:
        place = open_uri(uri if not folder or uri.endswith("/") else uri + "/")
    except StoreError as error:
        raise from_store(error, reading=not folder) from error
    return Location(InstrumentedStore(place.store, progress), place.key) if isinstance(place.store, S3Store) else place

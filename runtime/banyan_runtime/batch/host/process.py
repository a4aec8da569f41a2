"""The batch host: `python -m banyan_runtime.batch.host.process`, started by the server with a `Boot` on standard input.

That pipe stays open for as long as the server lives, so its end is the sign to go. The host keeps nothing that is not in storage.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from pathlib import Path
from typing import Final, NoReturn

import msgspec
import uvloop
from aiohttp import web

from banyan_runtime import logs
from banyan_runtime.batch import identity
from banyan_runtime.batch.host.batches import Batches
from banyan_runtime.batch.host.boot import Boot
from banyan_runtime.batch.host.files import Files
from banyan_runtime.batch.host.keeper import Keeper
from banyan_runtime.batch.host.refusals import is_full
from banyan_runtime.batch.host.reserve import Reserve
from banyan_runtime.batch.host.routes import HEAD_LINE_BYTES, LIMITS, Limits, Routes
from banyan_runtime.batch.host.runner import Runner
from banyan_runtime.batch.host.running import BatchRunner
from banyan_runtime.batch.host.shelf import Storage
from banyan_runtime.batch.host.tally import Tally
from banyan_runtime.batch.instrumented import InstrumentedStore
from banyan_runtime.process import end_with_input
from banyan_runtime.storage.home import HomeStore, make_home
from banyan_runtime.storage.local import LocalStore
from banyan_runtime.storage.open import open_uri
from banyan_runtime.storage.patience import Patience
from banyan_runtime.storage.store import StoreError

log = logging.getLogger("banyan")

EXIT_STORAGE: Final = 75
PATIENCE_S: Final = 20.0  # clients wait for what is read and written here


class Host:
    """The parts of one host, over any runner."""

    def __init__(self, boot: Boot, storage: Storage, runner: Runner, tally: Tally | None = None, limits: Limits = LIMITS) -> None:
        self.batches = Batches(storage)
        self.files = Files(storage, self.batches.inputs)
        self.keeper = Keeper(
            storage,
            self.batches,
            self.files,
            runner,
            owner=identity.own_name(),
            models=boot.models,
            tally=tally,
        )
        self.app = Routes(storage, self.files, self.batches, self.keeper, limits, boot.endpoints).app()


def open_storage(uri: str, patience: Patience, tally: Tally) -> Storage:
    """Raises StoreError."""
    place = open_uri(uri if uri.endswith("/") else uri + "/", patience=patience)
    if isinstance(place.store, LocalStore):
        return Storage(HomeStore(place.store.root, patience), place.key, Reserve(place.store.root))
    return Storage(InstrumentedStore(place.store, tally), place.key, Reserve(None))


def begin_storage(boot: Boot) -> None:
    """Make a local folder ours. A host that follows another does not: a folder that is no longer there has vanished. Raises OSError,
    and StoreError.
    """
    store = open_storage(boot.storage, Patience(0.0), Tally()).store
    if isinstance(store, HomeStore) and not boot.follows:
        make_home(store.root)
    if isinstance(store, HomeStore):
        store.check()


async def serve(boot: Boot) -> None:
    """Until the server ends. At SIGTERM batches are left to whoever comes next; requests are still answered."""
    begin_storage(boot)
    tally = Tally()
    storage = open_storage(boot.storage, Patience(PATIENCE_S), tally)
    batches = BatchRunner(boot, lambda patience: open_storage(boot.storage, patience, tally).store, tally)
    try:
        await _serve(boot, storage, Host(boot, storage, batches, tally), tally)
    finally:
        batches.close()


async def _serve(boot: Boot, storage: Storage, host: Host, tally: Tally) -> NoReturn:
    keeping = asyncio.create_task(host.keeper.run())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, keeping.cancel)
    runner = web.AppRunner(host.app, access_log=None, handle_signals=False, max_line_size=HEAD_LINE_BYTES, max_field_size=HEAD_LINE_BYTES)
    await runner.setup()
    await web.UnixSite(runner, boot.socket, backlog=512).start()
    os.write(1, b"listening\n")
    log.info("files and batches are kept in %s", storage.store.uri(storage.below))
    telling = asyncio.create_task(tally.tell(1))
    with contextlib.suppress(asyncio.CancelledError):
        await keeping
    await telling
    await asyncio.Event().wait()
    raise AssertionError("nobody sets it")


def main() -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C reaches the whole group; the server drains, then tells us
    line = bytearray()
    while not line.endswith(b"\n"):
        if not (piece := os.read(0, 65536)):
            os._exit(0)
        line += piece
    boot = msgspec.json.decode(bytes(line), type=Boot)

    def forget_socket() -> None:
        path = Path(boot.socket)
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
            path.parent.rmdir()

    end_with_input(forget_socket)
    logs.configure("batch", level=boot.log_level, form=boot.log_format)
    try:
        uvloop.run(serve(boot))
    except (StoreError, OSError) as error:
        why = f"{error} (the disk is full)" if is_full(error) else str(error)
        log.error("files and batches cannot be kept in %s: %s; name another place by --file-storage-path", boot.storage, why)
        logs.exit_now(EXIT_STORAGE)
    except Exception:
        log.exception("the batch host failed")
        logs.exit_now(1)
    logs.exit_now(0)


if __name__ == "__main__":
    main()

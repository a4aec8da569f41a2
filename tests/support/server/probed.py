"""`banyan-runtime serve` with a probe in its event loop: whatever computes for long between two turns of it is written to the file
$PROBE_LOG, a line of milliseconds each.

The probe measures the computing time of the loop's thread, not the time on the wall, so a busy machine does not show.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time

from banyan_runtime.cli import main
from banyan_runtime.server.serve import Server

TOLD_MS = 5.0

_log = os.open(os.environ["PROBE_LOG"], os.O_WRONLY | os.O_CREAT)
_run = Server.run


async def _probe() -> None:
    last = time.thread_time()
    while True:
        await asyncio.sleep(0.001)
        now = time.thread_time()
        if (took := 1000 * (now - last)) > TOLD_MS:
            os.write(_log, b"%.1f\n" % took)
        last = now


async def _probed(server: Server) -> int:
    probe = asyncio.create_task(_probe())
    try:
        return await _run(server)
    finally:
        probe.cancel()


Server.run = _probed  # type: ignore[method-assign]

if __name__ == "__main__":
    sys.exit(main())

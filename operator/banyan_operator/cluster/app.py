"""`banyan-operator run`: lives of the operator, one after another in one process, until it is told to end."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, cast

import kopf

from banyan_operator import __version__
from banyan_operator.cluster import connection, handlers
from banyan_operator.cluster.client import Api
from banyan_operator.cluster.connection import Connection, NoClusterError
from banyan_operator.cluster.deadman import Deadman
from banyan_operator.cluster.leader import LeaseLostError
from banyan_operator.cluster.life import LEASE, Life
from banyan_operator.cluster.metrics import Metrics
from banyan_operator.cluster.namespaces import NamespacesChangedError, reachable
from banyan_operator.cluster.options import EXIT_CONFIG, Options, parse
from banyan_operator.kube.addresses import in_url

log = logging.getLogger(__name__)

EXIT_LEASE_LOST: Final = 1
RESTART_CAP_S: Final = 30.0
LONG_LIFE_S: Final = 600.0  # after so long the next delay is short again


def main(argv: Sequence[str] | None = None) -> int:
    """Run until SIGTERM (exit code 0) or until the lease is lost (1); 64 where no cluster is named."""
    options = parse(sys.argv[1:] if argv is None else argv, os.environ)
    logging.basicConfig(
        level=options.log_level.upper(), format="[%(asctime)s] %(levelname)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S", stream=sys.stderr
    )
    for noisy in ("kopf", "asyncio", "aiohttp"):
        logging.getLogger(noisy).setLevel(logging.WARNING if options.log_level != "debug" else logging.DEBUG)
    logging.getLogger("kubernetes").setLevel(logging.ERROR)  # what it warns of, its exceptions say
    try:
        connection.check()
    except NoClusterError as error:
        print(f"banyan-operator run: {error}", file=sys.stderr)
        return EXIT_CONFIG
    metrics, failures = Metrics(__version__), 0
    deadman = Deadman()
    while True:
        began = time.monotonic()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # between lives, where kopf has taken its own handler away
        try:
            asyncio.run(live(options, metrics, deadman))
            return 0
        except LeaseLostError:
            return EXIT_LEASE_LOST
        except NamespacesChangedError as change:
            log.warning("%s: another life of the operator begins", change)
            deadman.disarm()
            continue
        except Exception as error:
            log.error("this life of the operator ended: %s: %s", type(error).__name__, error)
        metrics.restarts.inc()
        deadman.disarm()
        failures = 0 if time.monotonic() - began > LONG_LIFE_S else failures + 1
        time.sleep(min(RESTART_CAP_S, 2.0 ** (failures - 1)) * random.uniform(0.5, 1.0) if failures else 0.0)


async def live(options: Options, metrics: Metrics, deadman: Deadman) -> None:
    """One life. Returns when a signal ended it; raises what else did."""
    connected = Connection(await connection.load())
    present = await _reachable(options, metrics, connected)
    absent = frozenset(options.namespaces) - frozenset(present)
    options = replace(options, namespaces=present)
    life = Life(options, metrics, deadman, connected, absent)
    await kopf.operator(
        registry=handlers.declare(life),
        settings=handlers.settings(),
        identity=cast(Any, "banyan-operator"),  # else kopf asks for the user's name, which a pod may not have
        clusterwide=not options.namespaces,
        namespaces=options.namespaces,
        stop_flag=life.ended,
        liveness_endpoint=f"http://{in_url(options.host)}:{options.probe_port}/livez" if options.probe_port else None,
    )
    if life.error is not None:
        raise life.error


async def _reachable(options: Options, metrics: Metrics, connected: Connection) -> tuple[str, ...]:
    """The namespaces that can be looked after; all, if none can: then something else is wrong."""
    api = Api(connected, metrics.observe_call)
    try:
        return await reachable(api, options.namespaces, LEASE if options.leader_election else None) or options.namespaces
    finally:
        await api.close()


if __name__ == "__main__":
    sys.exit(main())

"""`banyan-operator run`: one operator, until a signal ends it or it cannot go on. A Deployment starts it again."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, cast

import kopf

from banyan_operator import __version__, operator
from banyan_operator.cluster.client import Api
from banyan_operator.cluster.connection import Connection, NoClusterError, check, load
from banyan_operator.cluster.deadman import Deadman
from banyan_operator.cluster.manager import LEASE, Manager
from banyan_operator.cluster.metrics import Metrics
from banyan_operator.cluster.namespaces import reachable
from banyan_operator.cluster.options import EXIT_CONFIG, Options, parse
from banyan_operator.kube.addresses import in_url

log = logging.getLogger(__name__)

EXIT_ENDED: Final = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run until SIGTERM (exit code 0), or until it cannot go on (1): a watch or the lease is lost, say. 64 where no cluster is named."""
    options = parse(sys.argv[1:] if argv is None else argv, os.environ)
    logging.basicConfig(
        level=options.log_level.upper(), format="[%(asctime)s] %(levelname)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S", stream=sys.stderr
    )
    for noisy in ("kopf", "asyncio", "aiohttp"):
        logging.getLogger(noisy).setLevel(logging.WARNING if options.log_level != "debug" else logging.DEBUG)
    logging.getLogger("kubernetes").setLevel(logging.ERROR)  # what it warns of, its exceptions say
    try:
        check()
    except NoClusterError as error:
        print(f"banyan-operator run: {error}", file=sys.stderr)
        return EXIT_CONFIG
    try:
        asyncio.run(_run(options))
    except Exception as error:
        log.error("the operator ends: %s: %s", type(error).__name__, error)
        return EXIT_ENDED
    return 0


async def _run(options: Options) -> None:
    """Return when a signal ended the operator. Raises what else did."""
    metrics = Metrics(__version__)
    connection = Connection(await load())
    present = await _reachable(options, metrics, connection)
    absent = frozenset(options.namespaces) - frozenset(present)
    manager = Manager(replace(options, namespaces=present), metrics, Deadman(), connection, absent)
    try:
        await kopf.operator(
            memo=kopf.Memo(manager=manager),
            settings=operator.settings(),
            identity=cast(Any, "banyan-operator"),  # else kopf asks for the user's name, which a pod may not have
            clusterwide=not present,
            namespaces=present,
            stop_flag=manager.ended,
            liveness_endpoint=f"http://{in_url(options.host)}:{options.probe_port}/livez" if options.probe_port else None,
        )
    finally:
        if manager.error is not None:
            raise manager.error


async def _reachable(options: Options, metrics: Metrics, connection: Connection) -> tuple[str, ...]:
    """The namespaces that can be looked after; all, if none can: then something else is wrong."""
    api = Api(connection, metrics.observe_call)
    try:
        return await reachable(api, options.namespaces, LEASE if options.leader_election else None) or options.namespaces
    finally:
        await api.close()


if __name__ == "__main__":
    sys.exit(main())

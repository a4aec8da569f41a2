"""`banyan-operator run`: puts the parts together, and their life cycle: watch, list, lead, work, stop."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from banyan_operator import __version__
from banyan_operator.cluster.carry import Carrier
from banyan_operator.cluster.client import Api
from banyan_operator.cluster.driver import Driver
from banyan_operator.cluster.events import Recorder
from banyan_operator.cluster.health import Health
from banyan_operator.cluster.kinds import RESOURCES, Kind
from banyan_operator.cluster.leader import Lease, LeaseLostError
from banyan_operator.cluster.metrics import Metrics, QueueCollector, StoreCollector
from banyan_operator.cluster.observe import Observer
from banyan_operator.cluster.pods import Pods
from banyan_operator.cluster.queue import WorkQueue
from banyan_operator.cluster.resync import Resync
from banyan_operator.cluster.store import Store
from banyan_operator.cluster.watch import Watches
from banyan_operator.plan import Settings
from banyan_operator.reconcile import reconcile

log = logging.getLogger(__name__)

LEASE: Final = "banyan-operator"
STOP_S: Final = 5.0  # for the writes in progress, once asked to stop
EXIT_CONFIG: Final = 64
EXIT_LEASE_LOST: Final = 1


@dataclass(frozen=True)
class Options:
    """What the command line and the environment say."""

    namespaces: tuple[str, ...]
    runtime_image: str
    image_pull_policy: str
    image_pull_secrets: tuple[str, ...]
    lease_namespace: str
    leader_election: bool
    workers: int
    resync_s: float
    host: str
    port: int
    log_level: str


def parse(argv: Sequence[str], env: Mapping[str, str]) -> Options:
    """Flags win over the environment. Ends the process with code 64 where they make no sense."""
    parser = argparse.ArgumentParser(prog="banyan-operator run", description="Run the operator in, or beside, a Kubernetes cluster.")

    def add(flag: str, variable: str, default: str, text: str, **more: Any) -> None:
        parser.add_argument(flag, default=env.get(variable, default), help=f"{text} [{variable}, default {default or 'none'}]", **more)

    add("--namespaces", "BANYAN_NAMESPACES", "", "namespaces to look after, separated by commas; none: the whole cluster")
    add("--runtime-image", "BANYAN_RUNTIME_IMAGE", "", "image of servers and workers whose spec names none")
    add("--image-pull-policy", "BANYAN_IMAGE_PULL_POLICY", "IfNotPresent", "of that image", choices=("Always", "IfNotPresent", "Never"))
    add("--image-pull-secrets", "BANYAN_IMAGE_PULL_SECRETS", "", "Secrets to pull that image with, separated by commas")
    add("--lease-namespace", "POD_NAMESPACE", "default", "where the lease of the leader is")
    add("--workers", "BANYAN_WORKERS", "8", "reconciles at a time", type=int)
    add("--resync-seconds", "BANYAN_RESYNC_SECONDS", "60", "everything is looked at again after so long", type=float)
    add("--host", "BANYAN_HOST", "127.0.0.1", "address of /livez, /readyz and /metrics")
    add("--port", "BANYAN_PORT", "8080", "port of these; 0 takes a free one", type=int)
    add("--log-level", "BANYAN_LOG_LEVEL", "info", "log level", choices=("debug", "info", "warning", "error"))
    parser.add_argument("--no-leader-election", action="store_true", help="act at once; only where no other operator runs")
    try:
        args = parser.parse_args(list(argv))
        if not args.runtime_image:
            parser.error("--runtime-image (or BANYAN_RUNTIME_IMAGE) is required: the image that servers and workers run")
        if args.workers < 1 or args.resync_seconds < 1:
            parser.error("--workers and --resync-seconds must be at least 1")
    except SystemExit as stop:
        sys.exit(EXIT_CONFIG if stop.code else 0)
    return Options(
        namespaces=_words(args.namespaces),
        runtime_image=args.runtime_image,
        image_pull_policy=args.image_pull_policy,
        image_pull_secrets=_words(args.image_pull_secrets),
        lease_namespace=args.lease_namespace,
        leader_election=not args.no_leader_election,
        workers=args.workers,
        resync_s=args.resync_seconds,
        host=args.host,
        port=args.port,
        log_level=args.log_level,
    )


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def main(argv: Sequence[str] | None = None) -> int:
    """Run until SIGTERM (exit code 0) or until the lease is lost (1)."""
    options = parse(sys.argv[1:] if argv is None else argv, os.environ)
    logging.basicConfig(
        level=options.log_level.upper(), format="[%(asctime)s] %(levelname)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S", stream=sys.stderr
    )
    for noisy in ("kopf", "asyncio", "aiohttp"):
        logging.getLogger(noisy).setLevel(logging.WARNING if options.log_level != "debug" else logging.DEBUG)
    logging.getLogger("kopf._core.reactor.running").setLevel(logging.ERROR)  # it warns that the signals are ours
    return asyncio.run(run(options))


async def run(options: Options) -> int:
    metrics = Metrics(__version__)
    api = await Api.connect(metrics.observe_call)
    identity = f"{os.environ.get('POD_NAME') or os.uname().nodename}_{uuid.uuid4()}"
    store, asked = Store(), Pods()
    queue = WorkQueue(time.monotonic)
    metrics.registry.register(StoreCollector(store))
    metrics.registry.register(QueueCollector(queue))
    driver = Driver(
        store=store,
        queue=queue,
        api=api,
        observer=Observer(store, api, asked),
        carrier=Carrier(store, api, Recorder(api), metrics),
        metrics=metrics,
        settings=Settings(
            runtime_image=options.runtime_image,
            operator_version=__version__,
            image_pull_policy=options.image_pull_policy,
            image_pull_secrets=options.image_pull_secrets,
        ),
        reconcile=reconcile,
    )
    health = Health(metrics, lambda: driver.last_beat)
    port = await health.start(options.host, options.port)
    log.info("banyan-operator %s on %s, /livez /readyz /metrics on %s:%d", __version__, api.host, options.host, port)

    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    def seen(kind: Kind, type_: str | None, manifest: Mapping[str, Any]) -> None:
        loop.call_soon_threadsafe(driver.seen, kind, type_, manifest)

    watches = Watches(seen, options.namespaces, identity, metrics.restarts.inc)
    resync = Resync(store, queue, api, metrics, options.namespaces, driver.changed, options.resync_s)
    lease = Lease(api, options.lease_namespace, LEASE, identity) if options.leader_election else None
    watches.start()
    life = asyncio.create_task(live(options, driver, resync, lease, health, metrics))
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((life, stopped), return_when=asyncio.FIRST_COMPLETED)
        if life.done():
            life.result()
        log.info("stopping")
        return 0
    except LeaseLostError as error:
        log.error("%s; ending, so that nothing is written any more", error)
        return EXIT_LEASE_LOST
    finally:
        life.cancel()
        await asyncio.gather(life, return_exceptions=True)
        if lease is not None and health.leading:
            await lease.release()
        await loop.run_in_executor(None, watches.stop)
        await asked.close()
        await health.stop()
        await api.close()


async def live(options: Options, driver: Driver, resync: Resync, lease: Lease | None, health: Health, metrics: Metrics) -> None:
    """Sync, lead, work, for ever. Cancelled: the writes in progress are finished first."""
    await resync.everything()
    health.synced = True
    if lease is not None:
        await lease.acquire()
        await resync.everything()  # who stood by for long decides on what is, not on what the watches remember
    health.leading = True
    driver.last_beat = time.monotonic()
    metrics.leader.set(1)
    for kind in RESOURCES:
        metrics.most.labels(kind.kind.lower()).set(options.workers)
    tasks = [asyncio.create_task(driver.work()) for _ in range(options.workers)]
    keepers = [asyncio.create_task(resync.run())]
    if lease is not None:
        keepers.append(asyncio.create_task(lease.hold()))
    try:
        done, _ = await asyncio.wait((*tasks, *keepers), return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    except asyncio.CancelledError:
        await driver.drain(STOP_S)
        raise
    finally:
        for task in (*tasks, *keepers):
            task.cancel()
        await asyncio.gather(*tasks, *keepers, return_exceptions=True)


if __name__ == "__main__":
    sys.exit(main())

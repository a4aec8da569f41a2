"""One schedule after another: a cluster, its actors, an operator that is killed and replaced, then rest, and what has to be true then.

python -m tests.simulation.operator.run --seed 17 --trace      one schedule, told in virtual time
python -m tests.simulation.operator.run --count 10000          many
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import logging
import random
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from banyan_operator.cluster.resync import EVERY_S
from banyan_operator.kube import kinds
from banyan_operator.kube.kinds import Kind, Manifest
from banyan_operator.kube.objects import Key
from tests.simulation.operator.actors import NAMESPACE, Actors
from tests.simulation.operator.calls import Weather
from tests.simulation.operator.checks import Checks
from tests.simulation.operator.loop import VirtualLoop, run
from tests.simulation.operator.operators import METRICS, VERSIONS, Operator
from tests.simulation.operator.watches import Hub
from tests.support.kube.apiserver import Server
from tests.support.kube.controllers import Cluster

REST_S = 12.0  # after the last move, before it is looked at for the first time
LOOK_AGAIN_S = 10.0
MOST_CALLS = 5_000  # of one schedule; a hundred are usual
SETTLED_S = 12.0  # what was written last may still be told, and what moved was to be looked at again after 10 s
PATIENCE_S = 700.0  # of a reconcile's longest back-off, and then some


class Violation(AssertionError):
    """Something that must never be, was."""


@dataclass
class Totals:
    schedules: int = 0
    calls: int = 0
    kills: int = 0
    virtual_s: float = 0.0
    seen: Counter[str] = field(default_factory=Counter)
    """How often what was done, answered, told."""


class Simulation:
    """One schedule, drawn from one seed."""

    def __init__(self, seed: int, *, tracing: bool = False) -> None:
        self.seed, self.tracing = seed, tracing
        self.rng = rng = random.Random(seed)
        self.loop = VirtualLoop()
        self.server = Server(self.loop, rng)
        self.hub = Hub(self.server)
        self.weather = Weather(latency_s=rng.choice((0.002, 0.05, 0.5)))
        self.strangers: set[str] = set()
        self.kills = 0
        self.resting = False
        self.calls = 0
        self.seen: Counter[str] = Counter()
        self.asked = 0  # of these, those that were neither lists nor watches
        self.last_asked = ""
        self.watch_trouble = rng.choice((0.0, 0.0, 0.1))
        self._lag_s = rng.choice((0.01, 0.3, 3.0))
        self._lags: dict[str, float] = {}
        self.checks = Checks(self)
        self.cluster = Cluster(self)
        self.cluster.crashes = rng.choice((0.0, 0.0, 0.2))
        servers = [("InferenceServer", "a")]
        self.names = rng.choice(
            (
                servers,
                [*servers, ("InferenceServer", "a-pods")],
                [*servers, ("BatchJob", "b")],
                [("BatchJob", "a")],
                [("BatchJob", "a")],
                [*servers, ("BatchJob", "a")],
            )
        )
        self.actors = Actors(self)
        self.version = rng.randrange(len(VERSIONS))
        self._numbers = 0
        self._repairs_before = _repairs()
        self._failed: asyncio.Future[None] = self.loop.create_future()
        self.operator = Operator(self, 0, VERSIONS[self.version])  # it never starts

    # --- the run ---

    def run(self) -> None:
        try:
            run(self._main(), self.loop)
        except Violation:
            raise
        except Exception as error:
            raise Violation(f"the simulation itself failed: {type(error).__name__}: {error}") from error

    async def _main(self) -> None:
        director = self.loop.create_task(self._direct())
        await asyncio.wait((director, self._failed), return_when=asyncio.FIRST_COMPLETED)
        if self._failed.done():
            director.cancel()
            await self._failed
        await director

    async def _direct(self) -> None:
        rng = self.rng
        for kind, name in ((kinds.CLAIM, "models"), (kinds.CLAIM, "batches"), (kinds.CONFIG_MAP, "theirs")):
            meta = {"name": name, "namespace": NAMESPACE}
            self.server.create({"apiVersion": "v1", "kind": kind.kind, "metadata": meta, "spec": {}})
        if rng.random() < 0.5:
            self.actors.populate()
        self.weather.storm = rng.choice((0.0, 0.0, 0.05, 0.3))
        self.replace(after_s=0.0, other=False, first=True)
        await asyncio.sleep(rng.random())
        if rng.random() < 0.8:
            self.actors.populate()
        for _ in range(rng.randrange(1, 8)):
            await asyncio.sleep(rng.choice((0.01, 0.3, 3.0, 20.0)) * rng.random())
            self.actors.move()
        await self._rest()

    async def _rest(self) -> None:
        self.trace("— rest")
        self.resting = True
        self.weather.clear()
        self.cluster.crashes = self.cluster.silence = 0.0
        self.operator.calls_left = None
        until = self.loop.now + PATIENCE_S
        while not self.operator.leads:
            if self.loop.now > until:
                self.fail("the operator does not begin")
            await asyncio.sleep(LOOK_AGAIN_S)
        await asyncio.sleep(REST_S)
        until, wait_s = self.loop.now + PATIENCE_S, LOOK_AGAIN_S
        while (problem := self.checks.unrest()) is not None:
            if self.loop.now > until:
                self.fail(problem)
            await asyncio.sleep(wait_s)
            wait_s *= 1.5
        await asyncio.sleep(SETTLED_S)
        until += PATIENCE_S
        while self.operator.queue.backlog.working:
            if self.loop.now > until:
                self.fail(f"work without end: {self.operator.queue.backlog.working}")
            await asyncio.sleep(SETTLED_S)
        self.trace("— at rest")
        asked, at_ease, quiet_s = self.asked, self.checks.at_ease(), self.rng.choice((30.0,) * 9 + (300.0,))
        looks = 0 if quiet_s < EVERY_S else len(self.server.of(kinds.CLAIM))  # a resync reads others' claims again
        await asyncio.sleep(quiet_s)
        if self.asked - asked > looks and at_ease and self.checks.at_ease():
            self.fail(f"{self.asked - asked} calls in {quiet_s:.0f} s at rest, the last: {self.last_asked}")
        if (problem := self.checks.unrest()) is not None:
            self.fail(f"no rest: {problem}")

    def replace(self, after_s: float, *, other: bool, first: bool = False) -> None:
        """The operator dies, here and now, and some time later another one starts."""
        if not first:
            if self.operator.dead:
                return
            self.trace(f"{self.operator} dies")
            self.operator.kill()
            self.kills += 1
        if other:
            self.version = self.rng.randrange(len(VERSIONS))
        self._numbers += 1
        self.operator = Operator(self, self._numbers, VERSIONS[self.version])
        self.loop.call_later(after_s, self.operator.start)

    def lag_of(self, kind: Kind) -> float:
        if kind.kind not in self._lags:
            self._lags[kind.kind] = self._lag_s * self.rng.choice((0.1, 1.0, 3.0))
        return self._lags[kind.kind]

    def repairs(self) -> float:
        return _repairs() - self._repairs_before

    @property
    def attentive(self) -> bool:
        """Whether one operator has seen everything so far: none was killed, and no watch has missed anything."""
        missed = self.watch_trouble or any(self.seen[what] for what in ("stalls_a_watch", "loses_a_watch", "strips_labels"))
        return not (self.kills or missed)

    def saw(self, what: str) -> None:
        self.seen[what] += 1

    def trace(self, text: str) -> None:
        if self.tracing:
            self.tell(f"{self.loop.now:9.3f}  {text}")

    tell: Callable[[str], None] = staticmethod(print)

    def fail(self, text: str, error: BaseException | None = None) -> None:
        """The first of several is what counts."""
        self.trace(f"VIOLATION {text}")
        if error is not None:
            text += "\n" + "".join(traceback.format_exception(error))
        if not self._failed.done():
            self._failed.set_exception(Violation(text))

    # --- what the operator does ---

    def on_call(self, operator: Operator, verb: str, kind: Kind, key: Key | None) -> None:
        self.calls += 1
        if self.calls == MOST_CALLS:
            self.fail(f"{self.calls} calls, and no end of them: {verb} {key}")
        if verb != "LIST" and (verb, kind) != ("DELETE", kinds.JOB):  # a Job that is over goes in its time
            self.asked += 1
            self.last_asked = f"{verb} {key}"
        if operator.calls_left is not None:
            operator.calls_left -= 1
            if operator.calls_left <= 0 and not operator.dead:
                operator.calls_left = None
                delay = self.rng.choice((0.0, 1.0)) * self.rng.random() * self.weather.latency_s * 2
                self.loop.call_later(
                    delay, lambda: None if operator.dead else self.replace(self.rng.random(), other=self.rng.random() < 0.5)
                )

    def on_apply(self, operator: Operator, manifest: Manifest) -> Manifest:
        key = Key(manifest["kind"], NAMESPACE, manifest["metadata"]["name"])
        before = self.server.get(key)
        after = self.server.apply(manifest)
        self.checks.applied(before, after)
        return after

    def on_delete(self, operator: Operator, key: Key, uid: str | None) -> None:
        before = self.server.get(key)
        self.server.delete(key, uid)
        assert before is not None
        self.checks.deleted(before)

    def on_status(self, operator: Operator, key: Key, patch: Mapping[str, Any], version: str) -> Manifest:
        before = self.server.get(key)
        after = self.server.patch_status(key, patch, version)
        assert before is not None
        if key.kind == kinds.POD.kind:
            self.checks.given_up(before, after)
            return after
        self.saw(after["status"]["phase"])
        if self.tracing:
            status = after["status"]
            self.trace(f"    {key} is {status['phase']} {[(c['type'], c['status'], c['reason']) for c in status['conditions']]}")
        if after is not before:
            self.checks.status_written(before, after)
        return after

    def on_event(self, event: Manifest) -> None:
        self.saw(f"Event {event['reason']}")
        self.trace(f"    Event {event['reason']} of {event['involvedObject']['name']}: {event['message']} (x{event['count']})")
        self.checks.told(event)


def _repairs() -> float:
    return sum(METRICS.drift.labels(kind.kind)._value.get() for kind in kinds.CHILDREN)


def seeds(seed: int) -> Iterator[int]:
    yield seed
    rng = random.Random(seed)
    while True:
        yield rng.getrandbits(32)


def replay(seed: int) -> str:
    return f"PYTHONPATH=operator:. {Path(sys.executable).name} -m tests.simulation.operator.run --seed {seed} --trace"


def simulate(seed: int, count: int, totals: Totals | None = None) -> Totals:
    """`count` schedules drawn from `seed`. A Violation says how to see the schedule that failed."""
    totals = totals or Totals()
    quiet = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        for one in seeds(seed):
            if totals.schedules >= count:
                return totals
            simulation = Simulation(one)
            try:
                simulation.run()
            except Violation as error:
                raise Violation(f"schedule {one} (number {totals.schedules + 1}): {error}\n{replay(one)}") from error
            totals.schedules += 1
            totals.calls += simulation.calls
            totals.kills += simulation.kills
            totals.virtual_s += simulation.loop.now
            totals.seen += simulation.seen
    finally:
        logging.disable(quiet)
    raise AssertionError("unreachable")


def found_after(seed: int, most: int) -> tuple[int, str] | None:
    """The number of the first of `most` schedules that fails, and what it says; None where none does."""
    totals = Totals()
    try:
        simulate(seed, most, totals)
    except Violation as error:
        return totals.schedules + 1, str(error)
    return None


def digest(seed: int) -> str:
    """A hash over all that is seen, decided and written in one schedule."""
    told: list[str] = []
    simulation = Simulation(seed, tracing=True)
    simulation.tell = told.append
    logging.disable(logging.CRITICAL)
    try:
        simulation.run()
    except Violation as error:
        told.append(str(error))
    finally:
        logging.disable(logging.NOTSET)
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:16]


def kind_of(text: str) -> str:
    """A violation without its particulars."""
    return re.sub(r"[0-9a-f]{8}-[-0-9a-f]+|\d[\d.]*", "#", text.partition("\n")[0])[:110]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--all", action="store_true", help="go on after a violation, and say how often each kind of it was seen")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    began, failed, calls = time.process_time(), 0, 0
    found: dict[str, list[int]] = {}
    for _, seed in zip(range(arguments.count), seeds(arguments.seed), strict=False):
        simulation = Simulation(seed, tracing=arguments.trace)
        try:
            simulation.run()
        except Violation as error:
            failed += 1
            found.setdefault(kind_of(str(error)), []).append(seed)
            if not arguments.all:
                print(f"{error}\n{replay(seed)}")
                return 1
        calls += simulation.calls
    seconds = time.process_time() - began
    for text, those in sorted(found.items(), key=lambda item: -len(item[1])):
        print(f"{len(those):6d}  {text}  ({', '.join(map(str, those[:3]))})")
    each_ms = seconds / arguments.count * 1e3
    print(f"{arguments.count} schedules, {failed} failed, {calls} calls, {seconds:.1f} s of CPU, {each_ms:.1f} ms each")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

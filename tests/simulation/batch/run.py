"""One schedule after another: several runs on one output, their processes interleaved call by call, with faults drawn from a seed.

python -m tests.simulation.batch.run --seed 17 --trace      one schedule, told call by call
python -m tests.simulation.batch.run --count 10000          many
"""

from __future__ import annotations

import argparse
import hashlib
import random
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from banyan_runtime.batch.documents import OWNER, Keys, Owner, Plan
from banyan_runtime.batch.protocol import (
    GONE,
    LOST,
    UNCLEAR,
    Assemble,
    Assembled,
    Compare,
    Found,
    Look,
    Measure,
    Read,
    Seen,
    Write,
    Written,
)
from tests.simulation.batch.checks import Checks, Violation
from tests.simulation.batch.process import Append, Complete, Delete, Drop, Job, Process, Put, Remove, Run, Sleep, Unreachable
from tests.simulation.batch.programs import Worker, shards, stranger, user
from tests.simulation.batch.store import Store, rendered

MOST_STEPS: Final = 6_000  # of one schedule; two hundred are usual
CONDITIONAL: Final = (Write, Complete)


@dataclass
class Totals:
    schedules: int = 0
    steps: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    """How often what was done, answered, told."""


@dataclass(frozen=True, slots=True)
class Weather:
    """How much goes wrong. Each schedule has its own."""

    faults: int  # at most
    fault: float  # chance at a call
    crash: float  # of a fault: the process dies
    late: float  # of a write whose answer is lost: that it lands later
    nap: float  # chance that a process stands still before a call
    latency_s: float

    @staticmethod
    def drawn(rng: random.Random) -> Weather:
        return Weather(
            faults=rng.choice((0, 1, 3, 10, 10)),
            fault=rng.choice((0.02, 0.1, 0.3)),
            crash=rng.choice((0.0, 0.3, 0.8)),
            late=rng.choice((0.1, 0.5)),
            nap=rng.choice((0.0, 0.01, 0.05)),
            latency_s=rng.choice((0.01, 1.0, 5.0)),
        )


class Simulation:
    """One schedule, drawn from one seed."""

    def __init__(self, seed: int, *, tracing: bool = False, crowded: bool | None = None) -> None:
        """`crowded`: short runs that displace each other while they publish. None: the seed says."""
        self.tracing, self.tell = tracing, print
        self.rng = rng = random.Random(seed)
        self.now = 0.0
        self.steps = 0
        self.calm = False
        self.seen: Counter[str] = Counter()
        self.weather = Weather.drawn(rng)
        self.max_error_percent = rng.choice((100, 100, 100, 40))
        self.checks = Checks(self)
        self.store = Store(journal=rng.random() < 0.4, changed=self.checks.changed)
        self._lines = [rng.choice((1, 1, 2, 3, 4)) for _ in range(rng.choice((1, 1, 2, 2, 3, 4)))]
        self._faults_left = self.weather.faults
        self._calm_after = rng.choice((80, 200, 400))
        self._crowded = rng.random() < 0.15 if crowded is None else crowded
        self.unplannable = frozenset(letter for letter in "ABCD" if rng.random() < 0.03)  # until somebody mends their input
        self._processes: list[Process] = []  # that live
        self._late: list[tuple[float, Callable[[], None]]] = []
        self._dead: list[str] = []
        self._number = 0
        self._restarts: dict[str, int] = {}

    # --- the world ---

    def run(self) -> None:
        try:
            self._populate()
            self._go_on()
            self.calm = True
            fresh = self._start_fresh()
            self._go_on()
            # who was late may have taken the output meanwhile
            while self._owner_run() not in (None, fresh.writing):
                fresh = self._start_fresh()
                self._go_on()
            fresh = self._start_fresh()
            self._go_on()
            self.checks.at_rest(fresh)
        except Violation:
            raise
        except Exception as error:
            text = "".join(traceback.format_exception(error)) if self.tracing else ""
            raise Violation(f"{type(error).__name__}: {error}\n{text}") from error

    def _populate(self) -> None:
        if self._crowded:
            self._crowd()
            return
        rng = self.rng
        run = rng.choice(("A", "A", None))
        main = Job("A", run, "same", rng.random() < 0.2)
        for index in range(rng.choice((1, 2, 2, 3)) if run else 1):
            self._start(main, index, rng.random() * 20)
        if run and rng.random() < 0.35:
            reason = rng.choice(("cancelled", "expired", "failed", "too-many-errors"))
            self._start(Job("A", run, "same", main.overwrite, reason), 0, rng.random() * 60)
        for letter in "BC"[: rng.choice((0, 0, 1, 1, 2))]:
            self._start_other(letter, rng.choice((5, 100, 200)))
        if rng.random() < 0.25:
            self._add(user, Job("U", None, "", False), 0.0)
        if rng.random() < 0.1:
            self._add(stranger, Job("S", None, "", False), 0.0)

    def _crowd(self) -> None:
        self.weather = replace(self.weather, nap=0.06, latency_s=0.5)
        self._lines, self._calm_after = [1], 400
        for letter in "ABCD":
            self._start(Job(letter, letter, letter, True), 0, self.rng.random() * 200)

    def starts_another(self) -> None:
        self._start_other(self.rng.choice("AD"), 1.0)

    def _start_other(self, letter: str, within: float) -> None:
        rng = self.rng
        run = rng.choice((letter, letter, None))
        job = Job(letter, run, rng.choice(("same", letter)), rng.random() < 0.6)
        for index in range(rng.choice((1, 1, 2)) if run else 1):
            self._start(job, index, rng.random() * within)

    def _start(self, job: Job, index: int, after: float, name: str | None = None) -> Process:
        return self._add(lambda sim, me: Worker(sim, me).run(), job, after, index, name)

    def _start_fresh(self) -> Process:
        """A worker without faults for the run to which the output belongs."""
        run = self._owner_run() or "Z"
        return self._start(Job(run, run, "same", False), 0, 0.0)

    def _add(
        self, program: Callable[[Simulation, Process], Run], job: Job, after: float, index: int = 0, name: str | None = None
    ) -> Process:
        self._number += 1
        rng = self.rng
        gone = [one for one in self._dead if rng.random() < 0.8]
        if rng.random() < 0.05:  # cut off from the others it is, but not gone
            gone += [one.holder for one in self._processes]
        me = Process(name or f"{job.letter.lower()}{self._number}", job, rng, number=self._number, index=index, gone=gone)
        if rng.random() < 0.15 and not self.calm:
            me.leaves_at = self.now + after + 100 * rng.random()
        me.steps = program(self, me)
        me.call = Sleep(after)
        me.ready = self.now + after
        self._processes.append(me)
        return me

    def works_on(self, run: str) -> bool:
        """Whether a write for the run may still come."""
        return bool(self._late) or any(one.writing in (None, run) and one.job.letter != "U" for one in self._processes)

    def _owner_run(self) -> str | None:
        held = self.store.objects.get(OWNER)
        return Owner.decode(held.body).run if held is not None else None

    def plan_of(self, run: str, nonce: str) -> Plan:
        """As one process makes it."""
        return Plan(run, nonce, "", "", [], shards(self._lines), max_error_percent=self.max_error_percent)

    def plan(self, run: str) -> Plan:
        return Plan.decode(self.store.objects[Keys(run).plan].body)

    # --- time ---

    def _go_on(self) -> None:
        """Until everybody has ended, or it is time that faults stop."""
        while self._processes or self._late:
            self.steps += 1
            if self.steps > MOST_STEPS:
                raise Violation(f"{MOST_STEPS} steps, and no end of them: {[(one.name, one.call) for one in self._processes]}")
            if not self.calm and self.steps > self._calm_after:
                return
            me = min(self._processes, key=_ready) if self._processes else None
            if self._late and (me is None or self._late[0][0] < me.ready):
                when, land = self._late.pop(0)
                self.now = max(self.now, when)
                land()
                continue
            assert me is not None
            self.now = max(self.now, me.ready)
            self._step(me)

    def _step(self, me: Process) -> None:
        call, kind = me.call, type(me.call)
        fault = self._fault(kind)
        if fault == "crash before":
            self._crash(me, call, fault)
            return
        answer: Any = None
        if kind in CONDITIONAL:
            answer = self._conditional(me, call, fault)
        elif kind is Read:
            there = self.store.objects.get(call.key)
            answer = Found(there.body, there.tag) if there is not None else None
        elif kind is Look:
            there = self.store.objects.get(call.name)
            answer = Seen(there.tag, len(there.body), there.run) if there is not None else None
        elif kind is Measure:
            answer = self.store.measure(call.part)
        elif kind is Assemble:
            made = rendered(self.store, me.plan, call.name, call.states, call.outcome)
            if made is not None:  # that it takes its time is the point: its last request comes when it comes
                self._trace(me, call, made)
                self._wait(me, Complete(call.name, *made, call.if_match))
                return
            answer = GONE
        elif kind is Compare:
            made, there = rendered(self.store, me.plan, call.name, call.states, call.outcome), self.store.objects.get(call.name)
            if made is None:
                answer = GONE
            else:
                tag = there.tag if there is not None and there.body == made[0] else None
                answer = Assembled(tag, len(made[0]), self.store.digest(made[0]), made[1])
        else:
            self._do(me, call, fault)
        if fault is not None and fault.startswith("crash"):
            self._crash(me, call, fault)
            return
        self._send(me, answer)

    def _do(self, me: Process, call: Any, fault: str | None) -> None:
        store = self.store
        match call:
            case Sleep():
                pass
            case Put(key, lines):
                store.parts[key] = tuple(lines)
            case Append(key, lines):
                whole = len(lines) if fault is None else self.rng.randrange(len(lines) + 1)
                store.append(key, lines[:whole], torn=fault is not None)
            case Remove(key):
                if key in store.parts or key in store.journals:
                    self.checks.removed(me, key)
                store.remove_part(key)
            case Delete(key):
                store.delete(key)
            case Drop(key, body):
                store.put(key, body, None, None)
            case _:
                raise AssertionError(call)

    def _conditional(self, me: Process, call: Any, fault: str | None) -> Any:
        if fault is None or fault in ("crash after", "answered LOST", "raises after", "unclear after"):
            wrote = self.store.put(call.key if type(call) is Write else call.name, call.body, call.if_match, me)
        else:
            wrote = None
        if fault in ("crash, late", "unclear, late", "raises, late"):
            self._late.append((self.now + self.rng.choice((1.0, 30.0, 300.0)) * self.rng.random(), lambda: self._land(me, call)))
            self._late.sort(key=_when)
        if fault is not None and fault.startswith("raises"):
            return Unreachable()
        tag = wrote.tag if wrote is not None and fault is None else None
        if type(call) is Complete:
            return Assembled(tag, len(call.body), self.store.digest(call.body), call.lines)
        if fault is not None and fault.startswith("unclear"):
            return UNCLEAR
        return Written(tag) if tag is not None else LOST

    def _land(self, me: Process, call: Any) -> None:
        wrote = self.store.put(call.key if type(call) is Write else call.name, call.body, call.if_match, me)
        self.saw("a late write landed" if wrote is not None else "a late write failed")
        self._trace(me, call, f"lands late: {wrote}")

    def _fault(self, kind: type) -> str | None:
        rng, weather = self.rng, self.weather
        if self.calm or self._faults_left <= 0 or kind in (Delete, Drop) or rng.random() >= weather.fault:
            return None
        if rng.random() < weather.crash:
            choice = rng.choice(("crash before", "crash after"))
            if kind in CONDITIONAL and rng.random() < weather.late:
                choice = "crash, late"
        elif kind not in CONDITIONAL:
            return None
        elif rng.random() < weather.late:
            choice = rng.choice(("unclear, late", "raises, late"))
        else:
            choice = rng.choice(("unclear after", "unclear", "raises after", "raises", "answered LOST", "conflict"))
        self._faults_left -= 1
        self.saw(choice)
        return choice

    def _send(self, me: Process, answer: Any) -> None:
        self._trace(me, me.call, answer)
        try:
            call = me.steps.throw(answer) if isinstance(answer, Exception) else me.steps.send(answer)
        except StopIteration as end:
            self._end(me, end.value)
            return
        self._wait(me, call)

    def _wait(self, me: Process, call: Any) -> None:
        rng = self.rng
        wait = self.weather.latency_s * rng.random()
        if type(call) is Sleep:
            wait += me.lasts(call.seconds)
        if not self.calm and rng.random() < self.weather.nap:
            wait += rng.choice((40.0, 400.0)) * rng.random()
            self.saw("a process stood still")
        me.call, me.ready = call, self.now + wait

    def _crash(self, me: Process, call: Any, how: str) -> None:
        self._trace(me, call, how)
        me.steps.close()
        self._end(me, "crashed")
        self._dead.append(me.holder)
        job = me.job
        left = self._restarts.setdefault(job.letter, 4)
        if left > 0 and job.letter not in "US" and self.rng.random() < 0.9:
            self._restarts[job.letter] = left - 1
            self._start(job, me.index, self.rng.random() * 40, me.name if self.rng.random() < 0.5 else None)

    def _end(self, me: Process, how: str) -> None:
        me.ended = how
        self.saw(f"ended: {how}")
        self._processes.remove(me)
        if self.tracing:
            self.tell(f"{self.now:8.2f} {me.name:4} — {how}")

    # --- telling ---

    def saw(self, what: str) -> None:
        self.seen[what] += 1

    def _trace(self, me: Process, call: Any, answer: Any) -> None:
        if self.tracing:
            self.tell(f"{self.now:8.2f} {me.name:4} {_short(call)}  →  {_short(answer)}")


def _short(thing: Any) -> str:
    return re.sub(r"banyan_runtime\S+?\.|_at_0x\w+", "", repr(thing))[:400]


def _ready(me: Process) -> float:
    return me.ready


def _when(late: tuple[float, Callable[[], None]]) -> float:
    return late[0]


def seeds(seed: int) -> Iterator[int]:
    yield seed
    rng = random.Random(seed)
    while True:
        yield rng.getrandbits(32)


def replay(seed: int, crowded: bool | None = None) -> str:
    return f"{Path(sys.executable).name} -m tests.simulation.batch.run --seed {seed} --trace{' --crowded' if crowded else ''}"


def simulate(seed: int, count: int, totals: Totals | None = None, *, crowded: bool | None = None) -> Totals:
    """`count` schedules drawn from `seed`. A Violation says how to see the schedule that failed."""
    totals = totals or Totals()
    for one in seeds(seed):
        if totals.schedules >= count:
            break
        simulation = Simulation(one, crowded=crowded)
        try:
            simulation.run()
        except Violation as error:
            raise Violation(f"schedule {one} (number {totals.schedules + 1}): {error}\n{replay(one, crowded)}") from error
        totals.schedules += 1
        totals.steps += simulation.steps
        totals.seen += simulation.seen
    return totals


def found_after(seed: int, most: int, *, crowded: bool | None = None) -> tuple[int, str] | None:
    """The number of the first of `most` schedules that fails, and what it says; None where none does."""
    totals = Totals()
    try:
        simulate(seed, most, totals, crowded=crowded)
    except Violation as error:
        return totals.schedules + 1, str(error)
    return None


def digest(seed: int) -> str:
    """A hash over all that is asked and answered in one schedule."""
    told: list[str] = []
    simulation = Simulation(seed, tracing=True)
    simulation.tell = told.append
    try:
        simulation.run()
    except Violation as error:
        told.append(str(error))
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:16]


def kind_of(text: str) -> str:
    """A violation without its particulars."""
    return re.sub(r"\d[\d.]*", "#", text.partition("\n")[0])[:150]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--crowded", action="store_true", default=None, help="only short runs that displace each other")
    parser.add_argument("--all", action="store_true", help="go on after a violation, and say how often each kind of it was seen")
    arguments = parser.parse_args()
    began, failed, steps = time.process_time(), 0, 0
    found: dict[str, list[int]] = {}
    for _, seed in zip(range(arguments.count), seeds(arguments.seed), strict=False):
        simulation = Simulation(seed, tracing=arguments.trace, crowded=arguments.crowded)
        try:
            simulation.run()
        except Violation as error:
            failed += 1
            found.setdefault(kind_of(str(error)), []).append(seed)
            if not arguments.all:
                print(f"{error}\n{replay(seed, arguments.crowded)}")
                return 1
        steps += simulation.steps
    seconds = time.process_time() - began
    for text, those in sorted(found.items(), key=lambda item: -len(item[1])):
        print(f"{len(those):6d}  {text}  ({', '.join(map(str, those[:3]))})")
    each_ms = seconds / arguments.count * 1e3
    print(f"{arguments.count} schedules, {failed} failed, {steps} calls, {seconds:.1f} s of CPU, {each_ms:.2f} ms each")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

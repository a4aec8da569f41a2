"""The child's side of a library that is measured in process: plays plans that come on standard input, a line each.

Runs with the library's own Python, so it imports nothing but the plan's own types.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections import deque
from typing import Protocol

from load.plan import Ask, Plan, Session
from load.sample import Sample


class Library(Protocol):
    about: str

    def add(self, number: int, prompt: tuple[int, ...], max_tokens: int, temperature: float) -> None:
        """Begin a request that ends after exactly `max_tokens` tokens."""

    def step(self) -> list[tuple[int, int]]:
        """Go on; the requests that have new tokens, and how many."""


@dataclasses.dataclass(slots=True)
class _Going:
    session: Session
    sample: Sample
    left: int  # tokens


def play(plan: Plan, library: Library) -> tuple[list[Sample], float]:
    """The samples and the wall time."""
    waiting, going, samples = deque(plan.sessions), dict[int, _Going](), list[Sample]()
    began = time.perf_counter()

    def begin(session: Session, turn: int) -> None:
        ask, number = session.asks[turn], len(samples)
        sample = Sample(turn, time.perf_counter() - began, prompt_tokens=len(ask.prompt))
        samples.append(sample)
        going[number] = _Going(session, sample, ask.max_tokens)
        library.add(number, ask.prompt, ask.max_tokens, plan.temperature)

    while waiting or going:
        while waiting and len(going) < plan.concurrent and waiting[0].due_s <= time.perf_counter() - began:
            begin(waiting.popleft(), 0)
        if not going:
            time.sleep(max(0.0, waiting[0].due_s - (time.perf_counter() - began)))
            continue
        new = library.step()
        now = time.perf_counter() - began
        for number, tokens in new:
            one = going[number]
            one.sample.pieces += [now] * tokens
            one.sample.output_tokens += tokens
            one.left -= tokens
            if one.left <= 0:
                one.sample.ended = now
                del going[number]
                if one.sample.turn + 1 < len(one.session.asks):
                    begin(one.session, one.sample.turn + 1)
    return samples, time.perf_counter() - began


def serve(make: type[Library]) -> None:
    """Load the library with the arguments of the command line, say so, then play what comes. Libraries print; that goes to the log."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    library = make(*sys.argv[1:])
    print(json.dumps({"about": library.about}), file=out, flush=True)
    for line in sys.stdin:
        name, concurrent, temperature, conversation, sessions = json.loads(line)
        assert not conversation, "a library is given token ids; a conversation is text"
        asked = tuple(Session(tuple(Ask(tuple(ids), most) for ids, most in asks), due_s) for due_s, asks in sessions)
        samples, wall_s = play(Plan(name, asked, concurrent, temperature), library)
        print(json.dumps({"samples": [dataclasses.asdict(sample) for sample in samples], "wall_s": wall_s}), file=out, flush=True)
